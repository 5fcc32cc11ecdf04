// Where the plan's arrays lie in the one buffer of int32 words, and the tiles the planner works on.
#pragma once

#include <cstdint>
#include <span>

#include "latte/plan.hpp"
#include "plan/arithmetic.hpp"

namespace latte::plan {

// As many as a plan may be made for.
inline constexpr std::int32_t kMaxWorkers = 1 << 16;

// A 64-bit count that can lie anywhere in a buffer of 32-bit words.
struct Ticks {
  std::int32_t low = 0;
  std::int32_t high = 0;

  Ticks() = default;
  Ticks(std::int64_t ticks)
      : low(static_cast<std::int32_t>(static_cast<std::uint32_t>(ticks))),
        high(static_cast<std::int32_t>(ticks >> 32)) {}
  operator std::int64_t() const { return (static_cast<std::int64_t>(high) << 32) | static_cast<std::uint32_t>(low); }
};

// A tile while it is being planned.
struct Tile {
  std::int32_t request;
  std::int32_t row_begin;
  std::int32_t row_end;
  std::int32_t kv_extent = 0;  // tokens that its most far-sighted row sees
  std::int32_t blocks = 0;     // ceil(kv_extent / kv_block)
  Ticks line_begin{};          // where it starts on the line of unsplit costs

  std::int32_t rows() const { return row_end - row_begin; }
};

// Writable counterparts of Plan's arrays at their full (limit) size, and decode's scratch behind them.
struct Buffers {
  std::span<std::int32_t> meta;
  std::span<std::int32_t> indptr;
  std::span<WorkRecord> records;
  std::span<std::int32_t> reduce_indptr;
  std::span<RowRange> reduce_final;
  std::span<std::int32_t> reduce_partial;
  std::span<Tile> tiles;
  std::span<Cut> cuts;     // [2][workers + 1]: the best line so far and the one being tried
  std::span<Ticks> loads;  // [workers]
};

Buffers carve(const PlanConfig& config, const PlanSizes& sizes, std::span<std::int32_t> words);
std::int64_t words_needed(const PlanConfig& config, const PlanSizes& sizes);

// The workers that get work: those of the machine, or fewer where the limits say so.
std::int32_t worker_count(const PlanConfig& config);
// Limits with their defaults (zeros) filled in.
Limits resolve(const Limits& limits);
// Errors for lengths that no plan can be made for: sizes, signs, order, limits.
Status check_lengths(const Limits& limits, std::int32_t heads, const StepLengths& lengths);
// The same, and what the op does not take.
Status check_lengths(const PlanConfig& config, const StepLengths& lengths);

// KV tokens that query token `token` (counted over the step) of request `request` sees.
inline std::int32_t visible_tokens(const StepLengths& lengths, Mask mask, std::int32_t request, std::int32_t token) {
  if (!lengths.visible.empty()) return lengths.visible[static_cast<std::size_t>(token)];
  const auto b = static_cast<std::size_t>(request);
  const std::int32_t seq_len = lengths.seq_lens[b];
  if (mask == Mask::none) return seq_len;
  return causal_tokens(seq_len, lengths.query_start[b + 1], token);
}

// Cuts every request's rows into tiles, in the order of their numbers. Returns the number of tiles; `line_ticks` is
// their summed unsplit cost.
std::int32_t make_tiles(const PlanConfig& config, const StepLengths& lengths, std::span<Tile> tiles,
                        std::int64_t& line_ticks);

}  // namespace latte::plan
