// What the device planner is told, and the memory it works in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/call.hpp"
#include "cuda/plan/sums.hpp"
#include "plan/arithmetic.hpp"

namespace latte::cuda::planner {

// The lengths' addresses are on the device, as is `words`, which is 8-byte aligned.
struct Task {
  LengthsView lengths;
  std::int32_t* words;
  std::int32_t requests;
  std::int32_t read_requests;  // 0 where the limits allow no query token: nobody has a tile
  std::int32_t query_limit;    // query tokens of the step, at most
  std::int32_t query_most;     // and of a request
  bool kv_total_binds;         // each request within its limit can still be too much for all of them
  PlanConfig config;           // workers and limits resolved
  plan::Fixed fixed;
  Divisor by_heads, by_row_tile, by_kv_block, by_granule, by_workers, by_chunk;
  LongDivisor share;                                 // by workers
  Divisor by_small[plan::kMaxUniformCandidate + 1];  // [0] is for the policy's own n
  plan::Layout at;
  std::int64_t tiles;  // at most

  LATTE_DEVICE const Divisor& by_splits(std::int32_t n) const {
    return by_small[n <= plan::kMaxUniformCandidate ? n : 0];
  }
  // CostModel::block() and plan::blocks_for(), without their divisions.
  LATTE_DEVICE std::int64_t block_ticks(std::int32_t rows) const {
    return config.cost.block_ticks + by_granule.ceil(rows) * std::int64_t{config.cost.granule_ticks};
  }

  LATTE_DEVICE std::int32_t* indptr() const { return words + at.indptr; }
  LATTE_DEVICE WorkRecord* records() const { return reinterpret_cast<WorkRecord*>(words + at.records); }
  LATTE_DEVICE std::int32_t* reduce_indptr() const { return words + at.reduce_indptr; }
  LATTE_DEVICE RowRange* reduce_final() const { return reinterpret_cast<RowRange*>(words + at.reduce_final); }
  LATTE_DEVICE std::int32_t* reduce_partial() const { return words + at.reduce_partial; }
};

// `config` and `limits` come with their defaults filled in; `query_tokens` are the rows of the query tensor.
inline Task make_task(const PlanConfig& config, const PlanSizes& sizes, std::int32_t requests,
                      std::int32_t query_tokens, const LengthsView& lengths, std::int32_t* words) {
  const Limits& limits = config.limits;
  const std::int32_t query_limit = std::max(0, std::min(limits.max_total_query_tokens, query_tokens));
  Task task{.lengths = lengths,
            .words = words,
            .requests = requests,
            .read_requests = sizes.tiles > 0 ? requests : 0,
            .query_limit = query_limit,
            .query_most = std::min(limits.max_query_tokens, query_limit),
            .kv_total_binds = std::int64_t{requests} * limits.max_kv_tokens > limits.max_total_kv_tokens,
            .config = config,
            .fixed = plan::fixed_ticks(config),
            .by_heads = Divisor::of(config.heads),
            .by_row_tile = Divisor::of(config.row_tile),
            .by_kv_block = Divisor::of(config.kv_block),
            .by_granule = Divisor::of(config.cost.row_granule),
            .by_workers = Divisor::of(config.workers),
            .by_chunk = {},
            .share = LongDivisor::of(config.workers),
            .by_small = {},
            .at = plan::layout(sizes, config.workers),
            .tiles = sizes.tiles};
  if (config.policy.kind == PolicyKind::batch_invariant) task.by_chunk = Divisor::of(plan::chunk_blocks(config));
  if (config.policy.kind == PolicyKind::uniform) task.by_small[0] = Divisor::of(config.policy.n);
  for (std::int32_t n = 1; n <= plan::kMaxUniformCandidate; ++n) task.by_small[n] = Divisor::of(n);
  return task;
}

// even(most), over all tiles.
struct EvenCandidate {
  std::int32_t most;
  plan::Even all;
};

// Steps of this size stay in shared memory.
inline constexpr std::int32_t kSharedRequests = 1024, kSharedTiles = 1024, kSharedWorkers = 512;
inline constexpr std::int32_t kPrefixRows = plan::kMaxUniformCandidate - 1;  // uniform(1) needs none

template <std::int32_t Requests = kSharedRequests, std::int32_t Tiles = kSharedTiles,
          std::int32_t Workers = kSharedWorkers>
struct SharedScratch {
  static constexpr std::int32_t kRequests = Requests, kTiles = Tiles, kWorkers = Workers;

  std::int64_t line[Tiles];
  EvenCandidate even[plan::kEvenCandidates];
  plan::Cut cuts[plan::kSnapCandidates * (Workers + 1)];
  EmitSums dealt[Workers];
  RowRange rows[Tiles];
  std::int32_t extra[plan::kMaxUniformCandidate + 1];
  std::int32_t start[Requests + 1], seq_len[Requests], first_tile[Requests + 1];
  std::int32_t request[Tiles], extent[Tiles], behind[Tiles], blocks[Tiles];
  std::int32_t first_piece[Tiles + 1], first_partial[Tiles], partial_row[Tiles];
  std::int32_t prefix[kPrefixRows * (Tiles + 1)];
};

// Lengths as they are used: clamped to the limits.
struct RequestArrays {
  std::int32_t* start;       // [requests + 1] first query token
  std::int32_t* seq_len;     // [requests]
  std::int32_t* first_tile;  // [requests + 1]
};

struct TileArrays {
  std::int64_t* line;         // where it begins on the line of unsplit costs
  RowRange* rows;             // query rows
  std::int32_t* request;      //
  std::int32_t* extent;       // tokens that its most far-sighted row sees
  std::int32_t* behind;       // tokens of the request behind the extent
  std::int32_t* blocks;       // the extent in KV blocks
  std::int32_t* first_piece;  // [tiles + 1] number of its first piece, in tile and KV order
  // First partial and its row; without `partial_row` both are looked up in the plan itself.
  std::int32_t* first_partial;
  std::int32_t* partial_row;

  plan::Cut* trial;      // [kSnapCandidates][workers + 1]
  plan::Cut* cuts;       // [workers + 1] the chosen ones, where `trial` does not last; else null
  EmitSums* dealt;       // [workers] up to and with the worker's cut: cuts inside a tile, and what they split
  std::int32_t* prefix;  // [prefix_rows][prefix_stride] first pieces under uniform candidates
  std::int32_t prefix_rows;
  std::int32_t prefix_stride;
};

template <class Shared>
LATTE_DEVICE RequestArrays shared_requests(Shared& shared) {
  return {shared.start, shared.seq_len, shared.first_tile};
}

// Records are written last, and there are at least as many as requests: their 8 words a piece are free until then.
LATTE_DEVICE inline RequestArrays global_requests(const Task& task) {
  std::int32_t* free_words = task.words + task.at.records;
  const std::int64_t entries = std::int64_t{task.read_requests} + 1;
  return {free_words, free_words + entries, free_words + 2 * entries};
}

template <class Shared>
LATTE_DEVICE bool fits(const Task& task, std::int32_t tiles, const Shared&) {
  return tiles <= Shared::kTiles && task.config.workers <= Shared::kWorkers;
}

template <class Shared>
LATTE_DEVICE TileArrays shared_arrays(Shared& shared) {
  return {.line = shared.line,
          .rows = shared.rows,
          .request = shared.request,
          .extent = shared.extent,
          .behind = shared.behind,
          .blocks = shared.blocks,
          .first_piece = shared.first_piece,
          .first_partial = shared.first_partial,
          .partial_row = shared.partial_row,
          .trial = shared.cuts,
          .cuts = nullptr,
          .dealt = shared.dealt,
          .prefix = shared.prefix,
          .prefix_rows = kPrefixRows,
          .prefix_stride = Shared::kTiles + 1};
}

// In the scratch words of the plan's buffer (src/plan/sizes.cpp: 7 a tile, 6 a worker and 4), and where arrays of the
// plan are not written yet. 64-bit arrays begin at an even word:
//   line 2T | request T | extent T | behind T | blocks T | first_piece T + 1 | cuts 2(W + 1) | dealt 3W
// with at most two words lost to alignment.
LATTE_DEVICE inline TileArrays global_arrays(const Task& task) {
  const std::int64_t tiles = task.tiles, workers = task.config.workers;
  const std::int64_t line = task.at.scratch + (task.at.scratch & 1), request = line + 2 * tiles;
  const std::int64_t first_piece = request + 4 * tiles, end = first_piece + tiles + 1, cuts = end + (end & 1);
  std::int32_t* words = task.words;
  return {.line = reinterpret_cast<std::int64_t*>(words + line),
          .rows = task.reduce_final(),
          .request = words + request,
          .extent = words + request + tiles,
          .behind = words + request + 2 * tiles,
          .blocks = words + request + 3 * tiles,
          .first_piece = words + first_piece,
          .first_partial = task.reduce_indptr(),
          .partial_row = nullptr,
          .trial = reinterpret_cast<plan::Cut*>(task.records()),
          .cuts = reinterpret_cast<plan::Cut*>(words + cuts),
          .dealt = reinterpret_cast<EmitSums*>(words + cuts + 2 * (workers + 1)),
          .prefix = words + first_piece,
          .prefix_rows = 1,
          .prefix_stride = 0};
}

// Last index in [low, high) whose value is at most x. Values do not fall, and the first is at most x. Three values a
// round, loaded together: half as many rounds as with one. Places behind the end stand for the last, so a result there
// means the last.
template <class T>
LATTE_DEVICE std::int32_t last_at_most(const T* values, std::int32_t low, std::int32_t high, T x) {
  const std::int32_t last = high - 1;
  LATTE_ROLLED
  for (std::int32_t shift = floor_log2(last - low) & ~1; shift >= 0; shift -= 2) {
    const T first = values[std::min(low + (1 << shift), last)], second = values[std::min(low + (2 << shift), last)],
            third = values[std::min(low + (3 << shift), last)];
    low += (static_cast<std::int32_t>(first <= x) + static_cast<std::int32_t>(second <= x) +
            static_cast<std::int32_t>(third <= x))
           << shift;
  }
  return std::min(low, last);
}

}  // namespace latte::cuda::planner
