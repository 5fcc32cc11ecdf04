// The arithmetic of uniform(n), shared with `balanced`, which tries it as a candidate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "plan/policies.hpp"

namespace latte::plan {

// A tile is never cut finer than its blocks; an empty one is one piece.
inline std::int32_t uniform_pieces(const Tile& tile, std::int32_t splits) {
  return std::clamp(tile.blocks, std::int32_t{1}, splits);
}
// Block at which piece i of `pieces` begins.
inline std::int32_t uniform_cut(const Tile& tile, std::int32_t pieces, std::int32_t i) {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(tile.blocks) * i / pieces);
}

// Pieces beyond one per tile.
std::int64_t uniform_extra_pieces(const Step& step, std::int32_t splits);
// `loads` is scratch of one entry a worker.
std::int64_t uniform_makespan(const Step& step, std::int32_t splits, std::span<Ticks> loads);

}  // namespace latte::plan
