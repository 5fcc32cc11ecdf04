// What every plan must be, whoever asks: exact cover, packing, dense partials, a consistent join, sizes within bounds.
#include <gtest/gtest.h>

#include "plan_cases.hpp"
#include "plan_oracle.hpp"

namespace latte {
namespace {

using namespace plan_test;

using Check = Finding (*)(const PlanCase&, const Plan&);

void expect_of_every_plan(Check check, const Sweep& sweep = {}) {
  for_each_plan(sweep, [check](const PlanCase& c, GuardedPlan& guarded) { return check(c, guarded.plan()); });
}

TEST(PlanProperty, EveryRowAndVisibleKvTokenIsCoveredOnceCountedOneByOne) {
  for_each_case({.cases = 4000, .options = {.max_requests = 8}}, [](Rng& rng, PlanCase& c) -> Finding {
    for (std::int32_t& kv : c.seq_lens) kv = std::min(kv, c.prefill() ? 200 : 60);
    for (std::int32_t b = 0; !c.visible.empty() && b < c.requests(); ++b)
      for (std::int32_t t = c.query_start[b]; t < c.query_start[b + 1]; ++t)
        c.visible[t] = std::min(c.visible[t], c.seq_lens[b]);
    if (c.rows() > 600) c.config.heads = c.tokens() > 600 ? 1 : rng.in(1, c.prefill() ? 3 : 7);
    c.config.kv_block = rng.in(1, 9);
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      if (Finding finding = covers_by_counting(c, guarded.plan())) return finding;
    }
    return std::nullopt;
  });
}

TEST(PlanProperty, EveryRowAndVisibleKvTokenIsCoveredOnce) { expect_of_every_plan(covers_by_ranges, {.cases = 3000}); }

TEST(PlanProperty, NobodyIsSentOverKvThatItsRowsDoNotSee) { expect_of_every_plan(no_invisible_work, {.cases = 3000}); }

TEST(PlanProperty, KvRangesAreMultiplesOfTheBlockExceptAtTheEnd) { expect_of_every_plan(block_aligned); }

TEST(PlanProperty, RowsArePackedIntoFullTiles) { expect_of_every_plan(packed_tiles); }

TEST(PlanProperty, PartialRowsAreNumberedWithoutGapOrOverlap) { expect_of_every_plan(dense_partials); }

TEST(PlanProperty, OnlySplitPiecesArePartials) { expect_of_every_plan(partial_iff_split); }

TEST(PlanProperty, PartialsOfATileAreJoinedInKvOrder) { expect_of_every_plan(reduce_arrays); }

TEST(PlanProperty, EveryRecordBelongsToOneWorker) { expect_of_every_plan(worker_shares); }

TEST(PlanProperty, PlansStayWithinTheirSizes) {
  for_each_plan({}, [](const PlanCase& c, GuardedPlan& guarded) -> Finding {
    const Plan& plan = guarded.plan();
    const PlanSizes& sizes = guarded.sizes();
    const auto tiles = static_cast<std::int64_t>(plan.reduce_final_map.size());
    const auto records = static_cast<std::int64_t>(plan.work_info_set.size());
    const auto partials = static_cast<std::int64_t>(plan.reduce_partial_map.size());
    if (!guarded.guards_intact()) return "wrote outside plan_sizes().words";
    if (tiles > sizes.tiles) return "tiles " + std::to_string(tiles) + " > " + std::to_string(sizes.tiles);
    if (records > sizes.records) return "records " + std::to_string(records) + " > " + std::to_string(sizes.records);
    if (partials > sizes.partials)
      return "partials " + std::to_string(partials) + " > " + std::to_string(sizes.partials);
    if (plan.partial_rows() > sizes.partial_rows) return "partial_rows " + std::to_string(plan.partial_rows());
    if (c.config.policy.kind != PolicyKind::balanced) return std::nullopt;
    const std::int64_t workers = c.config.workers;
    const std::int64_t extra = c.prefill() ? workers - 1 : 2 * workers - 1;
    if (records > tiles + extra) return "balanced: more than " + std::to_string(extra) + " extra records";
    if (partials > 2 * extra) return "balanced: more than " + std::to_string(2 * extra) + " partials";
    return std::nullopt;
  });
}

TEST(PlanProperty, EveryArrayLiesInTheBufferWhereMetaDataSays) {
  for_each_plan({}, [](const PlanCase& c, GuardedPlan& guarded) -> Finding {
    const Plan& plan = guarded.plan();
    const std::int32_t* base = guarded.words().data();
    const auto meta = plan.work_meta_data;
    const auto lies_at = [&](const void* data, MetaField offset, std::size_t size_bytes) {
      const auto end = static_cast<std::int64_t>(meta[offset]) * 4 + static_cast<std::int64_t>(size_bytes);
      return data == base + meta[offset] && meta[offset] >= kMetaFields && end <= guarded.sizes().words * 4;
    };
    if (meta.data() != base || meta.size() != kMetaFields) return "work_meta_data";
    if (!lies_at(plan.work_indptr.data(), kMetaOffsetIndptr, plan.work_indptr.size_bytes())) return "work_indptr";
    if (!lies_at(plan.work_info_set.data(), kMetaOffsetRecords, plan.work_info_set.size_bytes())) return "records";
    if (!lies_at(plan.reduce_indptr.data(), kMetaOffsetReduceIndptr, plan.reduce_indptr.size_bytes()))
      return "reduce_indptr";
    if (!lies_at(plan.reduce_final_map.data(), kMetaOffsetReduceFinal, plan.reduce_final_map.size_bytes()))
      return "reduce_final_map";
    if (!lies_at(plan.reduce_partial_map.data(), kMetaOffsetReducePartial, plan.reduce_partial_map.size_bytes()))
      return "reduce_partial_map";
    if (meta[kMetaVersion] != kPlanVersion || meta[kMetaRequests] != c.requests() ||
        meta[kMetaRecords] != static_cast<std::int32_t>(plan.work_info_set.size()) ||
        meta[kMetaTiles] != static_cast<std::int32_t>(plan.reduce_final_map.size()) ||
        meta[kMetaHeads] != c.config.heads || meta[kMetaRowTile] != c.config.row_tile ||
        meta[kMetaKvBlock] != c.config.kv_block)
      return "counts: " + join(meta);
    return std::nullopt;
  });
}

TEST(PlanProperty, ArraysDoNotMoveWithTheLengths) {
  for_each_case({.cases = 2000}, [](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      const std::vector<std::int32_t> meta(guarded.plan().work_meta_data.begin(), guarded.plan().work_meta_data.end());
      PlanCase empty;
      empty.config = c.config;
      const Result<Plan> other = make_plan(empty.config, empty.lengths(), guarded.words());
      if (!other.ok()) return "empty batch: " + other.status().message();
      for (std::int32_t field = kMetaOffsetIndptr; field <= kMetaOffsetReducePartial; ++field)
        if (meta[field] != other->work_meta_data[field])
          return "offset " + std::to_string(field) + " depends on the lengths";
    }
    return std::nullopt;
  });
}

TEST(PlanProperty, FewerWorkersByLimitIsTheSamePlanAsFewerWorkers) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    const std::int32_t fewer = rng.in(1, c.config.workers);
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      PlanCase by_limit = c, by_count = c;
      by_limit.config.limits.workers = fewer;
      by_count.config.limits.workers = 0;
      by_count.config.workers = fewer;
      const GuardedPlan limited(by_limit), counted(by_count);
      if (!limited.error().empty() || !counted.error().empty()) return limited.error() + counted.error();
      if (limited.plan().workers() != fewer) return std::to_string(fewer) + " workers asked for";
      const auto a = limited.plan().work_info_set, b = counted.plan().work_info_set;
      if (!std::equal(a.begin(), a.end(), b.begin(), b.end())) return "records differ for " + std::to_string(fewer);
    }
    return std::nullopt;
  });
}

TEST(PlanProperty, PlanSizesGrowWithEveryLimit) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const Result<PlanSizes> small = plan_sizes(c.config);
      if (!small.ok()) return small.status().message();
      for (int field = 0; field < 7; ++field) {
        PlanConfig config = c.config;
        Limits& limits = config.limits;
        const std::int32_t more = rng.in(1, 50);
        if (field == 0) limits.max_requests += more;
        if (field == 1) limits.max_query_tokens += more;
        if (field == 2 && limits.max_total_query_tokens > 0) limits.max_total_query_tokens += more;
        if (field == 3) limits.max_kv_tokens += more;
        if (field == 4 && limits.max_total_kv_tokens > 0) limits.max_total_kv_tokens += more;
        if (field == 5) config.workers += more;
        if (field == 6 && limits.workers > 0) limits.workers += more;
        const Result<PlanSizes> large = plan_sizes(config);
        if (!large.ok()) return large.status().message();
        if (large->tiles < small->tiles || large->records < small->records || large->partials < small->partials ||
            large->partial_rows < small->partial_rows || large->words < small->words)
          return "limit " + std::to_string(field) + " + " + std::to_string(more) + " makes something smaller";
      }
    }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
