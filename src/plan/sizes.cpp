// Sizes from limits. With R requests, W workers and t(r) = ceil(r * heads / row_tile) tiles for r query tokens:
//
//   tiles    <= min(R * t(max_query), R + total_query * heads / row_tile)
//               since sum ceil(x_b) <= R + floor(sum x_b).
//   uniform(n):          records <= n * tiles, partials likewise (none for n = 1).
//   batch_invariant(c):  a tile with extent e has ceil(e / c) <= 1 + (e - 1) / c pieces (1 if e = 0), and a request's
//               tiles are at most t(max_query), so  records <= tiles + t(max_query) * (total_kv / c).
//               A split tile has at least one extra piece, so  partials <= 2 * t(max_query) * (total_kv / c) as well.
//   balanced:   the cut line has W - 1 cuts, hence at most W - 1 extra pieces; even(n) is a candidate only with at most
//               W pieces, uniform(n) only with fewer than 2W extra ones. So  records <= tiles + 2W - 1,  and as a split
//               tile has at least one extra piece,  partials <= 2 * (2W - 1).
//
// Every partial has at most row_tile rows.
//
// Prefill: tiles never mix heads, so t(r) = heads * ceil(r / row_tile), and
//   tiles    <= heads * min(R * ceil(max_query / row_tile), R + total_query / row_tile).
//   uniform(n) and batch_invariant(c) as above; batch_invariant(0) never splits.
//   balanced:   tiles are whole, but for those cut where one of W shares ends. So at most W - 1 extra pieces:
//               records <= tiles + W - 1,  partials <= 2 * (W - 1).
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/checked.hpp"
#include "plan/layout.hpp"
#include "plan/prefill.hpp"

namespace latte::plan {
namespace {

constexpr std::int32_t kMaxTicks = 1 << 28;
constexpr std::int32_t kMaxRowTile = 1 << 12;
constexpr std::int64_t kTileWords = sizeof(Tile) / sizeof(std::int32_t);

Status bad(const char* field, const char* expected, std::int64_t got) {
  return {Code::invalid_argument, field, expected, std::to_string(got)};
}

Status check_config(const PlanConfig& config) {
  const Limits& limits = config.limits;
  const CostModel& cost = config.cost;
  // Enums that came as bare numbers through a cast can be anything.
  if (config.op > Op::prefill) return bad("op", "decode (0) or prefill (1)", static_cast<std::int64_t>(config.op));
  if (config.mask > Mask::none) return bad("mask", "causal (0) or none (1)", static_cast<std::int64_t>(config.mask));
  if (config.policy.kind > PolicyKind::batch_invariant)
    return bad("policy.kind", "balanced (0), uniform (1) or batch_invariant (2)",
               static_cast<std::int64_t>(config.policy.kind));
  if (config.heads < 1) return bad("heads", ">= 1", config.heads);
  if (config.row_tile < 1 || config.row_tile > kMaxRowTile) return bad("row_tile", "1 .. 4096", config.row_tile);
  if (config.kv_block < 1) return bad("kv_block", ">= 1", config.kv_block);
  if (config.workers < 1 || config.workers > kMaxWorkers) return bad("workers", "1 .. 65536", config.workers);
  if (limits.workers < 0) return bad("limits.workers", ">= 0", limits.workers);
  if (limits.max_requests < 0) return bad("limits.max_requests", ">= 0", limits.max_requests);
  if (limits.max_query_tokens < 0) return bad("limits.max_query_tokens", ">= 0", limits.max_query_tokens);
  if (limits.max_total_query_tokens < 0)
    return bad("limits.max_total_query_tokens", ">= 0", limits.max_total_query_tokens);
  if (limits.max_kv_tokens < 0) return bad("limits.max_kv_tokens", ">= 0", limits.max_kv_tokens);
  if (limits.max_total_kv_tokens < 0) return bad("limits.max_total_kv_tokens", ">= 0", limits.max_total_kv_tokens);
  if (config.policy.kind == PolicyKind::uniform && (config.policy.n < 1 || config.policy.n > 4096))
    return bad("policy.n", "1 .. 4096 splits", config.policy.n);
  const bool may_be_whole = config.op == Op::prefill;
  if (config.policy.kind == PolicyKind::batch_invariant && config.policy.n < (may_be_whole ? 0 : 1))
    return bad("policy.n", may_be_whole ? ">= 0 KV tokens a chunk" : ">= 1 KV tokens a chunk", config.policy.n);
  if (config.shared_cache_tokens < 0) return bad("shared_cache_tokens", ">= 0", config.shared_cache_tokens);
  const auto in_range = [](std::int32_t ticks) { return ticks >= 0 && ticks <= kMaxTicks; };
  if (!in_range(cost.piece_ticks)) return bad("cost.piece_ticks", "0 .. 2^28", cost.piece_ticks);
  if (!in_range(cost.split_ticks)) return bad("cost.split_ticks", "0 .. 2^28", cost.split_ticks);
  if (!in_range(cost.block_ticks)) return bad("cost.block_ticks", "0 .. 2^28", cost.block_ticks);
  if (!in_range(cost.granule_ticks)) return bad("cost.granule_ticks", "0 .. 2^28", cost.granule_ticks);
  if (cost.row_granule < 1) return bad("cost.row_granule", ">= 1", cost.row_granule);
  if (cost.alone_percent < 1 || cost.alone_percent > 100)
    return bad("cost.alone_percent", "1 .. 100", cost.alone_percent);
  if (cost.block(1) < 1) return bad("cost.block_ticks", "a block that costs >= 1", cost.block_ticks);
  return {};
}

// Summed costs must stay far from 2^63, so that the planner can add and scale them without a thought.
bool costs_fit(const PlanConfig& config, const Limits& limits, std::int64_t tiles_per_request, std::int64_t tiles) {
  constexpr std::int64_t kMostTicks = std::int64_t{1} << 60;
  std::int64_t blocks = 0, ticks = 0;
  const std::int64_t block_ticks =
      config.cost.block(config.row_tile) + config.cost.piece_ticks + config.cost.split_ticks;
  const bool all = checked_add(limits.max_total_kv_tokens / config.kv_block, limits.max_requests, blocks) &&
                   checked_mul(blocks, tiles_per_request, blocks) && checked_add(blocks, 4 * tiles, blocks) &&
                   checked_mul(blocks, block_ticks, ticks) && ticks < kMostTicks;
  if (config.op == Op::decode || !all) return all;
  // A Dealer numbers its workers by load * leaves, where leaves < 2 * workers. List scheduling loads none with more
  // than an equal share of all and a piece, so the largest is below  2 * all + (piece + 1) * leaves < 2^62.
  return checked_mul(std::int64_t{limits.max_kv_tokens} / config.kv_block + 2, block_ticks, ticks) &&
         checked_mul(ticks, Dealer::leaves(worker_count(config)), ticks) && ticks < kMostTicks;
}

}  // namespace

std::int32_t worker_count(const PlanConfig& config) {
  return config.limits.workers > 0 ? std::min(config.workers, config.limits.workers) : config.workers;
}

Limits resolve(const Limits& limits) {
  Limits full = limits;
  constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
  if (full.max_total_query_tokens == 0)
    full.max_total_query_tokens = static_cast<std::int32_t>(
        std::min(kMaxInt, static_cast<std::int64_t>(full.max_requests) * full.max_query_tokens));
  if (full.max_total_kv_tokens == 0)
    full.max_total_kv_tokens = static_cast<std::int64_t>(full.max_requests) * full.max_kv_tokens;
  return full;
}

std::int64_t words_needed(const PlanConfig& config, const PlanSizes& sizes) {
  const std::int64_t workers = worker_count(config), scratch = layout(sizes, workers).scratch;
  if (config.op == Op::prefill) return scratch + prefill_scratch_words(config, sizes);
  return scratch + sizes.tiles * kTileWords + 4 * (workers + 1) + 2 * workers;
}

Buffers carve(const PlanConfig& config, const PlanSizes& sizes, std::span<std::int32_t> words) {
  const std::int32_t workers = worker_count(config);
  const Layout at = layout(sizes, workers);
  const auto take = [&]<class T>(std::span<T>& array, std::int64_t offset, std::int64_t count) {
    array = {reinterpret_cast<T*>(words.data() + offset), static_cast<std::size_t>(count)};
    return offset + count * static_cast<std::int64_t>(sizeof(T) / sizeof(std::int32_t));
  };
  Buffers b;
  take(b.meta, 0, kMetaFields);
  take(b.indptr, at.indptr, workers + 1);
  take(b.records, at.records, sizes.records);
  take(b.reduce_indptr, at.reduce_indptr, sizes.tiles + 1);
  take(b.reduce_final, at.reduce_final, sizes.tiles);
  take(b.reduce_partial, at.reduce_partial, sizes.partials);
  if (config.op == Op::decode) {
    const std::int64_t cuts = take(b.tiles, at.scratch, sizes.tiles);
    const std::int64_t loads = take(b.cuts, cuts, 2 * (std::int64_t{workers} + 1));
    take(b.loads, loads, workers);
  }

  b.meta[kMetaOffsetIndptr] = static_cast<std::int32_t>(at.indptr);
  b.meta[kMetaOffsetRecords] = static_cast<std::int32_t>(at.records);
  b.meta[kMetaOffsetReduceIndptr] = static_cast<std::int32_t>(at.reduce_indptr);
  b.meta[kMetaOffsetReduceFinal] = static_cast<std::int32_t>(at.reduce_final);
  b.meta[kMetaOffsetReducePartial] = static_cast<std::int32_t>(at.reduce_partial);
  return b;
}

}  // namespace latte::plan

namespace latte {

Result<PlanSizes> plan_sizes(const PlanConfig& config) {
  if (Status status = plan::check_config(config); !status.ok()) return status;
  const Limits limits = plan::resolve(config.limits);
  const auto too_large = [](const char* field, const char* expected, std::string got) {
    return Status{Code::out_of_limits, field, expected, std::move(got)};
  };

  constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
  const std::int64_t total_rows = static_cast<std::int64_t>(limits.max_total_query_tokens) * config.heads;
  if (total_rows > kMaxInt)
    return too_large("limits.max_total_query_tokens", "tokens * heads below 2^31", std::to_string(total_rows));
  const bool prefill = config.op == Op::prefill;
  const std::int64_t longest_query = std::min(limits.max_query_tokens, limits.max_total_query_tokens);
  const std::int64_t tiles_per_request = prefill ? ceil_div(longest_query, config.row_tile) * config.heads
                                                 : ceil_div(longest_query * config.heads, config.row_tile);
  const std::int64_t workers = plan::worker_count(config);

  PlanSizes sizes;
  const std::int64_t requests = limits.max_requests;
  sizes.tiles = std::min(requests * tiles_per_request,
                         prefill ? (requests + limits.max_total_query_tokens / config.row_tile) * config.heads
                                 : requests + total_rows / config.row_tile);
  if (sizes.tiles > kMaxInt / 64)
    return too_large("limits.max_requests", "below 2^25 tiles", std::to_string(sizes.tiles));
  // The sum itself may not fit 64 bits.
  if (!plan::costs_fit(config, limits, tiles_per_request, sizes.tiles))
    return too_large("limits.max_total_kv_tokens", "summed costs below 2^60 ticks",
                     "more for " + std::to_string(limits.max_total_kv_tokens) + " tokens");

  switch (config.policy.kind) {
    case PolicyKind::balanced: {
      const std::int64_t extra = prefill ? workers - 1 : 2 * workers - 1;
      sizes.records = sizes.tiles + extra;
      sizes.partials = std::min(sizes.records, 2 * extra);
      break;
    }
    case PolicyKind::uniform:
      sizes.records = sizes.tiles * config.policy.n;
      sizes.partials = config.policy.n > 1 ? sizes.records : 0;
      break;
    case PolicyKind::batch_invariant: {
      const std::int64_t chunk = round_up(config.policy.n, config.kv_block);
      const std::int64_t extra = chunk == 0 ? 0 : tiles_per_request * (limits.max_total_kv_tokens / chunk);
      if (extra > kMaxInt) return too_large("limits.max_total_kv_tokens", "below 2^31 chunks", std::to_string(extra));
      sizes.records = sizes.tiles + extra;
      sizes.partials = std::min(sizes.records, 2 * extra);
      break;
    }
  }
  sizes.partial_rows = sizes.partials * config.row_tile;
  sizes.words = plan::words_needed(config, sizes);
  if (sizes.words > kMaxInt || sizes.partial_rows > kMaxInt)
    return too_large("limits", "a plan below 2^31 words and partial rows",
                     std::to_string(sizes.words) + " words and " + std::to_string(sizes.partial_rows) + " rows");
  return sizes;
}

}  // namespace latte
