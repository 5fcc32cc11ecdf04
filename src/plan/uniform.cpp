// uniform(n): every tile in n pieces of about the same length, piece i of the step on worker i mod workers. This is
// what a plain launch over a static grid does, and the baseline that `balanced` must never lose to. Where `balanced`
// takes it over, it leaves out other workers. even(n), which only `balanced` makes, is the same with another number of
// pieces, and comes as uniform(-n).
#include "plan/uniform.hpp"

#include <algorithm>

namespace latte::plan {

std::int64_t uniform_extra_pieces(const Step& step, std::int32_t splits) {
  std::int64_t extra = 0;
  for (const Tile& tile : step.tiles) extra += cut_pieces(tile.blocks, splits) - 1;
  return extra;
}

std::int64_t uniform_makespan(const Step& step, std::int32_t splits, std::span<Ticks> loads) {
  std::fill(loads.begin(), loads.end(), Ticks{});
  std::int64_t makespan = 0;
  std::size_t worker = 0;
  for (const Tile& tile : step.tiles) {
    const std::int32_t pieces = uniform_pieces(tile.blocks, splits);
    for (std::int32_t i = 0; i < pieces; ++i) {
      const std::int32_t blocks = uniform_cut(tile.blocks, pieces, i + 1) - uniform_cut(tile.blocks, pieces, i);
      const std::int64_t load = loads[worker] + step.piece_ticks(tile, blocks, i == 0);
      loads[worker] = load;
      makespan = std::max(makespan, load);
      if (++worker == loads.size()) worker = 0;
    }
  }
  return makespan;
}

Outcome emit_uniform(const Step& step, std::int32_t splits, const Buffers& buffers, Emitter& emitter) {
  const std::int64_t records = static_cast<std::int64_t>(step.tiles.size()) + uniform_extra_pieces(step, splits);
  const std::int64_t workers = step.config.workers;
  // Worker w owns pieces w, w + workers, ...: its records lie together, so piece i goes to row i / workers of its list.
  const std::int64_t each = records / workers, more = records % workers;
  const auto first_record = [&](std::int64_t w) { return w * each + std::min(w, more); };
  // With fewer pieces than workers record i is piece i, and `balanced` only changes whose it is.
  const bool spread = step.config.policy.kind == PolicyKind::balanced && records < workers;
  for (std::int32_t w = 0; w <= step.config.workers; ++w)
    buffers.indptr[static_cast<std::size_t>(w)] = static_cast<std::int32_t>(
        spread ? spread_numerator(records, w, step.config.workers) / workers : first_record(w));

  std::int64_t worker = 0, row = 0;
  for (const Tile& tile : step.tiles) {
    const std::int32_t pieces = cut_pieces(tile.blocks, splits);
    emitter.begin_tile(tile, pieces);
    for (std::int32_t i = 0; i < pieces; ++i) {
      emitter.piece(uniform_cut(tile.blocks, pieces, i), uniform_cut(tile.blocks, pieces, i + 1),
                    first_record(worker) + row);
      if (++worker == workers) worker = 0, ++row;
    }
  }
  return {.records = records, .makespan = -1, .splits = splits};
}

}  // namespace latte::plan
