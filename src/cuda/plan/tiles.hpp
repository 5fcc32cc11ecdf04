// Lengths into tiles: a scan over requests numbers query tokens and tiles; then each tile by itself.
#pragma once

#include "cuda/plan/scratch.hpp"

namespace latte::cuda::planner {

// What scans add up offers map(), which takes a function over each of its numbers: a thread block moves numbers, not
// structures.

struct TileCount {
  std::uint32_t tiles = 0;
  LATTE_DEVICE TileCount operator+(const TileCount& o) const { return {tiles + o.tiles}; }
  LATTE_DEVICE TileCount operator-(const TileCount& o) const { return {tiles - o.tiles}; }
  template <class Fn>
  LATTE_DEVICE TileCount map(const Fn& fn) const {
    return {fn(tiles)};
  }
};

struct Ticks {
  std::int64_t ticks = 0;
  LATTE_DEVICE Ticks operator+(const Ticks& o) const { return {ticks + o.ticks}; }
  LATTE_DEVICE Ticks operator-(const Ticks& o) const { return {ticks - o.ticks}; }
  template <class Fn>
  LATTE_DEVICE Ticks map(const Fn& fn) const {
    return {fn(ticks)};
  }
};

struct RequestSums {
  std::int64_t queries = 0;
  std::uint32_t tiles = 0;  // wraps only where queries pass their limit
  LATTE_DEVICE RequestSums operator+(const RequestSums& o) const { return {queries + o.queries, tiles + o.tiles}; }
  LATTE_DEVICE RequestSums operator-(const RequestSums& o) const { return {queries - o.queries, tiles - o.tiles}; }
  template <class Fn>
  LATTE_DEVICE RequestSums map(const Fn& fn) const {
    return {fn(queries), fn(tiles)};
  }
};

// Lengths on a device are trusted, but a wrong one must not make the planner write outside its buffers. So each is
// clamped to its limit, and their sums too: what would pass a total is cut off. Good lengths stay as they are. Returns
// the number of tiles.
template <class Block>
LATTE_DEVICE std::int32_t read_requests(Block& block, const Task& task, const RequestArrays& requests) {
  const std::int32_t count = task.read_requests;
  const auto tiles_for = [&](std::int32_t queries) {
    return static_cast<std::uint32_t>(task.by_row_tile.ceil(queries * task.config.heads));
  };
  const auto store_tiles = [&](std::int32_t b, std::uint32_t own, std::uint32_t before) {
    requests.first_tile[b] = static_cast<std::int32_t>(before);
    if (b + 1 == count) requests.first_tile[b + 1] = static_cast<std::int32_t>(before + own);
  };
  const auto first_query = [&](std::int64_t before) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(before, task.query_limit));
  };
  const RequestSums sums = block.template scan<RequestSums>(
      count,
      [&](std::int32_t b) -> RequestSums {
        const std::int64_t given = std::int64_t{task.lengths.query_start[b + 1]} - task.lengths.query_start[b];
        requests.seq_len[b] = std::clamp(task.lengths.seq_lens[b], 0, task.config.limits.max_kv_tokens);
        const auto queries = static_cast<std::int32_t>(std::clamp<std::int64_t>(given, 0, task.query_most));
        return {queries, tiles_for(queries)};
      },
      [&](std::int32_t b, const RequestSums& own, const RequestSums& before) {
        requests.start[b] = first_query(before.queries);
        if (b + 1 == count) requests.start[b + 1] = first_query(before.queries + own.queries);
        store_tiles(b, own.tiles, before.tiles);
      });
  if (task.kv_total_binds)
    block.template scan<Ticks>(
        count, [&](std::int32_t b) -> Ticks { return {requests.seq_len[b]}; },
        [&](std::int32_t b, const Ticks& own, const Ticks& before) {
          const std::int64_t left = task.config.limits.max_total_kv_tokens - before.ticks;
          requests.seq_len[b] = static_cast<std::int32_t>(std::clamp<std::int64_t>(left, 0, own.ticks));
        });
  if (sums.queries <= task.query_limit) return static_cast<std::int32_t>(sums.tiles);
  // Some query tokens were cut off: tiles are counted again.
  const TileCount counted = block.template scan<TileCount>(
      count, [&](std::int32_t b) -> TileCount { return {tiles_for(requests.start[b + 1] - requests.start[b])}; },
      [&](std::int32_t b, const TileCount& own, const TileCount& before) { store_tiles(b, own.tiles, before.tiles); });
  return static_cast<std::int32_t>(counted.tiles);
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

// The request of tile t. Where every request so far has one tile, which decoding often has, there is nothing to search.
LATTE_DEVICE inline std::int32_t request_of(const Task& task, const RequestArrays& requests, std::int32_t t) {
  const std::int32_t* first = requests.first_tile;
  if (t < task.read_requests && first[t] == t && first[t + 1] > t) return t;
  return last_at_most(first, 0, task.read_requests, t);
}

struct Tile {
  std::int32_t rows, blocks;
};

LATTE_DEVICE inline Tile make_tile(const Task& task, const RequestArrays& requests, const TileArrays& tiles,
                                   std::int32_t t) {
  const PlanConfig& config = task.config;
  const std::int32_t b = request_of(task, requests, t);
  const std::int32_t first = requests.start[b] * config.heads;
  const std::int32_t end = requests.start[b + 1] * config.heads;
  const std::int32_t begin = first + (t - requests.first_tile[b]) * config.row_tile;
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
