// The choice of `balanced` (src/plan/balanced.cpp), with every candidate looked at by all threads at once.
#pragma once

#include "cuda/plan/tiles.hpp"

namespace latte::cuda::planner {

struct BlockRange {
  std::int32_t begin, end;
};

// The tiles of a step on their line.
struct Step {
  const Task& task;
  const TileArrays& tiles;
  std::int32_t count;
  std::int64_t line_ticks;

  LATTE_DEVICE std::int64_t block_ticks(std::int32_t t) const {
    return task.block_ticks(tiles.rows[t].end - tiles.rows[t].begin);
  }
  // An equal share of the line.
  LATTE_DEVICE std::int64_t share() const {
    return static_cast<std::int64_t>(task.share.divide(static_cast<std::uint64_t>(line_ticks)).quotient);
  }
};

// plan::Shares, by multiplication.
struct Shares {
  const LongDivisor& by;
  Division share;

  LATTE_DEVICE Shares(std::int64_t total, const Task& task)
      : by(task.share), share(by.divide(static_cast<std::uint64_t>(total))) {}
  LATTE_DEVICE std::int64_t begin(std::int32_t w) const {
    const auto worker = static_cast<std::uint32_t>(w);
    return static_cast<std::int64_t>(share.quotient * worker + by.divide(share.rest * worker).quotient);
  }
};

// One worker's cut on each of the lines: where it lies, a bit for those that lie inside a tile, and where that begins.
struct LineCuts {
  std::int64_t at[plan::kSnapCandidates] = {};
  std::int64_t tile_begin = 0;
  std::uint32_t inside = 0;

  template <class Fn>
  LATTE_DEVICE LineCuts map(const Fn& fn) const {
    LineCuts result;
    for (std::int32_t i = 0; i < plan::kSnapCandidates; ++i) result.at[i] = fn(at[i]);
    result.tile_begin = fn(tile_begin);
    result.inside = fn(inside);
    return result;
  }
};

// plan::place() and plan::cut_position() for all snap distances: which differ in nothing but the edge they snap to.
// Cut i is left at cuts[i * stride].
LATTE_DEVICE inline LineCuts place_cut(const Step& step, std::int64_t x, plan::Cut* cuts, std::int32_t stride) {
  const plan::Fixed& fixed = step.task.fixed;
  const std::int32_t t = last_at_most(step.tiles.line, 0, step.count, x), blocks = step.tiles.blocks[t];
  const std::int64_t begin = step.tiles.line[t], block = step.block_ticks(t), half = block / 2;
  const std::int64_t offset = x - begin - fixed.piece, length = blocks * block;
  const auto rounded = static_cast<std::int64_t>(static_cast<std::uint64_t>(std::max<std::int64_t>(offset, 0) + half) /
                                                 static_cast<std::uint64_t>(block));
  LineCuts result{.tile_begin = begin};
  for (std::int32_t i = 0; i < plan::kSnapCandidates; ++i) {
    const std::int64_t snap = plan::snap_ticks(i, fixed);
    plan::Cut cut{t, 0};
    std::int64_t at = begin;
    if (offset > std::max(snap, half)) {
      const bool to_end = length - offset <= snap || rounded >= blocks;
      cut = to_end ? plan::Cut{t + 1, 0} : plan::Cut{t, static_cast<std::int32_t>(rounded)};
      at += fixed.piece + (to_end ? length : rounded * block);
      if (!to_end) result.inside |= 1u << i;
    }
    result.at[i] = at;
    cuts[i * stride] = cut;
  }
  return result;
}

struct Choice {
  std::int32_t splits = 0, line = 0;  // as kMetaSplits; 0 splits: that line
  std::int64_t makespan = 0;
  bool whole = false;  // no tile is cut, and none is on a line
};

// Of candidates: pieces of uniform(n) beyond one a tile at [n]; what even ones come to.
struct Candidates {
  std::int32_t* extra;
  EvenCandidate* even;
};

// The makespans of the three lines and, for even pieces, those with all splits, behind the next barrier: each worker
// searches for its cut; a load lies between neighbours.
template <class Block>
LATTE_DEVICE auto cut_lines(Block& block, const Step& step, bool even) {
  const std::int32_t workers = step.task.config.workers, stride = workers + 1;
  plan::Cut* trial = step.tiles.trial;
  const Shares shares(step.line_ticks, step.task);
  return block.template max_between<2 * plan::kSnapCandidates>(
      workers,
      [&](std::int32_t w) -> LineCuts {
        if (w > 0 && w < workers && step.count > 0) return place_cut(step, shares.begin(w), trial + w, stride);
        const bool end = w == workers;
        LineCuts edge;
        for (std::int32_t i = 0; i < plan::kSnapCandidates; ++i) {
          edge.at[i] = end ? step.line_ticks : 0;
          trial[i * stride + w] = {end ? step.count : 0, 0};
        }
        return edge;
      },
      [&](std::int32_t row, const LineCuts& begin, const LineCuts& end) {
        const std::int32_t i = row % plan::kSnapCandidates;
        const auto inside = [i](const LineCuts& cuts) { return (cuts.inside >> i & 1) != 0; };
        const std::int64_t ticks = plan::share_ticks(begin.at[i], end.at[i], inside(begin), step.task.fixed);
        if (row == i) return ticks;
        return plan::share_ticks_with_all_splits(ticks, begin.at[i], end.tile_begin, inside(end), step.task.fixed);
      },
      even ? 2 * plan::kSnapCandidates : plan::kSnapCandidates);
}

// What the even candidates come to, behind the next barrier.
template <class Block>
LATTE_DEVICE void count_even(Block& block, const Step& step, EvenCandidate* even) {
  const Task& task = step.task;
  const auto widest = static_cast<std::uint64_t>(task.block_ticks(task.config.row_tile));
  const auto share = static_cast<std::int64_t>(static_cast<std::uint64_t>(step.share()) / widest);
  block.fold_rows(
      plan::kEvenCandidates, step.count,
      [&](std::int32_t row, std::int32_t t) {
        return plan::even_tile(step.tiles.blocks[t], plan::even_blocks(row, share), step.block_ticks(t),
                               task.config.workers, task.fixed);
      },
      [&](std::int32_t row, const plan::Even& all) {
        even[row] = {plan::even_blocks(row, share), all};
      });
}

// The best of them, where one is below `limit`, or else `best`.
template <class Block>
LATTE_DEVICE Choice best_even(Block& block, const Step& step, const EvenCandidate* even, std::int64_t limit,
                              Choice best) {
  const Task& task = step.task;
  const auto smallest = block.first_smallest(plan::kEvenCandidates, [&](std::int32_t row) -> std::int64_t {
    const plan::Even all = even[row].all;
    if (all.pieces > task.config.workers) return INT64_MAX;
    const std::int32_t busy = task.by_workers.floor(all.pieces * plan::kFullCrowd);
    return plan::relieved(all.longest, plan::crowding(busy, task.config.cost), task.fixed);
  });
  const EvenCandidate& first = even[smallest.row];
  if (smallest.value < limit)
    best = {.splits = -first.most, .makespan = smallest.value, .whole = first.all.pieces == step.count};
  return best;
}

// Load of one worker under uniform(1): whole tiles, w, w + workers, ...
LATTE_DEVICE inline std::int64_t whole_load(const Step& step, std::int32_t w) {
  const std::int64_t* line = step.tiles.line;
  std::int64_t load = 0;
  for (std::int32_t t = w; t < step.count; t += step.task.config.workers)
    load += (t + 1 < step.count ? line[t + 1] : step.line_ticks) - line[t];
  return load;
}

// Blocks of piece i of a tile under uniform(n): plan::uniform_cut(). A tile of fewer blocks has one a piece.
LATTE_DEVICE inline BlockRange uniform_range(const Task& task, std::int32_t n, std::int32_t blocks, std::int32_t i) {
  if (blocks < n) return {i, std::min(i + 1, blocks)};
  const Divisor& by = task.by_splits(n);
  const std::int32_t each = by.floor(blocks), rest = blocks - each * n;
  return {each * i + by.floor(rest * i), each * (i + 1) + by.floor(rest * (i + 1))};
}

// Where a piece of uniform(n) belongs. `first_piece` is not looked at where every tile has n pieces.
LATTE_DEVICE inline std::int32_t uniform_tile(const Step& step, const std::int32_t* first_piece, std::int32_t n,
                                              std::int32_t pieces, std::int32_t from, std::int32_t piece) {
  if (pieces == std::int64_t{step.count} * n) return step.task.by_splits(n).floor(piece);
  return last_at_most(first_piece, from, step.count, piece);
}

// Load of one worker under uniform(n): pieces w, w + workers, ...
LATTE_DEVICE inline std::int64_t uniform_load(const Step& step, const std::int32_t* first_piece, std::int32_t n,
                                              std::int32_t pieces, std::int32_t w) {
  const Task& task = step.task;
  const bool regular = pieces == std::int64_t{step.count} * n;
  std::int64_t load = 0;
  std::int32_t t = 0;
  for (std::int64_t p = w; p < pieces; p += task.config.workers) {
    const auto piece = static_cast<std::int32_t>(p);
    t = uniform_tile(step, first_piece, n, pieces, t, piece);
    const std::int32_t i = piece - (regular ? t * n : first_piece[t]);
    const BlockRange blocks = uniform_range(task, n, step.tiles.blocks[t], i);
    load += task.fixed.piece + (blocks.end - blocks.begin) * step.block_ticks(t) + (i > 0 ? task.fixed.split : 0);
  }
  return load;
}

// plan::uniform_can_win(), by multiplication: floor(a / w) < b is a < b * w. Nothing overflows: neither a line's
// makespan nor that of equal pieces is far above a share of the whole (src/plan/balanced.cpp).
LATTE_DEVICE inline bool uniform_can_win(const Step& step, std::int32_t extra, std::int64_t best) {
  const std::int64_t workers = step.task.config.workers;
  return extra < 2 * workers && step.line_ticks + extra * step.task.fixed.both() + workers - 1 < best * workers;
}

// The best of uniform(2), uniform(3), ... where one of them is better than `best`. `extra[n]`: pieces of uniform(n)
// beyond one a tile.
template <class Block>
LATTE_DEVICE Choice best_uniform(Block& block, const Step& step, std::int32_t* extra, Choice best) {
  const TileArrays& tiles = step.tiles;
  block.sum_rows(
      kPrefixRows, step.count,
      [&](std::int32_t row, std::int32_t t) { return plan::uniform_pieces(tiles.blocks[t], row + 2) - 1; },
      [&](std::int32_t row, std::int32_t sum) { extra[row + 2] = sum; });
  block.sync();
  const std::int32_t candidates = 1 + block.count_true(kPrefixRows, [&](std::int32_t row) {
    return uniform_can_win(step, extra[row + 2], best.makespan);
  });
  for (std::int32_t first = 2; first <= candidates;) {
    const std::int32_t last = std::min(candidates, first + tiles.prefix_rows - 1), rows = last - first + 1;
    const auto prefix = [&](std::int32_t row) { return tiles.prefix + std::int64_t{row} * tiles.prefix_stride; };
    // Where every tile has `last` blocks, pieces are found without a table.
    if (extra[last] != std::int64_t{step.count} * (last - 1))
      block.scan_rows(
          rows, step.count,
          [&](std::int32_t row, std::int32_t t) { return plan::uniform_pieces(tiles.blocks[t], first + row); },
          [&](std::int32_t row, std::int32_t t, std::int32_t before) { prefix(row)[t] = before; });
    const auto makespans = block.max_rows(rows, step.task.config.workers, [&](std::int32_t row, std::int32_t w) {
      const std::int32_t n = first + row;
      return uniform_load(step, prefix(row), n, step.count + extra[n], w);
    });
    const auto smallest = block.first_smallest(rows, makespans);
    if (smallest.value < best.makespan) best = {.splits = first + smallest.row, .makespan = smallest.value};
    first = last + 1;
  }
  return best;
}

// The host tries uniform(1), uniform(2), ... until one cannot win against the best so far. Then none behind it can, as
// it only gets harder; and one that cannot win against some candidate never is the best. So those that can against the
// lines, the even pieces and uniform(1) are 2 .. c, and the host's winner is the first of the smallest among all.
// uniform(1) costs little and often wins: it is looked at together with the lines and the even pieces, and so is
// whether uniform(2) has too many.
template <class Block>
LATTE_DEVICE Choice balance(Block& block, const Step& step, const Candidates& candidates) {
  const std::int32_t workers = step.task.config.workers;
  const bool even = plan::even_may_fit(step.task.config, step.count);
  const auto lines = cut_lines(block, step, even);
  const auto whole = block.max_of(workers, [&](std::int32_t w) { return whole_load(step, w); });
  const auto halves = block.sum_of(step.count, [&](std::int32_t t) { return step.tiles.blocks[t] > 1 ? 1 : 0; });
  if (even) count_even(block, step, candidates.even);
  block.sync();
  Choice best{.makespan = lines(0)};
  for (std::int32_t i = 1; i < plan::kSnapCandidates; ++i)
    if (const std::int64_t makespan = lines(i); makespan < best.makespan) best = {.line = i, .makespan = makespan};
  if (even) {
    const std::int64_t limit =
        plan::even_limit(best.makespan, lines(plan::kSnapCandidates + best.line), step.share(), step.task.fixed);
    best = best_even(block, step, candidates.even, limit, best);
  }
  if (const std::int64_t makespan = whole(); makespan < best.makespan)
    best = {.splits = 1, .makespan = makespan, .whole = true};
  if (uniform_can_win(step, halves(), best.makespan)) [[unlikely]]
    return best_uniform(block, step, candidates.extra, best);
  return best;
}

}  // namespace latte::cuda::planner
