// Lengths into tiles: how many each request has, then each tile by itself.
#pragma once

#include "cuda/plan/scratch.hpp"

namespace latte::cuda::planner {

// How many tiles there are, and how many a request has where all have the same number; else 0.
struct TileCounts {
  std::int32_t tiles = 0, each = 0;
};

// Query tokens that are good need no clamping: [begin, end) of request b, given those before are good.
LATTE_DEVICE inline bool good_queries(const Task& task, std::int32_t b, std::int32_t begin, std::int32_t end) {
  const auto first = static_cast<std::uint32_t>(begin), last = static_cast<std::uint32_t>(end);
  return (last <= static_cast<std::uint32_t>(task.query_limit)) &
         (last - first <= static_cast<std::uint32_t>(task.query_most)) & (b > 0 || begin == 0);
}

// Lengths on a device are trusted, but a wrong one must not make the planner write outside its buffers. So each is
// clamped to its limit, and their sums too: what would pass a total is cut off. Good lengths stay as they are; and
// where all requests have as many tiles, as in most steps, there is nothing to scan.
template <class Block>
LATTE_DEVICE TileCounts read_requests(Block& block, const Task& task, const RequestArrays& requests) {
  const std::int32_t count = task.read_requests;
  const std::int32_t* given = task.lengths.query_start;
  if (count == 0) return {};
  const auto tiles_for = [&](std::int32_t begin, std::int32_t end) {
    const std::uint32_t rows = (static_cast<std::uint32_t>(end) - static_cast<std::uint32_t>(begin)) *
                               static_cast<std::uint32_t>(task.config.heads);
    return task.by_row_tile.ceil(static_cast<std::int32_t>(rows));
  };
  // Everything is loaded before anything is looked at: the loads wait for memory together.
  const bool usual = block.all(count, [&](std::int32_t b) {
    const std::int32_t before = given[std::max(b, 1) - 1], begin = given[b], end = given[b + 1];
    const std::int32_t seq_len = task.lengths.seq_lens[b], most = task.config.limits.max_kv_tokens;
    requests.start[b] = begin;
    if (b + 1 == count) requests.start[b + 1] = end;
    requests.seq_len[b] = std::clamp(seq_len, 0, most);
    return good_queries(task, b, begin, end) & (b == 0 || tiles_for(before, begin) == tiles_for(begin, end));
  });
  if (task.kv_total_binds)
    block.template scan<Ticks>(
        count, [&](std::int32_t b) -> Ticks { return {requests.seq_len[b]}; },
        [&](std::int32_t b, const Ticks& own, const Ticks& before) {
          const std::int64_t left = task.config.limits.max_total_kv_tokens - before.ticks;
          requests.seq_len[b] = static_cast<std::int32_t>(std::clamp<std::int64_t>(left, 0, own.ticks));
        });
  if (usual) {
    const std::int32_t each = tiles_for(requests.start[0], requests.start[1]);
    if (each <= plan::kMaxUniformCandidate) return {count * each, each};
  } else if (!block.all(count, [&](std::int32_t b) { return good_queries(task, b, given[b], given[b + 1]); })) {
    const auto first_query = [&](std::int64_t before) {
      return static_cast<std::int32_t>(std::min<std::int64_t>(before, task.query_limit));
    };
    block.template scan<Ticks>(
        count,
        [&](std::int32_t b) -> Ticks {
          return {std::clamp<std::int64_t>(std::int64_t{given[b + 1]} - given[b], 0, task.query_most)};
        },
        [&](std::int32_t b, const Ticks& own, const Ticks& before) {
          requests.start[b] = first_query(before.ticks);
          if (b + 1 == count) requests.start[b + 1] = first_query(before.ticks + own.ticks);
        });
  }
  const TileCount counted = block.template scan<TileCount>(
      count,
      [&](std::int32_t b) -> TileCount {
        return {static_cast<std::uint32_t>(tiles_for(requests.start[b], requests.start[b + 1]))};
      },
      [&](std::int32_t b, const TileCount& own, const TileCount& before) {
        requests.first_tile[b] = static_cast<std::int32_t>(before.tiles);
        if (b + 1 == count) requests.first_tile[b + 1] = static_cast<std::int32_t>(before.tiles + own.tiles);
      });
  return {.tiles = static_cast<std::int32_t>(counted.tiles)};
}

// The largest number of tokens any row of the tile sees. Causal bounds grow with the token, so the last one decides.
LATTE_DEVICE inline std::int32_t tile_extent(const Task& task, const RequestArrays& requests, std::int32_t request,
                                             const RowRange& rows) {
  const std::int32_t seq_len = requests.seq_len[request];
  const std::int32_t last = task.by_heads.floor(rows.end - 1);
  if (task.lengths.visible == nullptr)
    return task.config.mask == Mask::none ? seq_len : plan::causal_tokens(seq_len, requests.start[request + 1], last);
  std::int32_t extent = 0;
  LATTE_ROLLED
  for (std::int32_t token = task.by_heads.floor(rows.begin); token <= last; ++token)
    extent = std::max(extent, std::min(task.lengths.visible[token], seq_len));
  return extent;
}

struct Tile {
  std::int32_t rows, blocks;
};

LATTE_DEVICE inline Tile make_tile(const Task& task, const RequestArrays& requests, std::int32_t each,
                                   const TileArrays& tiles, std::int32_t t) {
  const PlanConfig& config = task.config;
  const std::int32_t b =
      each > 0 ? task.by_small[each].floor(t) : last_at_most(requests.first_tile, 0, task.read_requests, t);
  const std::int32_t first_tile = each > 0 ? b * each : requests.first_tile[b];
  const std::int32_t first = requests.start[b] * config.heads;
  const std::int32_t end = requests.start[b + 1] * config.heads;
  const std::int32_t begin = first + (t - first_tile) * config.row_tile;
  const RowRange rows{begin, end - begin > config.row_tile ? begin + config.row_tile : end};
  const std::int32_t extent = tile_extent(task, requests, b, rows);
  const std::int32_t blocks = task.by_kv_block.ceil(extent);
  tiles.rows[t] = rows;
  task.reduce_final()[t] = rows;
  tiles.request[t] = b;
  tiles.extent[t] = extent;
  tiles.behind[t] = requests.seq_len[b] - extent;
  tiles.blocks[t] = blocks;
  return {rows.end - rows.begin, blocks};
}

LATTE_DEVICE inline Ticks unsplit_ticks(const Task& task, const Tile& tile) {
  return {task.fixed.piece + tile.blocks * task.block_ticks(tile.rows)};
}

}  // namespace latte::cuda::planner
