// Plans of prefill. A head has its own keys, so a tile is some query tokens of one head; the tiles of all heads over
// the same query tokens are alike, which makes them one Unit. Tiles are numbered unit by unit, head innermost: requests
// by index, query tokens ascending, heads ascending.
#pragma once

#include <cstdint>
#include <span>

#include "plan/dealer.hpp"
#include "plan/layout.hpp"
#include "plan/policies.hpp"

namespace latte::plan {

struct Unit {
  std::int32_t request;
  std::int32_t token_begin;  // counted over the step
  std::int32_t rows;         // query tokens
  std::int32_t kv_extent;    // what its last token sees
  std::int32_t blocks;       // ceil(kv_extent / kv_block)
  Ticks ticks;               // of one tile, unsplit
};

// What a worker is given: blocks [block_begin, block_end) of one tile.
struct Piece {
  std::int32_t unit;
  std::int32_t head;
  std::int32_t block_begin;
  std::int32_t block_end;
  std::int32_t worker;
};

struct PrefillScratch {
  std::span<Unit> units;               // [tiles / heads]
  std::span<std::int32_t> unit_begin;  // [max_requests + 1]: units of a request
  std::span<std::int32_t> order;       // [max_requests]: requests with query tokens, longest KV first
  std::span<Piece> pieces;             // [records], in the order in which they are dealt
  std::span<Ticks> nodes;              // of a Dealer
  std::span<Ticks> loads;              // [workers]
  std::span<Cut> cuts;                 // [2][workers + 1]
};

std::int64_t prefill_scratch_words(const PlanConfig& config, const PlanSizes& sizes);
PrefillScratch carve_prefill(const PlanConfig& config, const PlanSizes& sizes, std::span<std::int32_t> words);

// A step as the policies see it. config.workers is the number of workers that get work.
struct PrefillStep {
  const PlanConfig& config;
  const StepLengths& lengths;
  PrefillScratch scratch;
  std::int32_t units;
  std::int32_t requests;       // entries of scratch.order
  std::int64_t total_ticks;    // of all tiles, unsplit
  std::int64_t largest_ticks;  // of a tile
  Fixed fixed;

  std::int64_t ideal_ticks() const { return (total_ticks + config.workers - 1) / config.workers; }
  std::int64_t tiles() const { return static_cast<std::int64_t>(units) * config.heads; }
  const Unit& unit(std::int32_t u) const { return scratch.units[static_cast<std::size_t>(u)]; }
};

// The shares of the workers filled up with the tiles of pieces[first, tiles), cut where a share is full. Pieces before
// `first` are dealt, whole, and no worker has more than its share. Returns the makespan; cuts are in scratch.cuts.
std::int64_t cut_rest(const PrefillStep& step, std::int64_t first);
// Deals those cuts. Returns the number of pieces.
std::int64_t pour_rest(const PrefillStep& step, std::int64_t first);

PrefillStep prefill_step(const PlanConfig& config, const StepLengths& lengths, const PrefillScratch& scratch);

// Fills scratch.pieces by the policy; each becomes a record.
Outcome deal_prefill(const PrefillStep& step);

// Records and reduce arrays of the pieces in scratch. Fills in everything of work_meta_data that depends on them.
void emit_prefill(const PrefillStep& step, std::int64_t pieces, const Buffers& buffers);

}  // namespace latte::plan
