// balanced: lay the tiles on a line, each as long as it costs, and cut the line into `workers` equal shares. Cuts are
// rounded to KV blocks and, in some candidates, snapped to tile edges nearby. uniform(1..16) are candidates too, and
// equal pieces on fewer workers. The one with the smallest estimated makespan wins, equal pieces also where a line is
// shorter only by splits that it does not count; ties go to the one tried first. Every candidate is a scan or a search
// over the line: nothing sorts, nothing depends on more than prefix sums, so that a device can do the same.
//
// Why it is within 1/8 of ideal (I = line / workers): a worker's share is I long; rounding moves each of its ends by at
// most half a block; a share that begins inside a tile pays piece + split once more. So
//     makespan <= ceil(I) + block + piece + split,  and block <= I / 8 when there are 8 blocks of the widest tile a
//     worker.
// Equal pieces that are longer than the line are below I + piece + split + min(I / 8, piece + split) (even_limit()).
// Why it never loses to uniform(1..16): those with fewer than 2 * workers extra pieces are candidates. The others carry
// at least 2 * workers * (piece + split) of extra cost, so their makespan is >= ceil(I) + 2 * (piece + split), and
// piece + split >= block by the definition of split_ticks().
#include <algorithm>
#include <optional>

#include "plan/uniform.hpp"

namespace latte::plan {
namespace {

class Line {
 public:
  explicit Line(const Step& step) : step_(step) {}

  struct Makespan {
    std::int64_t ticks = 0;
    std::int64_t with_all_splits = 0;  // share_ticks_with_all_splits()
  };

  // Where worker w's share begins, for every w, and the makespan. `snap` ticks: a cut closer than that to a tile's edge
  // moves to the edge, which saves piece + split.
  Makespan cut(std::int64_t snap, std::span<Cut> cuts) const {
    const std::int32_t workers = step_.config.workers;
    const Shares shares(step_.line_ticks, workers);
    const auto tiles = static_cast<std::int32_t>(step_.tiles.size());
    if (tiles == 0) {
      std::fill(cuts.begin(), cuts.end(), Cut{0, 0});
      return {};
    }
    Makespan makespan;
    std::int64_t begin_ticks = 0;
    bool begin_inside = false;
    std::int32_t t = 0;
    cuts[0] = {0, 0};
    for (std::int32_t w = 1; w <= workers; ++w) {
      Cut& cut = cuts[static_cast<std::size_t>(w)];
      std::int64_t end_ticks = step_.line_ticks;
      if (w == workers) {
        cut = {tiles, 0};
      } else {
        const std::int64_t x = shares.begin(w);
        while (t + 1 < tiles && step_.tiles[static_cast<std::size_t>(t) + 1].line_begin <= x) ++t;
        cut = place(t, line_tile(t), x, step_.fixed.piece, snap);
        if (cut.tile < tiles) end_ticks = cut_position(line_tile(cut.tile), cut.block, step_.fixed.piece);
      }
      // A cut never lies before the one before it: x grows, and rounding and snapping are monotone within a tile.
      const std::int64_t ticks = share_ticks(begin_ticks, end_ticks, begin_inside, step_.fixed);
      const std::int64_t cut_tile = cut.block > 0 ? line_tile(cut.tile).begin : 0;
      makespan.ticks = std::max(makespan.ticks, ticks);
      makespan.with_all_splits =
          std::max(makespan.with_all_splits,
                   share_ticks_with_all_splits(ticks, begin_ticks, cut_tile, cut.block > 0, step_.fixed));
      begin_ticks = end_ticks;
      begin_inside = cut.block > 0;
    }
    return makespan;
  }

 private:
  LineTile line_tile(std::int32_t t) const {
    const Tile& tile = step_.tiles[static_cast<std::size_t>(t)];
    return {.begin = tile.line_begin, .block = step_.block(tile), .blocks = tile.blocks};
  }

  const Step& step_;
};

Outcome emit_line(const Step& step, std::span<const Cut> cuts, const Buffers& buffers, Emitter& emitter) {
  const std::int32_t workers = step.config.workers;
  std::int64_t records = 0;
  std::int32_t w = 0;  // the worker whose share the line is in
  const auto next_worker = [&] { buffers.indptr[static_cast<std::size_t>(++w)] = static_cast<std::int32_t>(records); };
  const auto next_cut = [&](std::int32_t worker) { return cuts[static_cast<std::size_t>(worker) + 1]; };

  buffers.indptr[0] = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(step.tiles.size()); ++t) {
    const Tile& tile = step.tiles[static_cast<std::size_t>(t)];
    while (w + 1 < workers && next_cut(w) <= Cut{t, 0}) next_worker();

    std::int32_t pieces = 1, begin = 0;
    for (std::int32_t v = w; v + 1 < workers && next_cut(v).tile == t; ++v)
      if (next_cut(v).block > begin) ++pieces, begin = next_cut(v).block;

    emitter.begin_tile(tile, pieces);
    begin = 0;
    while (w + 1 < workers && next_cut(w).tile == t) {
      const std::int32_t end = next_cut(w).block;
      if (end > begin) emitter.piece(begin, end, records++);
      begin = end;
      next_worker();
    }
    emitter.piece(begin, tile.blocks, records++);
  }
  while (w < workers) next_worker();
  return {.records = records, .makespan = -1, .splits = 0};
}

// Of even(most); none where there are more pieces than workers.
std::optional<std::int64_t> even_makespan(const Step& step, std::int32_t most) {
  const std::int32_t workers = step.config.workers;
  Even all;
  for (const Tile& tile : step.tiles) all = all + even_tile(tile.blocks, most, step.block(tile), workers, step.fixed);
  if (all.pieces > workers) return std::nullopt;
  return relieved(all.longest, crowding(all.pieces * kFullCrowd / workers, step.config.cost), step.fixed);
}

}  // namespace

Outcome emit_balanced(const Step& step, const Buffers& buffers, Emitter& emitter) {
  const std::int32_t workers = step.config.workers;
  const auto half = static_cast<std::size_t>(workers) + 1;
  std::span<Cut> best_cuts = buffers.cuts.first(half), trial_cuts = buffers.cuts.subspan(half, half);
  Line::Makespan best_line;
  std::int32_t splits = 0;

  const Line line(step);
  for (std::int32_t i = 0; i < kSnapCandidates; ++i) {
    const Line::Makespan makespan = line.cut(snap_ticks(i, step.fixed), trial_cuts);
    if (i > 0 && makespan.ticks >= best_line.ticks) continue;
    best_line = makespan;
    std::swap(best_cuts, trial_cuts);
  }

  std::int64_t best = best_line.ticks;
  if (even_may_fit(step.config, static_cast<std::int64_t>(step.tiles.size()))) {
    const std::int64_t share = step.line_ticks / workers;
    const std::int64_t share_blocks = share / step.config.cost.block(step.config.row_tile);
    std::int64_t limit = even_limit(best_line.ticks, best_line.with_all_splits, share, step.fixed);
    for (std::int32_t i = 0; i < kEvenCandidates; ++i) {
      const std::int32_t most = even_blocks(i, share_blocks);
      if (const auto makespan = even_makespan(step, most); makespan && *makespan < limit)
        best = limit = *makespan, splits = -most;
    }
  }

  for (std::int32_t n = 1; n <= kMaxUniformCandidate; ++n) {
    if (!uniform_can_win(uniform_extra_pieces(step, n), step.line_ticks, best, workers, step.fixed)) break;
    const std::int64_t makespan = uniform_makespan(step, n, buffers.loads);
    if (makespan < best) best = makespan, splits = n;
  }

  Outcome outcome =
      splits == 0 ? emit_line(step, best_cuts, buffers, emitter) : emit_uniform(step, splits, buffers, emitter);
  outcome.makespan = best;
  return outcome;
}

}  // namespace latte::plan
