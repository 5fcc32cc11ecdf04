// What a plan must be, said again from the public contract and nothing else: no code is shared with the planner or
// with check_plan. Every function returns what is wrong, or nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan_cases.hpp"

namespace latte::plan_test {

inline std::string text(const WorkRecord& r) {
  return "record{request " + std::to_string(r.request) + ", partial " + std::to_string(r.partial_row) + ", rows " +
         std::to_string(r.row_begin) + "-" + std::to_string(r.row_end) + ", kv " + std::to_string(r.kv_begin) + "-" +
         std::to_string(r.kv_end) + ", after " + std::to_string(r.kv_after) + ", tile " + std::to_string(r.tile) + "}";
}

// How many of its request's tokens each query token sees, and whose it is.
struct Truth {
  std::vector<std::int32_t> request_of_token;
  std::vector<std::int32_t> visible_of_token;

  explicit Truth(const PlanCase& c) {
    for (std::int32_t b = 0; b < c.requests(); ++b) {
      const std::int32_t queries = c.query_start[b + 1] - c.query_start[b];
      for (std::int32_t j = 0; j < queries; ++j) {
        const std::int32_t last_seen = c.seq_lens[b] - queries + j;  // by the causal mask
        std::int32_t sees = c.config.mask == Mask::causal ? std::max(last_seen + 1, 0) : c.seq_lens[b];
        if (!c.visible.empty()) sees = c.visible[visible_of_token.size()];
        request_of_token.push_back(b);
        visible_of_token.push_back(sees);
      }
    }
  }

  // The most any row of [begin, end) sees.
  std::int32_t extent(const PlanCase& c, std::int32_t row_begin, std::int32_t row_end) const {
    std::int32_t most = 0;
    for (std::int32_t row = row_begin; row < row_end; ++row)
      most = std::max(most, visible_of_token[static_cast<std::size_t>(c.token_of(row))]);
    return most;
  }
};

struct Tile {
  std::int32_t request, row_begin, row_end;
};

inline std::vector<Tile> expected_tiles(const PlanCase& c) {
  std::vector<Tile> tiles;
  for (std::int32_t b = 0; b < c.requests(); ++b) {
    if (c.prefill()) {
      for (std::int32_t token = c.query_start[b]; token < c.query_start[b + 1]; token += c.config.row_tile)
        for (std::int32_t head = 0; head < c.config.heads; ++head)
          tiles.push_back({b, head * c.tokens() + token,
                           head * c.tokens() + std::min(token + c.config.row_tile, c.query_start[b + 1])});
      continue;
    }
    const std::int32_t end = c.query_start[b + 1] * c.config.heads;
    for (std::int32_t row = c.query_start[b] * c.config.heads; row < end; row += c.config.row_tile)
      tiles.push_back({b, row, std::min(row + c.config.row_tile, end)});
  }
  return tiles;
}

// Each record names rows of its own request and a range inside the request; without this nothing else can be asked.
inline Finding record_ranges(const PlanCase& c, const Plan& plan) {
  for (const WorkRecord& r : plan.work_info_set) {
    if (r.request < 0 || r.request >= c.requests()) return "no such request: " + text(r);
    if (r.row_begin < 0 || r.row_end > c.rows() || r.row_begin >= r.row_end) return "no rows: " + text(r);
    if (c.token_of(r.row_begin) < c.query_start[r.request] || c.token_of(r.row_end - 1) >= c.query_start[r.request + 1])
      return "rows of another: " + text(r);
    if (c.prefill() && c.head_of(r.row_begin) != c.head_of(r.row_end - 1)) return "two heads: " + text(r);
    if (r.kv_begin < 0 || r.kv_end < r.kv_begin || r.kv_end > c.seq_lens[r.request]) return "KV range: " + text(r);
    if (r.kv_after != c.seq_lens[r.request] - r.kv_end) return "kv_after: " + text(r);
  }
  return std::nullopt;
}

// Token by token: a counter for every (row, KV position).
inline Finding covers_by_counting(const PlanCase& c, const Plan& plan) {
  if (Finding finding = record_ranges(c, plan)) return finding;
  const Truth truth(c);
  std::int32_t width = 1;
  for (std::int32_t kv : c.seq_lens) width = std::max(width, kv);
  const auto rows = static_cast<std::size_t>(c.rows());
  std::vector<std::uint8_t> count(rows * static_cast<std::size_t>(width)), touched(rows);
  for (const WorkRecord& r : plan.work_info_set)
    for (auto row = static_cast<std::size_t>(r.row_begin); row < static_cast<std::size_t>(r.row_end); ++row) {
      touched[row] = 1;
      for (std::int32_t kv = r.kv_begin; kv < r.kv_end; ++kv)
        ++count[row * static_cast<std::size_t>(width) + static_cast<std::size_t>(kv)];
    }
  for (std::size_t row = 0; row < rows; ++row) {
    const auto token = static_cast<std::size_t>(c.token_of(static_cast<std::int32_t>(row)));
    if (!touched[row]) return "row " + std::to_string(row) + " is written by nobody";
    for (std::int32_t kv = 0; kv < width; ++kv) {
      const int times = count[row * static_cast<std::size_t>(width) + static_cast<std::size_t>(kv)];
      if (times > 1 || (kv < truth.visible_of_token[token] && times != 1))
        return "row " + std::to_string(row) + " KV " + std::to_string(kv) + " covered " + std::to_string(times) + "x";
    }
  }
  return std::nullopt;
}

// The same for long requests: the ranges of every row, sorted, must join up from 0 to what the row sees.
inline Finding covers_by_ranges(const PlanCase& c, const Plan& plan) {
  if (Finding finding = record_ranges(c, plan)) return finding;
  const Truth truth(c);
  std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>> ranges(static_cast<std::size_t>(c.rows()));
  for (const WorkRecord& r : plan.work_info_set)
    for (std::int32_t row = r.row_begin; row < r.row_end; ++row)
      ranges[static_cast<std::size_t>(row)].emplace_back(r.kv_begin, r.kv_end);
  for (std::size_t row = 0; row < ranges.size(); ++row) {
    std::sort(ranges[row].begin(), ranges[row].end());
    const auto token = static_cast<std::size_t>(c.token_of(static_cast<std::int32_t>(row)));
    const std::int32_t sees = truth.visible_of_token[token];
    std::int32_t reached = 0;
    for (const auto& [begin, end] : ranges[row]) {
      if (begin != reached)
        return "row " + std::to_string(row) + ": gap or overlap at KV " + std::to_string(std::min(begin, reached));
      reached = end;
    }
    if (ranges[row].empty() || reached < sees)
      return "row " + std::to_string(row) + " sees " + std::to_string(sees) + ", covered to " + std::to_string(reached);
  }
  return std::nullopt;
}

// Nobody is sent over KV that none of its rows sees, but for the rest of a block.
inline Finding no_invisible_work(const PlanCase& c, const Plan& plan) {
  if (Finding finding = record_ranges(c, plan)) return finding;
  const Truth truth(c);
  for (const WorkRecord& r : plan.work_info_set) {
    const std::int32_t extent = truth.extent(c, r.row_begin, r.row_end);
    if (r.kv_end - extent >= c.config.kv_block || (r.kv_end > extent && extent == 0))
      return "its rows see " + std::to_string(extent) + " tokens: " + text(r);
    if (r.kv_begin == r.kv_end && (extent > 0 || r.kv_begin != 0 || r.partial_row != -1))
      return "an empty record of a tile that sees something, or one that is a partial: " + text(r);
    if (r.kv_begin > 0 && r.kv_begin >= extent) return "begins behind what its rows see: " + text(r);
  }
  return std::nullopt;
}

inline Finding block_aligned(const PlanCase& c, const Plan& plan) {
  const Truth truth(c);
  for (const WorkRecord& r : plan.work_info_set) {
    if (r.kv_begin % c.config.kv_block != 0) return "begin is no multiple of the KV block: " + text(r);
    const bool at_end = r.kv_end == truth.extent(c, r.row_begin, r.row_end);
    if (r.kv_end % c.config.kv_block != 0 && !at_end) return "end is no multiple of the KV block: " + text(r);
  }
  return std::nullopt;
}

// Rows are packed: tiles are full but for a request's last one (in prefill, a head's), in the order of plan.md, and
// every record is one whole tile.
inline Finding packed_tiles(const PlanCase& c, const Plan& plan) {
  const std::vector<Tile> tiles = expected_tiles(c);
  if (plan.reduce_final_map.size() != tiles.size())
    return std::to_string(plan.reduce_final_map.size()) + " tiles, expected " + std::to_string(tiles.size());
  for (std::size_t t = 0; t < tiles.size(); ++t)
    if (plan.reduce_final_map[t] != RowRange{tiles[t].row_begin, tiles[t].row_end})
      return "reduce_final_map[" + std::to_string(t) + "]";
  for (const WorkRecord& r : plan.work_info_set) {
    if (r.tile < 0 || r.tile >= static_cast<std::int32_t>(tiles.size())) return "no such tile: " + text(r);
    const Tile& tile = tiles[static_cast<std::size_t>(r.tile)];
    if (r.request != tile.request || r.row_begin != tile.row_begin || r.row_end != tile.row_end)
      return "not the rows of its tile: " + text(r);
  }
  return std::nullopt;
}

// Partial rows are handed out without gap or overlap.
inline Finding dense_partials(const PlanCase&, const Plan& plan) {
  std::vector<std::pair<std::int32_t, std::int32_t>> ranges;
  for (const WorkRecord& r : plan.work_info_set)
    if (r.partial_row != -1) ranges.emplace_back(r.partial_row, r.partial_row + r.row_end - r.row_begin);
  std::sort(ranges.begin(), ranges.end());
  std::int32_t reached = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != reached) return "partial rows: gap or overlap at " + std::to_string(std::min(begin, reached));
    reached = end;
  }
  if (plan.partial_rows() != reached)
    return "partial_rows says " + std::to_string(plan.partial_rows()) + ", used " + std::to_string(reached);
  if (plan.work_meta_data[kMetaPartials] != static_cast<std::int32_t>(ranges.size())) return "kMetaPartials";
  return std::nullopt;
}

// The records of each tile in KV order; assumes packed_tiles holds.
inline std::vector<std::vector<WorkRecord>> pieces_of_tiles(const Plan& plan) {
  std::vector<std::vector<WorkRecord>> pieces(plan.reduce_final_map.size());
  for (const WorkRecord& r : plan.work_info_set) pieces[static_cast<std::size_t>(r.tile)].push_back(r);
  for (auto& tile : pieces)
    std::sort(tile.begin(), tile.end(), [](const auto& a, const auto& b) { return a.kv_begin < b.kv_begin; });
  return pieces;
}

inline Finding partial_iff_split(const PlanCase& c, const Plan& plan) {
  if (Finding finding = packed_tiles(c, plan)) return finding;
  for (const auto& pieces : pieces_of_tiles(plan)) {
    if (pieces.empty()) return "a tile without a record";
    for (const WorkRecord& r : pieces)
      if ((r.partial_row == -1) != (pieces.size() == 1) || r.partial_row < -1)
        return "one of " + std::to_string(pieces.size()) + " pieces: " + text(r);
  }
  return std::nullopt;
}

inline Finding reduce_arrays(const PlanCase& c, const Plan& plan) {
  if (Finding finding = packed_tiles(c, plan)) return finding;
  const auto pieces = pieces_of_tiles(plan);
  if (plan.reduce_indptr.size() != pieces.size() + 1 || plan.reduce_indptr[0] != 0) return "reduce_indptr's shape";
  std::int32_t split_tiles = 0;
  for (std::size_t t = 0; t < pieces.size(); ++t) {
    const std::int32_t begin = plan.reduce_indptr[t], end = plan.reduce_indptr[t + 1];
    const std::size_t expected = pieces[t].size() > 1 ? pieces[t].size() : 0;
    if (end < begin || static_cast<std::size_t>(end - begin) != expected)
      return "reduce_indptr steps by " + std::to_string(end - begin) + " at tile " + std::to_string(t);
    if (static_cast<std::size_t>(end) > plan.reduce_partial_map.size()) return "reduce_indptr leaves the map";
    split_tiles += expected > 0;
    for (std::size_t i = 0; i < expected; ++i)
      if (plan.reduce_partial_map[static_cast<std::size_t>(begin) + i] != pieces[t][i].partial_row)
        return "merge order is not KV order at tile " + std::to_string(t) + ", partial " + std::to_string(i);
  }
  if (plan.reduce_partial_map.size() != static_cast<std::size_t>(plan.reduce_indptr.back()))
    return "partial map's size";
  if (plan.work_meta_data[kMetaSplitTiles] != split_tiles) return "kMetaSplitTiles";
  return std::nullopt;
}

inline Finding worker_shares(const PlanCase& c, const Plan& plan) {
  const auto workers = static_cast<std::size_t>(c.config.workers);
  if (plan.workers() != c.config.workers) return "workers: " + std::to_string(plan.workers());
  if (plan.work_indptr.size() != workers + 1 || plan.work_indptr[0] != 0) return "work_indptr's shape";
  for (std::size_t w = 0; w < workers; ++w)
    if (plan.work_indptr[w + 1] < plan.work_indptr[w]) return "work_indptr falls at " + std::to_string(w);
  if (static_cast<std::size_t>(plan.work_indptr[workers]) != plan.work_info_set.size()) return "work_indptr's end";
  return std::nullopt;
}

// The cost model of plan.hpp, with the split cost raised so that a cut is never cheaper than the widest block.
inline std::int64_t fixed_ticks_of_a_cut(const PlanConfig& config) {
  return std::max<std::int64_t>(static_cast<std::int64_t>(config.cost.piece_ticks) + config.cost.split_ticks,
                                config.cost.block(config.row_tile));
}

inline std::int64_t ticks(const PlanConfig& config, const WorkRecord& r) {
  const std::int64_t blocks = (r.kv_end - r.kv_begin + config.kv_block - 1) / config.kv_block;
  const std::int64_t fixed = r.kv_begin > 0 ? fixed_ticks_of_a_cut(config) : config.cost.piece_ticks;
  return fixed + blocks * config.cost.block(r.row_end - r.row_begin);
}

// Equal pieces are counted with the workers that have none at rest: what is above a cut's fixed ticks takes as much
// less time as there are fewer workers busy, in 1/1024, down to what a block takes alone.
inline std::int64_t relieved(const PlanConfig& config, const Plan& plan, std::int64_t load) {
  if (plan.work_meta_data[kMetaSplits] >= 0) return load;
  const auto busy = static_cast<std::int64_t>(plan.work_info_set.size()) * 1024 / plan.workers();
  const std::int64_t factor = std::max<std::int64_t>(busy, config.cost.alone_percent * 1024 / 100);
  const std::int64_t fixed = fixed_ticks_of_a_cut(config);
  return load <= fixed ? load : fixed + (load - fixed) * factor / 1024;
}

inline std::int64_t makespan(const PlanConfig& config, const Plan& plan) {
  std::int64_t most = 0;
  for (std::size_t w = 0; w + 1 < plan.work_indptr.size(); ++w) {
    std::int64_t sum = 0;
    for (std::int32_t i = plan.work_indptr[w]; i < plan.work_indptr[w + 1]; ++i)
      sum += ticks(config, plan.work_info_set[static_cast<std::size_t>(i)]);
    most = std::max(most, relieved(config, plan, sum));
  }
  return most;
}

inline std::int64_t unsplit(const PlanCase& c) {
  const Truth truth(c);
  std::int64_t total = 0;
  for (const Tile& tile : expected_tiles(c))
    total += ticks(c.config, {.request = tile.request,
                              .partial_row = -1,
                              .row_begin = tile.row_begin,
                              .row_end = tile.row_end,
                              .kv_begin = 0,
                              .kv_end = truth.extent(c, tile.row_begin, tile.row_end),
                              .kv_after = 0,
                              .tile = 0});
  return total;
}

}  // namespace latte::plan_test
