// Writing the plan: how many pieces each tile has, a scan that numbers pieces and partials, then every record by
// itself.
#pragma once

#include "cuda/plan/balance.hpp"

namespace latte::cuda::planner {

struct EmitSums {
  std::int32_t pieces = 0, split_tiles = 0, partial_rows = 0;
  LATTE_DEVICE EmitSums operator+(const EmitSums& o) const {
    return {pieces + o.pieces, split_tiles + o.split_tiles, partial_rows + o.partial_rows};
  }
  LATTE_DEVICE EmitSums operator-(const EmitSums& o) const {
    return {pieces - o.pieces, split_tiles - o.split_tiles, partial_rows - o.partial_rows};
  }
  template <class Fn>
  LATTE_DEVICE EmitSums map(const Fn& fn) const {
    return {fn(pieces), fn(split_tiles), fn(partial_rows)};
  }

  LATTE_DEVICE static EmitSums of(std::int32_t pieces, std::int32_t rows) {
    return pieces == 1 ? EmitSums{1, 0, 0} : EmitSums{pieces, 1, pieces * rows};
  }
  // Of these many tiles: every piece but those of tiles in one.
  LATTE_DEVICE std::int32_t partials(std::int32_t tiles) const { return pieces - (tiles - split_tiles); }
};

// A tile's place on the line as well.
struct ChunkSums {
  Ticks line;
  EmitSums emit;
  LATTE_DEVICE ChunkSums operator+(const ChunkSums& o) const { return {line + o.line, emit + o.emit}; }
  LATTE_DEVICE ChunkSums operator-(const ChunkSums& o) const { return {line - o.line, emit - o.emit}; }
  template <class Fn>
  LATTE_DEVICE ChunkSums map(const Fn& fn) const {
    return {line.map(fn), emit.map(fn)};
  }
};

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

// A tile's pieces are cut by one of these. `tile`: where a piece belongs; `range`: the blocks of piece i of a tile;
// `position`: where the piece's record goes.

struct LinePieces {
  const Step& step;

  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return last_at_most(step.tiles.first_piece, 0, step.count, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i, std::int32_t pieces) const {
    // Pieces before this tile are one a tile and one a cut, so the tile's first cut is:
    const plan::Cut* cut = step.tiles.inner + (step.tiles.first_piece[t] - t);
    return {i == 0 ? 0 : cut[i - 1].block, i + 1 == pieces ? step.tiles.blocks[t] : cut[i].block};
  }
  LATTE_DEVICE std::int32_t position(std::int32_t piece) const { return piece; }
};

// Pieces are dealt round-robin, and the first `more` workers have one more than the others.
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
  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return uniform_tile(step, step.tiles.first_piece, n, records, 0, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i, std::int32_t) const {
    return uniform_range(step.task, n, step.tiles.blocks[t], i);
  }
  LATTE_DEVICE std::int32_t position(std::int32_t piece) const {
    const std::int32_t row = step.task.by_workers.floor(piece);
    return first_record(piece - row * step.task.config.workers) + row;
  }
};

struct ChunkPieces {
  const Step& step;
  std::int32_t chunk;  // blocks

  LATTE_DEVICE std::int32_t tile(std::int32_t piece) const {
    return last_at_most(step.tiles.first_piece, 0, step.count, piece);
  }
  LATTE_DEVICE BlockRange range(std::int32_t t, std::int32_t i, std::int32_t) const {
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
    const BlockRange blocks = range(t, i, 0);
    const std::int64_t ticks =
        step.task.fixed.piece + (blocks.end - blocks.begin) * step.block_ticks(t) + (i > 0 ? step.task.fixed.split : 0);
    return ticks_before(t, i) + ticks / 2;
  }
};

template <class Block, class Pieces>
LATTE_DEVICE void write_records(Block& block, const Step& step, const Pieces& cutting, std::int32_t records) {
  const Task& task = step.task;
  const TileArrays& tiles = step.tiles;
  block.for_each(records, [&](std::int32_t piece) {
    const std::int32_t t = cutting.tile(piece);
    const std::int32_t i = piece - tiles.first_piece[t], pieces = tiles.first_piece[t + 1] - tiles.first_piece[t];
    const BlockRange blocks = cutting.range(t, i, pieces);
    const RowRange rows = tiles.rows[t];
    std::int32_t partial_row = -1;
    if (pieces > 1) {
      const std::int32_t first_partial = tiles.first_partial[t];
      const std::int32_t first_row =
          tiles.partial_row != nullptr ? tiles.partial_row[t] : task.reduce_partial()[first_partial];
      partial_row = first_row + i * (rows.end - rows.begin);
      if (i > 0) task.reduce_partial()[first_partial + i] = partial_row;  // the first is there already
    }
    const std::int64_t end = std::int64_t{blocks.end} * task.config.kv_block;
    const std::int32_t extent = tiles.extent[t], kv_end = end < extent ? static_cast<std::int32_t>(end) : extent;
    block.store(task.records() + cutting.position(piece), {.request = tiles.request[t],
                                                           .partial_row = partial_row,
                                                           .row_begin = rows.begin,
                                                           .row_end = rows.end,
                                                           .kv_begin = blocks.begin * task.config.kv_block,
                                                           .kv_end = kv_end,
                                                           .kv_after = extent - kv_end + tiles.behind[t],
                                                           .tile = t});
  });
}

// The cut line: cuts inside tiles, each once, and where each worker's records begin. Before a cut lie as many records
// as tiles begin before it and cuts inside tiles lie before it.
template <class Block>
LATTE_DEVICE void deal_line(Block& block, const Step& step, const plan::Cut* cuts) {
  const TileArrays& tiles = step.tiles;
  if (tiles.cuts != nullptr) {
    block.for_each(step.task.config.workers, [&](std::int32_t w) { tiles.cuts[w] = cuts[w]; });
    block.sync();
    cuts = tiles.cuts;
  }
  block.template scan<TileCount>(
      step.task.config.workers,
      [&](std::int32_t w) -> TileCount { return {w > 0 && cuts[w].block > 0 && cuts[w] != cuts[w - 1] ? 1u : 0u}; },
      [&](std::int32_t w, const TileCount& own, const TileCount& before) {
        if (own.tiles > 0) {
          tiles.inner[before.tiles] = cuts[w];
          block.add(tiles.first_partial + cuts[w].tile, 1);
        }
        step.task.indptr()[w] = cuts[w].tile + static_cast<std::int32_t>(before.tiles + own.tiles);
      });
}

// Chunks: worker w begins with the first piece whose middle lies in its share. Returns the makespan.
template <class Block>
LATTE_DEVICE std::int64_t deal_chunks(Block& block, const Step& step, const ChunkPieces& cutting,
                                      std::int32_t records) {
  const std::int32_t workers = step.task.config.workers;
  const std::int64_t total = step.line_ticks + (records - step.count) * step.task.fixed.both();
  const Shares shares(total, step.task);
  const std::int32_t* first_piece = step.tiles.first_piece;
  const auto first_of = [&](std::int32_t w) -> Ticks {
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
  return block.template max_between<1>(
      workers, first_of, [](std::int32_t, const Ticks& begin, const Ticks& end) { return end.ticks - begin.ticks; })[0];
}

}  // namespace latte::cuda::planner
