// The planner of src/plan as one thread block does it: the same words, bit for bit (docs/plan.md, "Planning on the
// device"). Arithmetic that decides a word is src/plan/arithmetic.hpp's, or says which of its functions it stands for;
// the rest is scans, searches and maxima.
//
// A Block offers, with a barrier at the end:
//   all(count, fn(i))                               whether every one is true
//   scan<T>(count, load(i), store(i, own, before))  prefix sums in order of i; returns the total
//   scan_rows(rows, count, load(row, i), store(row, i, before))     many short scans; stores each total at i = count
//   max_rows(rows, count, fn(row, i))               returns a function of the row; maxima from 0 up
//   sync()
// without, so that what is asked for until the next one is done side by side, by different warps; three at most. The
// result is a function that every thread calls between the next barrier and the one behind it:
//   max_between<K>(count, make(i), fn(k, a, b)[, rows])
//                                                   of k < K, or of the first rows: the maximum over neighbours of
//                                                   make(0) .. make(count), which may be made twice
//   max_of(count, fn(i)), sum_of(count, fn(i))      maxima from 0 up
// and also without:
//   for_each(count, fn(i))                          every i once, by any thread, in any order
//   for_each_row(rows, fn(row, first, every))       a few threads a row, of which each is to do items first,
//                                                   first + every, ...
//   sum_rows(rows, count, load(row, i), store(row, sum))
//   fold_rows(rows, count, load(row, i), store(row, all))           plan::Even: pieces added up, the longest of all
//   count_true(rows, fn(row)), first_smallest(rows, fn(row))        at most 32 rows; every thread gets the result
//   store(where, record)
//   leader()                                        true in one thread
#pragma once

#include "cuda/plan/emit.hpp"

namespace latte::cuda::planner {

struct Written {
  EmitSums sums;
  std::int64_t makespan;
  std::int32_t splits;
};

// What does not depend on lengths is written while they are loaded.
LATTE_DEVICE inline void write_fixed_meta(const Task& task) {
  std::int32_t* meta = task.words;
  meta[kMetaVersion] = kPlanVersion;
  meta[kMetaWorkers] = task.config.workers;
  meta[kMetaRequests] = task.requests;
  meta[kMetaHeads] = task.config.heads;
  meta[kMetaRowTile] = task.config.row_tile;
  meta[kMetaKvBlock] = task.config.kv_block;
  meta[kMetaOffsetIndptr] = static_cast<std::int32_t>(task.at.indptr);
  meta[kMetaOffsetRecords] = static_cast<std::int32_t>(task.at.records);
  meta[kMetaOffsetReduceIndptr] = static_cast<std::int32_t>(task.at.reduce_indptr);
  meta[kMetaOffsetReduceFinal] = static_cast<std::int32_t>(task.at.reduce_final);
  meta[kMetaOffsetReducePartial] = static_cast<std::int32_t>(task.at.reduce_partial);
}

LATTE_DEVICE inline void write_meta(const Task& task, std::int32_t tiles, const Written& written) {
  const std::int32_t partials = written.sums.partials(tiles);
  std::int32_t* meta = task.words;
  meta[kMetaRecords] = written.sums.pieces;
  meta[kMetaTiles] = tiles;
  meta[kMetaSplitTiles] = written.sums.split_tiles;
  meta[kMetaPartials] = partials;
  meta[kMetaPartialRows] = written.sums.partial_rows;
  meta[kMetaSplits] = written.splits;
  meta[kMetaMakespanLow] = static_cast<std::int32_t>(static_cast<std::uint32_t>(written.makespan));
  meta[kMetaMakespanHigh] = static_cast<std::int32_t>(written.makespan >> 32);
  task.reduce_indptr()[tiles] = partials;
  task.indptr()[task.config.workers] = written.sums.pieces;
}

// The tiles of a step, once their requests are read.
struct Source {
  const Task& task;
  RequestArrays requests;
  const TileArrays& tiles;
  std::int32_t count, each;  // tiles; of a request, or 0

  LATTE_DEVICE Tile tile(std::int32_t t) const { return make_tile(task, requests, each, tiles, t); }
  LATTE_DEVICE Step step(std::int64_t line_ticks) const { return {task, tiles, count, line_ticks}; }
  LATTE_DEVICE void number(std::int32_t t, const EmitSums& own, const EmitSums& before) const {
    number_tile(task, tiles, count, t, own, before);
  }
};

// Whose records begin where.
template <class Block, class Pieces>
LATTE_DEVICE void deal(Block& block, const Step& step, const Pieces& cutting) {
  block.for_each(step.task.config.workers, [&](std::int32_t w) { step.task.indptr()[w] = cutting.indptr(w); });
}

template <class Block>
LATTE_DEVICE void write_uniform(Block& block, const Step& step, std::int32_t n, std::int32_t records) {
  const UniformPieces cutting(step, n, records);
  deal(block, step, cutting);
  write_records(block, step, cutting, records);
}

template <class Block>
LATTE_DEVICE EmitSums emit_line(Block& block, const Step& step, std::int32_t line) {
  const plan::Cut* cuts = step.tiles.trial + line * (step.task.config.workers + 1);
  if (step.tiles.cuts != nullptr) {
    block.for_each(step.task.config.workers + 1, [&](std::int32_t w) { step.tiles.cuts[w] = cuts[w]; });
    block.sync();
    cuts = step.tiles.cuts;
  }
  const EmitSums sums = deal_line(block, step, cuts);
  write_line(block, step, cuts);
  return sums;
}

// Where piece and tile are one.
template <class Block>
LATTE_DEVICE EmitSums emit_whole(Block& block, const Step& step) {
  const UniformPieces cutting(step, 1, step.count);
  deal(block, step, cutting);
  block.for_each(step.count, [&](std::int32_t t) {
    step.task.reduce_indptr()[t] = 0;
    write_record(block, step, {.tile = t, .partial_row = -1, .blocks = {0, step.tiles.blocks[t]}}, cutting.position(t));
  });
  return {.pieces = step.count};
}

// uniform(n), or even(n) as -n.
template <class Block>
LATTE_DEVICE EmitSums emit_pieces(Block& block, const Source& source, const Step& step, std::int32_t n) {
  const TileArrays& tiles = source.tiles;
  const EmitSums sums = block.template scan<EmitSums>(
      source.count,
      [&](std::int32_t t) {
        return EmitSums::of(plan::cut_pieces(tiles.blocks[t], n), tiles.rows[t].end - tiles.rows[t].begin);
      },
      [&](std::int32_t t, const EmitSums& own, const EmitSums& before) { source.number(t, own, before); });
  if (n < 0) {
    const EvenPieces cutting{step, sums.pieces};
    deal(block, step, cutting);
    write_records(block, step, cutting, sums.pieces);
  } else {
    write_uniform(block, step, n, sums.pieces);
  }
  return sums;
}

template <class Block>
LATTE_DEVICE Written plan_balanced(Block& block, const Source& source, const Candidates& candidates) {
  const Ticks line = block.template scan<Ticks>(
      source.count, [&](std::int32_t t) { return unsplit_ticks(source.task, source.tile(t)); },
      [&](std::int32_t t, const Ticks&, const Ticks& before) { source.tiles.line[t] = before.ticks; });
  const Step step = source.step(line.ticks);
  const Choice choice = balance(block, step, candidates);
  Written written{.makespan = choice.makespan, .splits = choice.splits};
  if (choice.splits == 0)
    written.sums = emit_line(block, step, choice.line);
  else if (choice.whole)
    written.sums = emit_whole(block, step);
  else
    written.sums = emit_pieces(block, source, step, choice.splits);
  return written;
}

template <class Block>
LATTE_DEVICE Written plan_uniform(Block& block, const Source& source) {
  const std::int32_t n = source.task.config.policy.n;
  const EmitSums sums = block.template scan<EmitSums>(
      source.count,
      [&](std::int32_t t) {
        const Tile tile = source.tile(t);
        return EmitSums::of(plan::uniform_pieces(tile.blocks, n), tile.rows);
      },
      [&](std::int32_t t, const EmitSums& own, const EmitSums& before) { source.number(t, own, before); });
  const Step step = source.step(0);
  write_uniform(block, step, n, sums.pieces);
  const auto makespan = block.max_rows(1, source.task.config.workers, [&](std::int32_t, std::int32_t w) {
    return uniform_load(step, source.tiles.first_piece, n, sums.pieces, w);
  });
  return {sums, makespan(0), n};
}

template <class Block>
LATTE_DEVICE Written plan_chunks(Block& block, const Source& source) {
  const Task& task = source.task;
  const ChunkSums sums = block.template scan<ChunkSums>(
      source.count,
      [&](std::int32_t t) -> ChunkSums {
        const Tile tile = source.tile(t);
        return {unsplit_ticks(task, tile), EmitSums::of(std::max(1, task.by_chunk.ceil(tile.blocks)), tile.rows)};
      },
      [&](std::int32_t t, const ChunkSums& own, const ChunkSums& before) {
        source.tiles.line[t] = before.line.ticks;
        source.number(t, own.emit, before.emit);
      });
  const Step step = source.step(sums.line.ticks);
  const ChunkPieces cutting{step, plan::chunk_blocks(task.config)};
  write_records(block, step, cutting, sums.emit.pieces);
  return {sums.emit, deal_chunks(block, step, cutting, sums.emit.pieces), 0};
}

template <PolicyKind kind, class Block>
LATTE_DEVICE void plan_tiles(Block& block, const Source& source, const Candidates& candidates) {
  Written written;
  if constexpr (kind == PolicyKind::balanced)
    written = plan_balanced(block, source, candidates);
  else if constexpr (kind == PolicyKind::uniform)
    written = plan_uniform(block, source);
  else
    written = plan_chunks(block, source);
  if (block.leader()) write_meta(source.task, source.count, written);
}

template <class Shared>
LATTE_DEVICE Candidates candidates_of(Shared& shared) {
  return {shared.extra, shared.even};
}

// `kind` is the task's, known beforehand: a kernel's code runs once, so there should be little to load. In the usual
// case every address is known to be in shared memory; else the code is another copy.
template <PolicyKind kind, class Block, class Shared>
LATTE_DEVICE void make_plan(Block& block, const Task& task, Shared& shared) {
  if (block.leader()) write_fixed_meta(task);
  RequestArrays requests = shared_requests(shared);
  TileCounts counts;
  if (task.read_requests <= Shared::kRequests) {
    counts = read_requests(block, task, requests);
    if (fits(task, counts.tiles, shared)) {
      const TileArrays tiles = shared_arrays(shared);
      const Source source{task, shared_requests(shared), tiles, counts.tiles, counts.each};
      return plan_tiles<kind>(block, source, candidates_of(shared));
    }
  } else {
    requests = global_requests(task);
    counts = read_requests(block, task, requests);
  }
  const TileArrays tiles = global_arrays(task);
  plan_tiles<kind>(block, Source{task, requests, tiles, counts.tiles, counts.each}, candidates_of(shared));
}

}  // namespace latte::cuda::planner
