// The integer arithmetic that decides the words of a plan, once for the planner on the host (src/plan) and the one on a
// device (src/cuda/plan). Everything is constexpr, so that device code can call it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "latte/plan.hpp"

namespace latte::plan {

// Where the six arrays and the planner's scratch lie, in int32 words from the buffer's start. Records begin at a
// multiple of 4 words, so that a device planner may write them in wider pieces.
struct Layout {
  std::int64_t indptr, records, reduce_indptr, reduce_final, reduce_partial, scratch;
};

constexpr Layout layout(const PlanSizes& sizes, std::int64_t workers) {
  Layout at{};
  at.indptr = kMetaFields;
  at.records = (at.indptr + workers + 1 + 3) / 4 * 4;
  at.reduce_indptr = at.records + sizes.records * static_cast<std::int64_t>(sizeof(WorkRecord) / sizeof(std::int32_t));
  at.reduce_final = at.reduce_indptr + sizes.tiles + 1;
  at.reduce_partial = at.reduce_final + sizes.tiles * 2;
  at.scratch = at.reduce_partial + sizes.partials;
  return at;
}

// ceil(count / size) for count >= 0, size > 0 in 32 bits, where division is cheap.
constexpr std::int32_t blocks_for(std::int32_t count, std::int32_t size) {
  const auto divisor = static_cast<std::uint32_t>(size);
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(count) + divisor - 1) / divisor);
}

// Causal, bottom-right aligned: tokens that query `token` (counted over the step) sees, where the request's queries end
// at `query_end`.
constexpr std::int32_t causal_tokens(std::int32_t seq_len, std::int32_t query_end, std::int32_t token) {
  const std::int64_t seen = static_cast<std::int64_t>(seq_len) - query_end + token + 1;
  return seen < 0 ? 0 : static_cast<std::int32_t>(seen);
}

// Ticks a cut adds. At least what makes piece + split one block of the widest tile: a split is never made to move less
// than that, and the bound of docs/plan.md rests on it.
constexpr std::int64_t split_ticks(const PlanConfig& config) {
  return std::max<std::int64_t>(config.cost.split_ticks, config.cost.block(config.row_tile) - config.cost.piece_ticks);
}

// Fixed ticks of a piece, and what a cut adds on top.
struct Fixed {
  std::int64_t piece, split;

  constexpr std::int64_t both() const { return piece + split; }
};
constexpr Fixed fixed_ticks(const PlanConfig& config) {
  return {.piece = config.cost.piece_ticks, .split = split_ticks(config)};
}

// `total` ticks shared out evenly: where worker w's share begins. Without the product of total and w, which could
// overflow; rest * w fits 32 bits.
struct Shares {
  std::int64_t each;
  std::uint32_t rest, workers;

  constexpr Shares(std::int64_t total, std::int32_t count)
      : each(total / count),
        rest(static_cast<std::uint32_t>(total % count)),
        workers(static_cast<std::uint32_t>(count)) {}
  constexpr std::int64_t begin(std::int32_t w) const {
    return each * w + rest * static_cast<std::uint32_t>(w) / workers;
  }
};

// A place on the line of tiles: `block` KV blocks into `tile`.
struct Cut {
  std::int32_t tile;
  std::int32_t block;
  bool operator==(const Cut&) const = default;
  auto operator<=>(const Cut&) const = default;
};

// `balanced` tries the line with several snap distances, 0 to piece + split, then even pieces, then uniform(1) to
// uniform(16).
inline constexpr std::int32_t kSnapCandidates = 3;
inline constexpr std::int32_t kMaxUniformCandidate = 16;

constexpr std::int64_t snap_ticks(std::int32_t candidate, const Fixed& fixed) {
  return candidate * fixed.both() / (kSnapCandidates - 1);
}

// A tile as the line sees it.
struct LineTile {
  std::int64_t begin;  // where it starts on the line of unsplit costs
  std::int64_t block;  // ticks of one of its blocks
  std::int32_t blocks;
};

// The cut that stands for position x, which lies in tile t: rounded to a block, or moved to an edge of the tile that is
// closer than `snap`.
constexpr Cut place(std::int32_t t, const LineTile& tile, std::int64_t x, std::int64_t piece, std::int64_t snap) {
  const std::int64_t offset = x - tile.begin - piece;
  const std::int64_t length = tile.blocks * tile.block;
  if (offset <= std::max(snap, tile.block / 2)) return {t, 0};
  if (length - offset <= snap) return {t + 1, 0};
  const std::int64_t blocks = (offset + tile.block / 2) / tile.block;
  if (blocks >= tile.blocks) return {t + 1, 0};
  return {t, static_cast<std::int32_t>(blocks)};
}

// Where on the line a cut into the tile lies.
constexpr std::int64_t cut_position(const LineTile& tile, std::int32_t block, std::int64_t piece) {
  return tile.begin + (block > 0 ? piece + block * tile.block : 0);
}

// Load of the worker between two cuts; `inside`: its first piece is not a tile's first.
constexpr std::int64_t share_ticks(std::int64_t begin, std::int64_t end, bool inside, const Fixed& fixed) {
  return end > begin ? end - begin + (inside ? fixed.both() : 0) : 0;
}
// The same with the split of every partial counted, also of a tile's first piece: of the one at the share's end, if
// that is inside a tile which begins in the share. Bounds on makespans do without (balanced.cpp); a comparison with
// plans that have one piece a worker does not.
constexpr std::int64_t share_ticks_with_all_splits(std::int64_t ticks, std::int64_t begin, std::int64_t cut_tile_begin,
                                                   bool end_inside, const Fixed& fixed) {
  return ticks + (end_inside && cut_tile_begin >= begin ? fixed.split : 0);
}

// uniform(n). A tile is never cut finer than its blocks; an empty one is one piece.
constexpr std::int32_t uniform_pieces(std::int32_t blocks, std::int32_t splits) {
  return std::clamp(blocks, std::int32_t{1}, splits);
}
// Block at which piece i of `pieces` begins: floor(blocks * i / pieces). At most 2^15 pieces, so nothing overflows.
constexpr std::int32_t uniform_cut(std::int32_t blocks, std::int32_t pieces, std::int32_t i) {
  return blocks / pieces * i + blocks % pieces * i / pieces;
}
// Where `balanced` deals fewer pieces than there are workers: worker w's records begin at this over `workers`. So idle
// workers are spread over the machine, by the same words as in batch_invariant's deal of equal pieces.
constexpr std::int64_t spread_numerator(std::int64_t pieces, std::int32_t w, std::int32_t workers) {
  return pieces * w + (workers - 1) / 2;
}
// A uniform candidate is worth a look while it adds few pieces and could still win. Both only get worse with n, so the
// first that is not ends the search.
constexpr bool uniform_can_win(std::int64_t extra_pieces, std::int64_t line_ticks, std::int64_t best,
                               std::int32_t workers, const Fixed& fixed) {
  const std::int64_t at_least = (line_ticks + extra_pieces * fixed.both() + workers - 1) / workers;
  return extra_pieces < 2 * std::int64_t{workers} && at_least < best;
}

// even(n): every tile in the fewest equal pieces of at most n blocks, one a worker, the others without work. It pays
// where workers share memory (CostModel::alone_percent), and where on the line one would have two partials. `balanced`
// tries n = an equal share of the line, and by sixteenths or single blocks up from there.
inline constexpr std::int32_t kEvenCandidates = 12;
constexpr bool even_may_fit(const PlanConfig& config, std::int64_t tiles) {
  constexpr std::int32_t kMostWorkers = 1 << 15;  // so that their pieces can be added up
  return tiles <= config.workers && config.workers <= kMostWorkers;
}
// Even pieces are taken below this: the best line's makespan with all splits; but not above what is promised of
// `balanced` (docs/plan.md), 9/8 of an equal share and a cut, nor above what uniform(n) that are no candidates take at
// least, an equal share and two cuts.
constexpr std::int64_t even_limit(std::int64_t line, std::int64_t line_with_all_splits, std::int64_t share,
                                  const Fixed& fixed) {
  return std::max(line, std::min(line_with_all_splits, share + fixed.both() + std::min(share / 8, fixed.both())));
}
constexpr std::int32_t even_blocks(std::int32_t candidate, std::int64_t share_blocks) {
  const std::int64_t share = std::clamp<std::int64_t>(share_blocks, 1, 1 << 28);
  return static_cast<std::int32_t>(share + std::max<std::int64_t>(candidate, share * candidate / 16));
}
constexpr std::int32_t even_pieces(std::int32_t blocks, std::int32_t most) {
  return blocks <= most ? 1 : blocks_for(blocks, most);
}
// Pieces, and the ticks of the longest: of several of a tile the last, which pays for the cut. Of a tile no more than
// workers + 1 are counted, which is too many already.
struct Even {
  std::int32_t pieces = 0;
  std::int64_t longest = 0;

  constexpr Even operator+(const Even& o) const { return {pieces + o.pieces, std::max(longest, o.longest)}; }
};
constexpr Even even_tile(std::int32_t blocks, std::int32_t most, std::int64_t block, std::int32_t workers,
                         const Fixed& fixed) {
  const std::int32_t pieces = even_pieces(blocks, most);
  if (pieces == 1) return {1, fixed.piece + blocks * block};
  return {std::min(pieces, workers + 1), fixed.both() + blocks_for(blocks, pieces) * block};
}
// Pieces of a tile by what kMetaSplits says: uniform(n), or even(n) as -n.
constexpr std::int32_t cut_pieces(std::int32_t blocks, std::int32_t splits) {
  return splits < 0 ? even_pieces(blocks, -splits) : uniform_pieces(blocks, splits);
}

// How long a block takes while only some workers are busy, in 1/1024 of its cost. `busy`: which part of all workers, in
// 1/1024 too.
inline constexpr std::int32_t kFullCrowd = 1024;
constexpr std::int32_t crowding(std::int32_t busy, const CostModel& cost) {
  return std::clamp(busy, cost.alone_percent * kFullCrowd / 100, std::int32_t{kFullCrowd});
}
// A piece's ticks then. Only what is above the fixed ticks of a cut counts less, cut or not: so a longer piece stays
// the longer one, and the longest decides.
constexpr std::int64_t relieved(std::int64_t ticks, std::int32_t crowd, const Fixed& fixed) {
  const std::int64_t shared = std::max<std::int64_t>(ticks - fixed.both(), 0);
  return ticks - shared + shared / kFullCrowd * crowd + shared % kFullCrowd * crowd / kFullCrowd;
}

// batch_invariant(n tokens).
constexpr std::int32_t chunk_blocks(const PlanConfig& config) { return blocks_for(config.policy.n, config.kv_block); }
constexpr std::int32_t chunk_pieces(std::int32_t blocks, std::int32_t chunk) {
  return std::max(1, blocks_for(blocks, chunk));
}

}  // namespace latte::plan
