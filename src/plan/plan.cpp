#include "latte/plan.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "core/checked.hpp"
#include "plan/policies.hpp"
#include "plan/prefill.hpp"
#include "plan/uniform.hpp"

namespace latte {
namespace plan {

void Emitter::begin_tile(const Tile& tile, std::int32_t pieces) {
  tile_ = tile;
  ++tile_index_;
  split_ = pieces > 1;
  if (split_) ++split_tiles_;
  const auto t = static_cast<std::size_t>(tile_index_);
  out_.reduce_indptr[t] = partials_;
  out_.reduce_final[t] = {tile.row_begin, tile.row_end};
}

void Emitter::piece(std::int32_t block_begin, std::int32_t block_end, std::int64_t position) {
  const auto begin = static_cast<std::int64_t>(block_begin) * config_.kv_block;
  const auto end = std::min(static_cast<std::int64_t>(block_end) * config_.kv_block, std::int64_t{tile_.kv_extent});
  WorkRecord& record = out_.records[static_cast<std::size_t>(position)];
  record = {.request = tile_.request,
            .partial_row = split_ ? partial_rows_ : -1,
            .row_begin = tile_.row_begin,
            .row_end = tile_.row_end,
            .kv_begin = static_cast<std::int32_t>(begin),
            .kv_end = static_cast<std::int32_t>(end),
            .kv_after = lengths_.seq_lens[static_cast<std::size_t>(tile_.request)] - static_cast<std::int32_t>(end),
            .tile = tile_index_};
  if (!split_) return;
  out_.reduce_partial[static_cast<std::size_t>(partials_++)] = partial_rows_;
  partial_rows_ += tile_.rows();
}

void Emitter::finish(std::int32_t tiles) { out_.reduce_indptr[static_cast<std::size_t>(tiles)] = partials_; }

namespace {

// Each fills all arrays, and the counts of work_meta_data that belong to tiles and partials.
Outcome plan_decode(const PlanConfig& config, const StepLengths& lengths, const Buffers& buffers) {
  std::int64_t line_ticks = 0;
  const std::int32_t tiles = make_tiles(config, lengths, buffers.tiles, line_ticks);
  const Step step{.config = config,
                  .tiles = buffers.tiles.first(static_cast<std::size_t>(tiles)),
                  .line_ticks = line_ticks,
                  .fixed = fixed_ticks(config)};

  Emitter emitter(config, lengths, buffers);
  Outcome outcome{};
  switch (config.policy.kind) {
    case PolicyKind::balanced: outcome = emit_balanced(step, buffers, emitter); break;
    case PolicyKind::uniform:
      outcome = emit_uniform(step, config.policy.n, buffers, emitter);
      outcome.makespan = uniform_makespan(step, config.policy.n, buffers.loads);
      break;
    case PolicyKind::batch_invariant: outcome = emit_batch_invariant(step, buffers, emitter); break;
  }
  emitter.finish(tiles);
  buffers.meta[kMetaTiles] = tiles;
  buffers.meta[kMetaSplitTiles] = emitter.split_tiles();
  buffers.meta[kMetaPartials] = emitter.partials();
  buffers.meta[kMetaPartialRows] = emitter.partial_rows();
  return outcome;
}

Outcome plan_prefill(const PlanConfig& config, const StepLengths& lengths, const PrefillScratch& scratch,
                     const Buffers& buffers) {
  const PrefillStep step = prefill_step(config, lengths, scratch);
  const Outcome outcome = deal_prefill(step);
  emit_prefill(step, outcome.records, buffers);
  return outcome;
}

}  // namespace
}  // namespace plan

Result<Plan> make_plan(const PlanConfig& given, const StepLengths& lengths, std::span<std::int32_t> words) {
  const Result<PlanSizes> sizes = plan_sizes(given);
  if (!sizes.ok()) return sizes.status();
  if (static_cast<std::int64_t>(words.size()) < sizes->words)
    return Status{Code::invalid_argument, "words", "at least " + std::to_string(sizes->words),
                  std::to_string(words.size())};
  if (Status status = plan::check_lengths(given, lengths); !status.ok()) return status;

  PlanConfig config = given;
  config.workers = plan::worker_count(given);
  const plan::Buffers buffers = plan::carve(config, *sizes, words);
  const plan::Outcome outcome =
      config.op == Op::prefill
          ? plan::plan_prefill(config, lengths, plan::carve_prefill(config, *sizes, words), buffers)
          : plan::plan_decode(config, lengths, buffers);

  const plan::Ticks makespan = outcome.makespan;
  buffers.meta[kMetaVersion] = kPlanVersion;
  buffers.meta[kMetaWorkers] = config.workers;
  buffers.meta[kMetaRequests] = static_cast<std::int32_t>(lengths.seq_lens.size());
  buffers.meta[kMetaRecords] = static_cast<std::int32_t>(outcome.records);
  buffers.meta[kMetaHeads] = config.heads;
  buffers.meta[kMetaRowTile] = config.row_tile;
  buffers.meta[kMetaKvBlock] = config.kv_block;
  buffers.meta[kMetaSplits] = outcome.splits;
  buffers.meta[kMetaMakespanLow] = makespan.low;
  buffers.meta[kMetaMakespanHigh] = makespan.high;

  const auto tiles = static_cast<std::size_t>(buffers.meta[kMetaTiles]);
  const auto partials = static_cast<std::size_t>(buffers.meta[kMetaPartials]);
  return Plan{.work_meta_data = buffers.meta,
              .work_indptr = buffers.indptr,
              .work_info_set = buffers.records.first(static_cast<std::size_t>(outcome.records)),
              .reduce_indptr = buffers.reduce_indptr.first(tiles + 1),
              .reduce_final_map = buffers.reduce_final.first(tiles),
              .reduce_partial_map = buffers.reduce_partial.first(partials)};
}

std::int64_t record_ticks(const PlanConfig& config, const WorkRecord& record) {
  const std::int64_t blocks = ceil_div(record.kv_end - record.kv_begin, config.kv_block);
  return config.cost.piece_ticks + blocks * config.cost.block(record.row_end - record.row_begin) +
         (record.kv_begin > 0 ? plan::split_ticks(config) : 0);
}

std::int64_t record_ticks(const PlanConfig& config, const Plan& plan, const WorkRecord& record) {
  const std::int64_t ticks = record_ticks(config, record);
  if (plan.work_meta_data[kMetaSplits] >= 0) return ticks;
  const auto records = static_cast<std::int64_t>(plan.work_info_set.size());
  const auto busy = static_cast<std::int32_t>(records * plan::kFullCrowd / plan.workers());
  return plan::relieved(ticks, plan::crowding(busy, config.cost), plan::fixed_ticks(config));
}

std::int64_t makespan_ticks(const PlanConfig& config, const Plan& plan) {
  std::int64_t makespan = 0;
  for (std::size_t w = 0; w + 1 < plan.work_indptr.size(); ++w) {
    std::int64_t load = 0;
    for (std::int32_t r = plan.work_indptr[w]; r < plan.work_indptr[w + 1]; ++r)
      load += record_ticks(config, plan, plan.work_info_set[static_cast<std::size_t>(r)]);
    makespan = std::max(makespan, load);
  }
  return makespan;
}

Result<OwnedPlan> OwnedPlan::take(std::vector<std::int32_t> words) {
  OwnedPlan owned;
  owned.words_ = std::move(words);
  Result<Plan> plan = view_plan(owned.words_);
  if (!plan.ok()) return plan.status();
  owned.plan_ = *plan;
  return owned;
}

Result<OwnedPlan> OwnedPlan::make(const PlanConfig& config, const StepLengths& lengths) {
  const Result<PlanSizes> sizes = plan_sizes(config);
  if (!sizes.ok()) return sizes.status();
  OwnedPlan owned;
  try {
    owned.words_.resize(static_cast<std::size_t>(sizes->words));
  } catch (const std::bad_alloc&) {
    return Status{Code::out_of_memory, "limits", "a plan that fits this machine's memory",
                  std::to_string(sizes->words) + " words"};
  }
  Result<Plan> plan = make_plan(config, lengths, owned.words_);
  if (!plan.ok()) return plan.status();
  owned.plan_ = *plan;
  return owned;
}

}  // namespace latte
