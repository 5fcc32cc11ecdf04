// batch_invariant(chunk): every tile is cut at multiples of the chunk, whatever else is in the batch. Only the dealing
// of pieces to workers looks at the whole step: a piece goes to the worker in whose equal share its middle lies.
#include <algorithm>

#include "plan/policies.hpp"

namespace latte::plan {

Outcome emit_batch_invariant(const Step& step, const Buffers& buffers, Emitter& emitter) {
  const std::int32_t chunk = chunk_blocks(step.config);
  std::int64_t total = step.line_ticks;
  for (const Tile& tile : step.tiles) total += (chunk_pieces(tile.blocks, chunk) - 1) * step.fixed.both();

  const std::int32_t workers = step.config.workers;
  const Shares shares(total, workers);
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
      while (worker + 1 < workers && middle >= shares.begin(worker + 1)) {
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
