// batch_invariant(chunk): every tile is cut at multiples of the chunk, whatever else is in the batch. Only the dealing
// of pieces to workers looks at the whole step: a piece goes to the worker in whose equal share its middle lies.
#include <algorithm>

#include "core/checked.hpp"
#include "plan/policies.hpp"

namespace latte::plan {

Outcome emit_batch_invariant(const Step& step, const Buffers& buffers, Emitter& emitter) {
  const auto chunk_blocks = static_cast<std::int32_t>(ceil_div(step.config.policy.n, step.config.kv_block));
  const auto pieces_of = [&](const Tile& tile) {
    return std::max<std::int32_t>(1, static_cast<std::int32_t>(ceil_div(tile.blocks, chunk_blocks)));
  };
  std::int64_t total = step.line_ticks;
  for (const Tile& tile : step.tiles) total += (pieces_of(tile) - 1) * (step.piece + step.split);

  const std::int64_t workers = step.config.workers;
  std::int64_t records = 0, done_ticks = 0, makespan = 0, load = 0, worker = 0;
  buffers.indptr[0] = 0;
  for (const Tile& tile : step.tiles) {
    const std::int32_t pieces = pieces_of(tile);
    emitter.begin_tile(tile, pieces);
    for (std::int32_t i = 0; i < pieces; ++i) {
      const std::int32_t begin = i * chunk_blocks;
      const std::int32_t end = begin + std::min(chunk_blocks, tile.blocks - begin);
      const std::int64_t ticks = step.piece_ticks(tile, end - begin, i == 0);
      // Worker w's share ends at (w + 1) * total / workers; written without the product, which could overflow.
      const std::int64_t middle = done_ticks + ticks / 2;
      while (worker + 1 < workers &&
             middle >= total / workers * (worker + 1) + total % workers * (worker + 1) / workers) {
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
