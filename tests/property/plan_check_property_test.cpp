// check_plan accepts what the planner makes and rejects what was changed afterwards.
#include <array>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "plan_cases.hpp"

namespace latte {
namespace {

using namespace plan_test;

// A copy of a plan that can be damaged, one array at a time.
struct Copy {
  std::vector<std::int32_t> meta, indptr, reduce_indptr, partial_map;
  std::vector<WorkRecord> records;
  std::vector<RowRange> final_map;

  explicit Copy(const Plan& plan)
      : meta(plan.work_meta_data.begin(), plan.work_meta_data.end()),
        indptr(plan.work_indptr.begin(), plan.work_indptr.end()),
        reduce_indptr(plan.reduce_indptr.begin(), plan.reduce_indptr.end()),
        partial_map(plan.reduce_partial_map.begin(), plan.reduce_partial_map.end()),
        records(plan.work_info_set.begin(), plan.work_info_set.end()),
        final_map(plan.reduce_final_map.begin(), plan.reduce_final_map.end()) {}

  Plan view() const { return {meta, indptr, records, reduce_indptr, final_map, partial_map}; }
};

// Another value: near the old one, or anywhere.
std::int32_t other_value(Rng& rng, std::int32_t old) {
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kHigh = std::numeric_limits<std::int32_t>::max();
  const std::array<std::int32_t, 8> near = {1, -1, 2, -2, 16, -16, 64, -64};
  const std::int32_t step = near[static_cast<std::size_t>(rng.in(0, 7))];
  const std::int32_t value = rng.one_in(4)                                         ? rng.in(kLow, kHigh)
                             : rng.one_in(4)                                       ? rng.pick({kLow, -1, 0, kHigh})
                             : (step > 0 ? old > kHigh - step : old < kLow - step) ? 0
                                                                                   : old + step;
  return value != old ? value : old == 0 ? 1 : 0;
}

void damage(Rng& rng, std::int32_t& word) { word = other_value(rng, word); }

template <class T>
T& any_of(Rng& rng, std::vector<T>& values) {
  return values[static_cast<std::size_t>(rng.in(0, static_cast<std::int32_t>(values.size()) - 1))];
}

TEST(PlanCheckProperty, AcceptsEveryPlan) {
  for_each_plan({}, [](const PlanCase& c, GuardedPlan& guarded) -> Finding {
    const Status status = check_plan(c.config, c.lengths(), guarded.plan());
    if (!status.ok()) return status.message();
    return std::nullopt;
  });
}

using Damage = bool (*)(Rng&, Copy&);  // false: this plan has nothing to damage in this way

void expect_detected(Damage apply) {
  std::int32_t applied = 0;
  for_each_case({.cases = 3000}, [&](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      Copy copy(guarded.plan());
      if (!apply(rng, copy)) continue;
      ++applied;
      const Status status = check_plan(c.config, c.lengths(), copy.view());
      if (status.ok()) return "a damaged plan was accepted";
      if (status.code() != Code::corrupt_plan) return "wrong code: " + status.message();
    }
    return std::nullopt;
  });
  EXPECT_GT(applied, 200) << "the damage was hardly ever possible";
}

// Every field of a record is determined by the rest of the plan, so that any other value is wrong.
TEST(PlanCheckProperty, DetectsAChangedRecordField) {
  expect_detected([](Rng& rng, Copy& copy) {
    if (copy.records.empty()) return false;
    WorkRecord& r = any_of(rng, copy.records);
    const std::array<std::int32_t*, 8> fields = {&r.request,  &r.partial_row, &r.row_begin, &r.row_end,
                                                 &r.kv_begin, &r.kv_end,      &r.kv_after,  &r.tile};
    damage(rng, *fields[static_cast<std::size_t>(rng.in(0, 7))]);
    return true;
  });
}

TEST(PlanCheckProperty, DetectsARecordDoneTwiceInsteadOfAnother) {
  expect_detected([](Rng& rng, Copy& copy) {
    if (copy.records.size() < 2) return false;
    WorkRecord& lost = any_of(rng, copy.records);
    const WorkRecord& twice = any_of(rng, copy.records);
    if (lost == twice) return false;
    lost = twice;
    return true;
  });
}

TEST(PlanCheckProperty, DetectsAMissingOrExtraRecord) {
  expect_detected([](Rng& rng, Copy& copy) {
    if (copy.records.empty()) return false;
    if (rng.one_in(2))
      copy.records.pop_back();
    else
      copy.records.push_back(any_of(rng, copy.records));
    // As consistent as it can be, so that the cover itself has to be looked at.
    copy.meta[kMetaRecords] = static_cast<std::int32_t>(copy.records.size());
    for (std::int32_t& end : copy.indptr) end = std::min(end, copy.meta[kMetaRecords]);
    copy.indptr.back() = copy.meta[kMetaRecords];
    return true;
  });
}

TEST(PlanCheckProperty, DetectsABorderMovedIntoAnotherPiece) {
  expect_detected([](Rng& rng, Copy& copy) {
    for (int attempt = 0; attempt < 20 && !copy.records.empty(); ++attempt) {
      WorkRecord& r = any_of(rng, copy.records);
      if (r.kv_begin == 0 || r.kv_end - r.kv_begin < 2) continue;
      const std::int32_t block = copy.meta[kMetaKvBlock];
      r.kv_begin += rng.one_in(2) ? -block : std::min(block, r.kv_end - r.kv_begin - 1);
      return true;
    }
    return false;
  });
}

// Both pieces at a border that is in no block's place: everything still adds up.
TEST(PlanCheckProperty, DetectsABorderInsideABlock) {
  expect_detected([](Rng&, Copy& copy) {
    if (copy.meta[kMetaKvBlock] < 2) return false;
    for (WorkRecord& first : copy.records)
      for (WorkRecord& second : copy.records) {
        if (first.tile != second.tile || first.kv_end != second.kv_begin || first.kv_end == first.kv_begin) continue;
        if (second.kv_end - second.kv_begin < 2) continue;
        ++first.kv_end, --first.kv_after, ++second.kv_begin;
        return true;
      }
    return false;
  });
}

TEST(PlanCheckProperty, DetectsWorkersThatSkipOrLeaveTheRecords) {
  expect_detected([](Rng& rng, Copy& copy) {
    const std::int32_t way = rng.in(0, 3);
    if (way == 0) copy.indptr.front() = rng.pick({-1, 1});
    if (way == 1) damage(rng, copy.indptr.back());
    if (way == 2) copy.indptr.pop_back();
    if (way == 3) any_of(rng, copy.indptr) = rng.pick({-1, static_cast<std::int32_t>(copy.records.size()) + 1});
    return true;
  });
}

TEST(PlanCheckProperty, DetectsAChangedReduceArray) {
  expect_detected([](Rng& rng, Copy& copy) {
    const std::int32_t way = rng.in(0, 5);
    if (way == 0) damage(rng, any_of(rng, copy.reduce_indptr));
    if (copy.final_map.empty()) return way == 0;
    if (way == 1) damage(rng, any_of(rng, copy.final_map).begin);
    if (way == 2) damage(rng, any_of(rng, copy.final_map).end);
    if (way <= 2) return true;
    if (copy.partial_map.empty()) return false;
    if (way == 3) damage(rng, any_of(rng, copy.partial_map));
    if (way == 4) std::swap(copy.partial_map.front(), copy.partial_map.back());
    if (way == 5) copy.partial_map.pop_back();
    return true;
  });
}

TEST(PlanCheckProperty, DetectsAChangedCount) {
  expect_detected([](Rng& rng, Copy& copy) {
    damage(rng, copy.meta[static_cast<std::size_t>(rng.in(kMetaVersion, kMetaKvBlock))]);
    return true;
  });
}

// Told of equal pieces it would count them with the other workers at rest.
TEST(PlanCheckProperty, DetectsEqualPiecesOfWhichAWorkerHasSeveral) {
  expect_detected([](Rng& rng, Copy& copy) {
    bool several = false;
    for (std::size_t w = 0; w + 1 < copy.indptr.size(); ++w) several |= copy.indptr[w + 1] - copy.indptr[w] > 1;
    copy.meta[kMetaSplits] = -rng.in(1, 100);
    return several;
  });
}

TEST(PlanCheckProperty, DetectsAWrongEstimate) {
  expect_detected([](Rng& rng, Copy& copy) {
    damage(rng, copy.meta[static_cast<std::size_t>(rng.in(kMetaMakespanLow, kMetaMakespanHigh))]);
    return true;
  });
}

// Buffers are sized by the config's own limits and policy: a plan that is right in itself may still not fit them.
TEST(PlanCheckProperty, DetectsAPlanThatDoesNotFitItsSizes) {
  std::int32_t applied = 0;
  for_each_case({}, [&applied](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = Policy::uniform(rng.in(2, 60));
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    c.config.policy = rng.one_in(2) ? Policy::balanced() : Policy::uniform(1);
    const Result<PlanSizes> sizes = plan_sizes(c.config);
    if (!sizes.ok()) return sizes.status().message();
    if (static_cast<std::int64_t>(guarded.plan().work_info_set.size()) <= sizes->records &&
        static_cast<std::int64_t>(guarded.plan().reduce_partial_map.size()) <= sizes->partials)
      return std::nullopt;
    ++applied;
    if (check_plan(c.config, c.lengths(), guarded.plan()).ok()) return "a plan above its sizes was accepted";
    return std::nullopt;
  });
  EXPECT_GT(applied, 100);
}

TEST(PlanCheckProperty, DetectsAPlanOfAnotherBatch) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    if (c.rows() == 0 || !c.visible.empty()) return std::nullopt;
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      PlanCase other = c;
      std::int32_t b = rng.in(0, c.requests() - 1);
      while (c.query_start[b + 1] == c.query_start[b]) b = (b + 1) % c.requests();
      if (other.seq_lens[b] == 0) return std::nullopt;
      --other.seq_lens[b];
      if (check_plan(other.config, other.lengths(), guarded.plan()).ok())
        return "accepted although request " + std::to_string(b) + " is one token shorter";
    }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
