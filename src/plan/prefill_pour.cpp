// The end of a balanced prefill plan: the tiles that no longer fit whole into a worker's share are laid on a line, and
// worker after worker takes from it what its share still lacks. The line is cut as decode's (balanced.cpp), with the
// same snap distances and for the same reasons within a block and a cut of ideal; only the shares differ in length.
#include <algorithm>

#include "plan/prefill.hpp"

namespace latte::plan {
namespace {

// Where the rest is cut for one snap distance, and the makespan. `loads` are those of the dealt tiles.
std::int64_t cut_line(const PrefillStep& step, std::span<const Piece> rest, std::int64_t rest_ticks, std::int64_t snap,
                      std::span<Cut> cuts) {
  const std::int32_t workers = step.config.workers;
  const auto tiles = static_cast<std::int32_t>(rest.size());
  const Shares shares(step.total_ticks, workers);
  const auto unit = [&](std::int32_t t) -> const Unit& { return step.unit(rest[static_cast<std::size_t>(t)].unit); };

  std::int64_t makespan = 0, begin_ticks = 0, tile_begin = 0, dealt = 0;
  bool begin_inside = false;
  std::int32_t t = 0;
  cuts[0] = {0, 0};
  for (std::int32_t w = 1; w <= workers; ++w) {
    const std::int64_t load = step.scratch.loads[static_cast<std::size_t>(w) - 1];
    dealt += load;
    Cut& cut = cuts[static_cast<std::size_t>(w)];
    std::int64_t end_ticks = rest_ticks;
    if (w == workers) {
      cut = {tiles, 0};
    } else {
      const std::int64_t x = shares.begin(w) - dealt;  // never falls: a load is at most its share
      for (; t + 1 < tiles && tile_begin + unit(t).ticks <= x; ++t) tile_begin += unit(t).ticks;
      const LineTile tile{.begin = tile_begin, .block = step.config.cost.block(unit(t).rows), .blocks = unit(t).blocks};
      cut = place(t, tile, x, step.fixed.piece, snap);
      end_ticks = cut.tile == t ? cut_position(tile, cut.block, step.fixed.piece) : tile_begin + unit(t).ticks;
    }
    makespan = std::max(makespan, load + share_ticks(begin_ticks, end_ticks, begin_inside, step.fixed));
    begin_ticks = end_ticks;
    begin_inside = cut.block > 0;
  }
  return makespan;
}

}  // namespace

std::int64_t cut_rest(const PrefillStep& step, std::int64_t first) {
  const PrefillScratch& scratch = step.scratch;
  std::int64_t rest_ticks = step.total_ticks;
  std::fill(scratch.loads.begin(), scratch.loads.end(), Ticks{});
  for (const Piece& piece : scratch.pieces.first(static_cast<std::size_t>(first))) {
    Ticks& load = scratch.loads[static_cast<std::size_t>(piece.worker)];
    load = load + step.unit(piece.unit).ticks;
    rest_ticks -= step.unit(piece.unit).ticks;
  }
  const auto rest =
      scratch.pieces.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(step.tiles() - first));

  const auto half = scratch.cuts.size() / 2;
  const std::span<Cut> best_cuts = scratch.cuts.first(half), trial_cuts = scratch.cuts.last(half);
  std::int64_t best = 0;
  for (std::int32_t i = 0; i < kSnapCandidates; ++i) {
    const std::int64_t makespan = cut_line(step, rest, rest_ticks, snap_ticks(i, step.fixed), trial_cuts);
    if (i > 0 && makespan >= best) continue;
    best = makespan;
    std::copy(trial_cuts.begin(), trial_cuts.end(), best_cuts.begin());
  }
  return best;
}

std::int64_t pour_rest(const PrefillStep& step, std::int64_t first) {
  const std::int32_t workers = step.config.workers;
  const std::span<Piece> pieces = step.scratch.pieces;
  const auto next_cut = [&](std::int32_t w) { return step.scratch.cuts[static_cast<std::size_t>(w) + 1]; };

  // Tiles make room for as many more pieces as there are cuts, so that pieces never overtake the tiles they come from.
  const std::int64_t tiles = step.tiles(), room = workers - 1;
  std::copy_backward(pieces.begin() + first, pieces.begin() + tiles, pieces.begin() + tiles + room);
  std::int64_t count = first;
  std::int32_t w = 0;
  for (std::int32_t t = 0; t < tiles - first; ++t) {
    Piece piece = pieces[static_cast<std::size_t>(first + room + t)];
    const std::int32_t blocks = piece.block_end;
    const auto give = [&](std::int32_t end) {
      piece.block_end = end;
      piece.worker = w;
      pieces[static_cast<std::size_t>(count++)] = piece;
      piece.block_begin = end;
    };
    while (w + 1 < workers && next_cut(w) <= Cut{t, 0}) ++w;
    for (; w + 1 < workers && next_cut(w).tile == t; ++w)
      if (next_cut(w).block > piece.block_begin) give(next_cut(w).block);
    give(blocks);
  }
  return count;
}

}  // namespace latte::plan
