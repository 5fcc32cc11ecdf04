// Writing the plan: a scan that numbers pieces and partials, then every record by itself. Where tiles are cut all the
// same way it goes over tiles, and a piece searches for its tile; where a line was cut it goes over cuts, and a worker
// knows where it begins.
#pragma once

#include "cuda/plan/balance.hpp"

namespace latte::cuda::planner {

// Tile t of `count`, once its pieces and those before are counted.
LATTE_DEVICE inline void number_tile(const Task& task, const TileArrays& tiles, std::int32_t count, std::int32_t t,
                                     const EmitSums& own, const EmitSums& before) {
  const std::int32_t first_partial = before.partials(t);
  tiles.first_piece[t] = before.pieces;
  if (t + 1 == count) tiles.first_piece[t + 1] = before.pieces + own.pieces;
  tiles.first_partial[t] = first_partial;
  task.reduce_indptr()[t] = first_partial;
  if (tiles.partial_row != nullptr) tiles.partial_row[t] = before.partial_rows;
  if (own.split_tiles > 0) task.reduce_partial()[first_partial] = before.partial_rows;
}

// plan::spread_numerator() over the workers.
LATTE_DEVICE inline std::int32_t spread_record(const Task& task, std::int32_t records, std::int32_t w) {
  const std::int64_t numerator = plan::spread_numerator(records, w, task.config.workers);
  return static_cast<std::int32_t>(task.share.divide(static_cast<std::uint64_t>(numerator)).quotient);
}

// A tile's pieces are cut by one of these. `tile`: where a piece belongs; `range`: the blocks of piece i of a tile;
// `position`: where the piece's record goes.

// Pieces are dealt round-robin, and the first `more` workers have one more than the others. Whose records they are is
// what `balanced` changes where there are fewer than workers.
struct UniformPieces {
  const Step& step;
  std::int32_t n, records, each, more;

  LATTE_DEVICE UniformPieces(const Step& tiles, std::int32_t splits, std::int32_t pieces)
      : step(tiles),
        n(splits),
        records(pieces),
        each(tiles.task.by_workers.floor(pieces)),
        more(pieces - each * tiles.task.config.workers) {}

  LATTE_DEVICE std::int32_t first_record(std::int32_t w) const { return w * each + std::min(w, more); }
  LATTE_DEVICE std::int32_t indptr(std::int32_t w) const {
    const Task& task = step.task;
    if (each > 0 || task.config.policy.kind != PolicyKind::balanced) return first_record(w);
    return spread_record(task, records, w);
  }
  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return uniform_tile(step, step.tiles.first_piece, n, records, 0, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i) const {
    return uniform_range(step.task, n, step.tiles.blocks[t], i);
  }
  LATTE_DEVICE std::int32_t position(std::int32_t piece) const {
    const std::int32_t row = step.task.by_workers.floor(piece);
    return first_record(piece - row * step.task.config.workers) + row;
  }
};

// One a worker; idle workers lie between the others.
struct EvenPieces {
  const Step& step;
  std::int32_t records;

  LATTE_DEVICE std::int32_t indptr(std::int32_t w) const { return spread_record(step.task, records, w); }
  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return last_at_most(step.tiles.first_piece, 0, step.count, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i) const {
    const std::int32_t pieces = step.tiles.first_piece[t + 1] - step.tiles.first_piece[t];
    const std::int32_t blocks = step.tiles.blocks[t];
    return {plan::uniform_cut(blocks, pieces, i), plan::uniform_cut(blocks, pieces, i + 1)};
  }
  LATTE_DEVICE std::int32_t position(std::int32_t piece) const { return piece; }
};

struct ChunkPieces {
  const Step& step;
  std::int32_t chunk;  // blocks

  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return last_at_most(step.tiles.first_piece, 0, step.count, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i) const {
    const std::int32_t begin = i * chunk;
    return {begin, begin + std::min(chunk, step.tiles.blocks[t] - begin)};
  }
  LATTE_DEVICE std::int32_t position(std::int32_t piece) const { return piece; }

  // Ticks of all pieces before piece i of tile t. Those of the same tile are whole chunks.
  LATTE_DEVICE std::int64_t ticks_before(std::int32_t t, std::int32_t i) const {
    const plan::Fixed& fixed = step.task.fixed;
    return step.tiles.line[t] + (step.tiles.first_piece[t] - t) * fixed.both() + i * fixed.piece +
           std::int64_t{i} * chunk * step.block_ticks(t) + (i > 1 ? (i - 1) * fixed.split : 0);
  }
  LATTE_DEVICE std::int64_t middle(std::int32_t t, std::int32_t i) const {
    const BlockRange blocks = range(t, i);
    const std::int64_t ticks =
        step.task.fixed.piece + (blocks.end - blocks.begin) * step.block_ticks(t) + (i > 0 ? step.task.fixed.split : 0);
    return ticks_before(t, i) + ticks / 2;
  }
};

struct Piece {
  std::int32_t tile, partial_row;
  BlockRange blocks;
};

template <class Block>
LATTE_DEVICE void write_record(Block& block, const Step& step, const Piece& piece, std::int32_t position) {
  const Task& task = step.task;
  const TileArrays& tiles = step.tiles;
  const RowRange rows = tiles.rows[piece.tile];
  const std::int64_t end = std::int64_t{piece.blocks.end} * task.config.kv_block;
  const std::int32_t extent = tiles.extent[piece.tile], kv_end = end < extent ? static_cast<std::int32_t>(end) : extent;
  block.store(task.records() + position, {.request = tiles.request[piece.tile],
                                          .partial_row = piece.partial_row,
                                          .row_begin = rows.begin,
                                          .row_end = rows.end,
                                          .kv_begin = piece.blocks.begin * task.config.kv_block,
                                          .kv_end = kv_end,
                                          .kv_after = extent - kv_end + tiles.behind[piece.tile],
                                          .tile = piece.tile});
}

template <class Block, class Pieces>
LATTE_DEVICE void write_records(Block& block, const Step& step, const Pieces& cutting, std::int32_t records) {
  const Task& task = step.task;
  const TileArrays& tiles = step.tiles;
  block.for_each(records, [&](std::int32_t number) {
    const std::int32_t t = cutting.tile(number);
    const std::int32_t i = number - tiles.first_piece[t], pieces = tiles.first_piece[t + 1] - tiles.first_piece[t];
    Piece piece{.tile = t, .partial_row = -1, .blocks = cutting.range(t, i)};
    if (pieces > 1) {
      const std::int32_t first_partial = tiles.first_partial[t];
      const std::int32_t first_row =
          tiles.partial_row != nullptr ? tiles.partial_row[t] : task.reduce_partial()[first_partial];
      piece.partial_row = first_row + i * (tiles.rows[t].end - tiles.rows[t].begin);
      if (i > 0) task.reduce_partial()[first_partial + i] = piece.partial_row;  // the first is there already
    }
    write_record(block, step, piece, cutting.position(number));
  });
}

// The cut line: where each worker's records and partials begin. Before a cut lie as many records as tiles begin before
// it and cuts inside tiles lie before it; a tile's first cut makes two partials, every other one more. Returns the sums
// over all tiles.
template <class Block>
LATTE_DEVICE EmitSums deal_line(Block& block, const Step& step, const plan::Cut* cuts) {
  const TileArrays& tiles = step.tiles;
  const EmitSums all = block.template scan<EmitSums>(
      step.task.config.workers,
      [&](std::int32_t w) -> EmitSums {
        const plan::Cut cut = cuts[w], before = cuts[std::max(w, 1) - 1];
        if (cut.block == 0 || cut == before) return {};
        const std::int32_t splits = cut.tile != before.tile || before.block == 0 ? 1 : 0;
        return {1, splits, (1 + splits) * (tiles.rows[cut.tile].end - tiles.rows[cut.tile].begin)};
      },
      [&](std::int32_t w, const EmitSums& own, const EmitSums& before) {
        const EmitSums dealt = before + own;
        tiles.dealt[w] = dealt;
        step.task.indptr()[w] = cuts[w].tile + dealt.pieces;
      });
  return {step.count + all.pieces, all.split_tiles, all.partial_rows};
}

// A worker's records: one a tile, from its cut to the next.
template <class Block>
LATTE_DEVICE void write_line(Block& block, const Step& step, const plan::Cut* cuts) {
  const Task& task = step.task;
  const TileArrays& tiles = step.tiles;
  block.for_each_row(task.config.workers, [&](std::int32_t w, std::int32_t first, std::int32_t every) {
    const plan::Cut begin = cuts[w], end = cuts[w + 1];
    const EmitSums dealt = tiles.dealt[w];
    const std::int32_t records = begin == end ? 0 : end.tile - begin.tile + (end.block > 0 ? 1 : 0);
    const std::int32_t partials = dealt.pieces + dealt.split_tiles;
    LATTE_ROLLED
    for (std::int32_t i = first; i < records; i += every) {
      const std::int32_t t = begin.tile + i;
      const bool begins_inside = i == 0 && begin.block > 0, ends_inside = t == end.tile;
      const RowRange rows = tiles.rows[t];
      Piece piece{.tile = t, .partial_row = -1, .blocks = {begins_inside ? begin.block : 0, end.block}};
      if (!ends_inside) piece.blocks.end = tiles.blocks[t];
      if (begins_inside)
        piece.partial_row = dealt.partial_rows - (rows.end - rows.begin);
      else if (ends_inside)
        piece.partial_row = dealt.partial_rows;
      if (!begins_inside) task.reduce_indptr()[t] = partials;
      if (piece.partial_row >= 0) task.reduce_partial()[begins_inside ? partials - 1 : partials] = piece.partial_row;
      write_record(block, step, piece, begin.tile + dealt.pieces + i);
    }
  });
}

// Chunks: worker w begins with the first piece whose middle lies in its share or, where there are no more pieces than
// workers, with one of its own. Returns the makespan.
template <class Block>
LATTE_DEVICE std::int64_t deal_chunks(Block& block, const Step& step, const ChunkPieces& cutting,
                                      std::int32_t records) {
  const std::int32_t workers = step.task.config.workers;
  const std::int64_t total = step.line_ticks + (records - step.count) * step.task.fixed.both();
  const Shares shares(total, step.task);
  const std::int32_t* first_piece = step.tiles.first_piece;
  const auto one_each = [&](std::int32_t w) -> Ticks {
    const std::int32_t record = spread_record(step.task, records, w);
    step.task.indptr()[w] = record;
    if (record == records) return {total};
    const std::int32_t t = cutting.tile(record);
    return {cutting.ticks_before(t, record - first_piece[t])};
  };
  const auto first_of = [&](std::int32_t w) -> Ticks {
    if (records <= workers) return one_each(w);
    const std::int64_t share = shares.begin(w);
    std::int32_t t = 0, high = w == 0 || w == workers ? 0 : step.count;
    while (t < high) {
      const std::int32_t middle = t + (high - t) / 2;
      if (cutting.middle(middle, first_piece[middle + 1] - first_piece[middle] - 1) < share)
        t = middle + 1;
      else
        high = middle;
    }
    if (w == workers) t = step.count;
    std::int32_t i = 0, last = w == 0 || t == step.count ? 0 : first_piece[t + 1] - first_piece[t] - 1;
    while (i < last) {
      const std::int32_t middle = i + (last - i) / 2;
      if (cutting.middle(t, middle) < share)
        i = middle + 1;
      else
        last = middle;
    }
    const bool none = t == step.count;
    step.task.indptr()[w] = none ? records : first_piece[t] + i;
    return {none ? total : cutting.ticks_before(t, i)};
  };
  const auto makespan = block.template max_between<1>(
      workers, first_of, [](std::int32_t, const Ticks& begin, const Ticks& end) { return end.ticks - begin.ticks; });
  block.sync();
  return makespan(0);
}

}  // namespace latte::cuda::planner
