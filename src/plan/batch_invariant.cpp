// batch_invariant(chunk): every tile is cut at multiples of the chunk, whatever else is in the batch. Only the dealing
// of pieces to workers looks at the whole step: a piece goes to the worker in whose equal share its middle lies or,
// where there are no more pieces than workers, to one of its own.
#include <algorithm>

#include "plan/policies.hpp"

namespace latte::plan {

Outcome emit_batch_invariant(const Step& step, const Buffers& buffers, Emitter& emitter) {
  const std::int32_t chunk = chunk_blocks(step.config);
  std::int64_t all_pieces = 0;
  for (const Tile& tile : step.tiles) all_pieces += chunk_pieces(tile.blocks, chunk);
  const std::int64_t cuts = all_pieces - static_cast<std::int64_t>(step.tiles.size());

  const std::int32_t workers = step.config.workers;
  const Shares shares(step.line_ticks + cuts * step.fixed.both(), workers);
  const bool one_each = all_pieces <= workers;
  std::int64_t records = 0, done_ticks = 0, makespan = 0, load = 0;
  std::int32_t worker = 0;
  buffers.indptr[0] = 0;
  for (const Tile& tile : step.tiles) {
    const std::int32_t pieces = chunk_pieces(tile.blocks, chunk);
    emitter.begin_tile(tile, pieces);
    for (std::int32_t i = 0; i < pieces; ++i) {
      const std::int32_t begin = i * chunk;
      const std::int32_t end = begin + std::min(chunk, tile.blocks - begin);
      const std::int64_t ticks = step.piece_ticks(tile, end - begin, i == 0);
      const std::int64_t middle = done_ticks + ticks / 2;
      const auto begins_behind = [&](std::int32_t w) {
        return one_each ? records >= spread_numerator(all_pieces, w, workers) / workers : middle >= shares.begin(w);
      };
      while (worker + 1 < workers && begins_behind(worker + 1)) {
        buffers.indptr[static_cast<std::size_t>(++worker)] = static_cast<std::int32_t>(records);
        load = 0;
      }
      emitter.piece(begin, end, records++);
      done_ticks += ticks;
      makespan = std::max(makespan, load += ticks);
    }
  }
  while (worker < workers) buffers.indptr[static_cast<std::size_t>(++worker)] = static_cast<std::int32_t>(records);
  return {.records = records, .makespan = makespan, .splits = 0};
}

}  // namespace latte::plan
