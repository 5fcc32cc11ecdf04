// The three ways to cut tiles into pieces and deal the pieces to workers.
#pragma once

#include <cstdint>
#include <span>

#include "plan/layout.hpp"

namespace latte::plan {

// What a policy needs to know of the step: its tiles on the line of unsplit costs.
struct Step {
  const PlanConfig& config;
  std::span<const Tile> tiles;
  std::int64_t line_ticks;
  Fixed fixed;

  std::int64_t block(const Tile& tile) const { return config.cost.block(tile.rows()); }
  std::int64_t piece_ticks(const Tile& tile, std::int32_t blocks, bool first) const {
    return fixed.piece + blocks * block(tile) + (first ? 0 : fixed.split);
  }
};

// Writes records and reduce arrays. Pieces come in tile order and, within a tile, in KV order; where a piece's record
// goes is the policy's business (contiguous, or dealt round-robin).
class Emitter {
 public:
  Emitter(const PlanConfig& config, const StepLengths& lengths, const Buffers& buffers)
      : config_(config), lengths_(lengths), out_(buffers) {}

  void begin_tile(const Tile& tile, std::int32_t pieces);
  void piece(std::int32_t block_begin, std::int32_t block_end, std::int64_t position);
  void finish(std::int32_t tiles);

  std::int32_t partials() const { return partials_; }
  std::int32_t partial_rows() const { return partial_rows_; }
  std::int32_t split_tiles() const { return split_tiles_; }

 private:
  const PlanConfig& config_;
  const StepLengths& lengths_;
  const Buffers& out_;
  Tile tile_{};
  std::int32_t tile_index_ = -1;
  bool split_ = false;
  std::int32_t partials_ = 0, partial_rows_ = 0, split_tiles_ = 0;
};

struct Outcome {
  std::int64_t records;
  std::int64_t makespan;
  std::int32_t splits;  // kMetaSplits
};

Outcome emit_balanced(const Step& step, const Buffers& buffers, Emitter& emitter);
Outcome emit_uniform(const Step& step, std::int32_t splits, const Buffers& buffers, Emitter& emitter);
Outcome emit_batch_invariant(const Step& step, const Buffers& buffers, Emitter& emitter);

}  // namespace latte::plan
