// A prefill step cut into units, and records out of the pieces that a policy has dealt.
#include "plan/prefill.hpp"

#include <algorithm>

namespace latte::plan {
namespace {

template <class T>
constexpr std::int64_t words_of(std::int64_t count) {
  static_assert(sizeof(T) % sizeof(std::int32_t) == 0 && alignof(T) == alignof(std::int32_t));
  return count * static_cast<std::int64_t>(sizeof(T) / sizeof(std::int32_t));
}

// Calls part(array, count) for every array of the scratch.
template <class Scratch, class Part>
void for_each_part(Scratch& scratch, const PlanConfig& config, const PlanSizes& sizes, const Part& part) {
  const std::int64_t workers = worker_count(config), requests = config.limits.max_requests;
  part(scratch.units, sizes.tiles / config.heads);
  part(scratch.unit_begin, requests + 1);
  part(scratch.order, requests);
  part(scratch.pieces, sizes.records);
  part(scratch.nodes, Dealer::leaves(static_cast<std::int32_t>(workers)));
  part(scratch.loads, workers);
  part(scratch.cuts, 2 * (workers + 1));
}

}  // namespace

std::int64_t prefill_scratch_words(const PlanConfig& config, const PlanSizes& sizes) {
  std::int64_t words = 0;
  PrefillScratch scratch;
  for_each_part(scratch, config, sizes,
                [&]<class T>(std::span<T>&, std::int64_t count) { words += words_of<T>(count); });
  return words;
}

PrefillScratch carve_prefill(const PlanConfig& config, const PlanSizes& sizes, std::span<std::int32_t> words) {
  PrefillScratch scratch;
  std::int32_t* at = words.data() + layout(sizes, worker_count(config)).scratch;
  for_each_part(scratch, config, sizes, [&]<class T>(std::span<T>& array, std::int64_t count) {
    array = {reinterpret_cast<T*>(at), static_cast<std::size_t>(count)};
    at += words_of<T>(count);
  });
  return scratch;
}

PrefillStep prefill_step(const PlanConfig& config, const StepLengths& lengths, const PrefillScratch& scratch) {
  PrefillStep step{.config = config,
                   .lengths = lengths,
                   .scratch = scratch,
                   .units = 0,
                   .requests = 0,
                   .total_ticks = 0,
                   .largest_ticks = 0,
                   .fixed = fixed_ticks(config)};
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(lengths.seq_lens.size()); ++b) {
    const auto i = static_cast<std::size_t>(b);
    const std::int32_t query_end = lengths.query_start[i + 1];
    scratch.unit_begin[i] = step.units;
    if (lengths.query_start[i] < query_end) scratch.order[static_cast<std::size_t>(step.requests++)] = b;
    for (std::int32_t token = lengths.query_start[i]; token < query_end;) {
      const std::int32_t rows = std::min(config.row_tile, query_end - token);
      Unit unit{.request = b, .token_begin = token, .rows = rows, .kv_extent = 0, .blocks = 0, .ticks = 0};
      unit.kv_extent = visible_tokens(lengths, config.mask, b, token + rows - 1);
      unit.blocks = blocks_for(unit.kv_extent, config.kv_block);
      unit.ticks = step.fixed.piece + unit.blocks * config.cost.block(rows);
      step.total_ticks += unit.ticks * config.heads;
      step.largest_ticks = std::max<std::int64_t>(step.largest_ticks, unit.ticks);
      scratch.units[static_cast<std::size_t>(step.units++)] = unit;
      token += rows;
    }
    scratch.unit_begin[i + 1] = step.units;
  }
  std::sort(scratch.order.begin(), scratch.order.begin() + step.requests, [&](std::int32_t a, std::int32_t b) {
    const std::int32_t kv_a = lengths.seq_lens[static_cast<std::size_t>(a)];
    const std::int32_t kv_b = lengths.seq_lens[static_cast<std::size_t>(b)];
    return kv_a != kv_b ? kv_a > kv_b : a < b;
  });
  return step;
}

void emit_prefill(const PrefillStep& step, std::int64_t count, const Buffers& out) {
  const std::int32_t heads = step.config.heads, kv_block = step.config.kv_block;
  const std::int32_t step_tokens = step.lengths.query_start.back();
  const auto tile_of = [heads](const Piece& piece) {
    return static_cast<std::size_t>(piece.unit) * static_cast<std::size_t>(heads) +
           static_cast<std::size_t>(piece.head);
  };
  const auto pieces = step.scratch.pieces.first(static_cast<std::size_t>(count));

  // Records a worker and pieces a split tile, counted one entry further on, then summed.
  const auto tiles = static_cast<std::size_t>(step.tiles());
  std::fill(out.indptr.begin(), out.indptr.end(), 0);
  std::fill_n(out.reduce_indptr.begin(), tiles + 1, 0);
  for (const Piece& piece : pieces) {
    ++out.indptr[static_cast<std::size_t>(piece.worker) + 1];
    const bool split = piece.block_begin > 0 || piece.block_end < step.unit(piece.unit).blocks;
    out.reduce_indptr[tile_of(piece) + 1] += split ? 1 : 0;
  }
  for (std::size_t w = 0; w + 1 < out.indptr.size(); ++w) out.indptr[w + 1] += out.indptr[w];

  std::int32_t partial_rows = 0, split_tiles = 0;
  std::size_t t = 0;
  for (const Unit& unit : step.scratch.units.first(static_cast<std::size_t>(step.units)))
    for (std::int32_t head = 0; head < heads; ++head, ++t) {
      const std::int32_t row = head * step_tokens + unit.token_begin;
      out.reduce_final[t] = {row, row + unit.rows};
      split_tiles += out.reduce_indptr[t + 1] > 0 ? 1 : 0;
      out.reduce_indptr[t + 1] += out.reduce_indptr[t];
      for (std::int32_t p = out.reduce_indptr[t]; p < out.reduce_indptr[t + 1]; ++p, partial_rows += unit.rows)
        out.reduce_partial[static_cast<std::size_t>(p)] = partial_rows;
    }

  // A worker's entry of indptr moves along its records; afterwards it is the next worker's first, and all move up.
  std::int32_t of_tile = 0;  // pieces of the same tile come one after the other, in KV order
  for (const Piece& piece : pieces) {
    const Unit& unit = step.unit(piece.unit);
    const std::size_t tile = tile_of(piece);
    of_tile = piece.block_begin == 0 ? 0 : of_tile + 1;
    const bool split = piece.block_begin > 0 || piece.block_end < unit.blocks;
    const auto kv_end = static_cast<std::int32_t>(
        std::min(static_cast<std::int64_t>(piece.block_end) * kv_block, std::int64_t{unit.kv_extent}));
    const std::int32_t at = out.indptr[static_cast<std::size_t>(piece.worker)]++;
    const std::size_t partial = static_cast<std::size_t>(out.reduce_indptr[tile]) + static_cast<std::size_t>(of_tile);
    const RowRange rows = out.reduce_final[tile];
    out.records[static_cast<std::size_t>(at)] = {
        .request = unit.request,
        .partial_row = split ? out.reduce_partial[partial] : -1,
        .row_begin = rows.begin,
        .row_end = rows.end,
        .kv_begin = piece.block_begin * kv_block,
        .kv_end = kv_end,
        .kv_after = step.lengths.seq_lens[static_cast<std::size_t>(unit.request)] - kv_end,
        .tile = static_cast<std::int32_t>(tile)};
  }
  std::copy_backward(out.indptr.begin(), out.indptr.end() - 1, out.indptr.end());
  out.indptr[0] = 0;

  out.meta[kMetaTiles] = static_cast<std::int32_t>(tiles);
  out.meta[kMetaSplitTiles] = split_tiles;
  out.meta[kMetaPartials] = out.reduce_indptr[tiles];
  out.meta[kMetaPartialRows] = partial_rows;
}

}  // namespace latte::plan
