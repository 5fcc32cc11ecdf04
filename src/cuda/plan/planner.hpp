// The planner of src/plan as one thread block does it: the same words, bit for bit (docs/plan.md, "Planning on the
// device"). Arithmetic that decides a word is src/plan/arithmetic.hpp's, or says which of its functions it stands for;
// the rest is scans, searches and maxima.
//
// A Block offers, with a barrier at the end:
//   scan<T>(count, load(i), store(i, own, before))  prefix sums in order of i; returns the total
//   scan_rows(rows, count, load(row, i), store(row, i, before))     many short scans; stores each total at i = count
//   max_rows(rows, count, fn(row, i))               returns a function of the row; maxima from 0 up
//   max_between<K>(count, make(i), fn(k, a, b))     K maxima over neighbours of make(0) .. make(count), which may be
//                                                   made twice
//   sync()
// and without:
//   for_each(count, fn(i))                          every i once, by any thread, in any order
//   sum_rows(rows, count, load(row, i), store(row, sum))
//   count_true(rows, fn(row)), first_smallest(rows, fn(row))        at most 32 rows; every thread gets the result
//   add(where, number)                              by one thread among many
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

LATTE_DEVICE inline void write_meta(const Task& task, std::int32_t tiles, const Written& written) {
  std::int32_t* meta = task.words;
  meta[kMetaVersion] = kPlanVersion;
  meta[kMetaWorkers] = task.config.workers;
  meta[kMetaRequests] = task.requests;
  meta[kMetaRecords] = written.sums.pieces;
  meta[kMetaTiles] = tiles;
  meta[kMetaSplitTiles] = written.sums.split_tiles;
  meta[kMetaPartials] = written.sums.partials(tiles);
  meta[kMetaPartialRows] = written.sums.partial_rows;
  meta[kMetaHeads] = task.config.heads;
  meta[kMetaRowTile] = task.config.row_tile;
  meta[kMetaKvBlock] = task.config.kv_block;
  meta[kMetaSplits] = written.splits;
  meta[kMetaMakespanLow] = static_cast<std::int32_t>(static_cast<std::uint32_t>(written.makespan));
  meta[kMetaMakespanHigh] = static_cast<std::int32_t>(written.makespan >> 32);
  meta[kMetaOffsetIndptr] = static_cast<std::int32_t>(task.at.indptr);
  meta[kMetaOffsetRecords] = static_cast<std::int32_t>(task.at.records);
  meta[kMetaOffsetReduceIndptr] = static_cast<std::int32_t>(task.at.reduce_indptr);
  meta[kMetaOffsetReduceFinal] = static_cast<std::int32_t>(task.at.reduce_final);
  meta[kMetaOffsetReducePartial] = static_cast<std::int32_t>(task.at.reduce_partial);
  task.reduce_indptr()[tiles] = written.sums.partials(tiles);
  task.indptr()[task.config.workers] = written.sums.pieces;
}

// The tiles of a step, once their requests are read.
struct Source {
  const Task& task;
  RequestArrays requests;
  const TileArrays& tiles;
  std::int32_t count;

  LATTE_DEVICE Tile tile(std::int32_t t) const { return make_tile(task, requests, tiles, t); }
  LATTE_DEVICE Step step(std::int64_t line_ticks) const { return {task, tiles, count, line_ticks}; }
  LATTE_DEVICE void number(std::int32_t t, const EmitSums& own, const EmitSums& before) const {
    number_tile(task, tiles, count, t, own, before);
  }
};

template <class Block>
LATTE_DEVICE void write_uniform(Block& block, const Step& step, std::int32_t n, std::int32_t records) {
  const UniformPieces cutting(step, n, records);
  block.for_each(step.task.config.workers, [&](std::int32_t w) { step.task.indptr()[w] = cutting.first_record(w); });
  write_records(block, step, cutting, records);
}

template <class Block>
LATTE_DEVICE Written plan_balanced(Block& block, const Source& source, std::int32_t* extra) {
  const TileArrays& tiles = source.tiles;
  const Ticks line = block.template scan<Ticks>(
      source.count,
      [&](std::int32_t t) {
        tiles.first_partial[t] = 0;
        return unsplit_ticks(source.task, source.tile(t));
      },
      [&](std::int32_t t, const Ticks&, const Ticks& before) { tiles.line[t] = before.ticks; });
  const Step step = source.step(line.ticks);
  const Choice choice = balance(block, step, extra);
  if (choice.splits == 0) deal_line(block, step, choice.cuts);
  const EmitSums sums = block.template scan<EmitSums>(
      source.count,
      [&](std::int32_t t) {
        const std::int32_t pieces =
            choice.splits > 0 ? plan::uniform_pieces(tiles.blocks[t], choice.splits) : 1 + tiles.first_partial[t];
        return EmitSums::of(pieces, tiles.rows[t].end - tiles.rows[t].begin);
      },
      [&](std::int32_t t, const EmitSums& own, const EmitSums& before) { source.number(t, own, before); });
  if (choice.splits > 0)
    write_uniform(block, step, choice.splits, sums.pieces);
  else
    write_records(block, step, LinePieces{step}, sums.pieces);
  return {sums, choice.makespan, choice.splits};
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
LATTE_DEVICE void plan_tiles(Block& block, const Source& source, std::int32_t* extra) {
  Written written;
  if constexpr (kind == PolicyKind::balanced)
    written = plan_balanced(block, source, extra);
  else if constexpr (kind == PolicyKind::uniform)
    written = plan_uniform(block, source);
  else
    written = plan_chunks(block, source);
  if (block.leader()) write_meta(source.task, source.count, written);
}

// `kind` is the task's, known beforehand: a kernel's code runs once, so there should be little to load. In the usual
// case every address is known to be in shared memory; else the code is another copy.
template <PolicyKind kind, class Block, class Shared>
LATTE_DEVICE void make_plan(Block& block, const Task& task, Shared& shared) {
  RequestArrays requests = shared_requests(shared);
  std::int32_t count = 0;
  if (task.read_requests <= Shared::kRequests) {
    count = read_requests(block, task, requests);
    if (fits(task, count, shared)) {
      const TileArrays tiles = shared_arrays(shared);
      return plan_tiles<kind>(block, Source{task, shared_requests(shared), tiles, count}, shared.extra);
    }
  } else {
    requests = global_requests(task);
    count = read_requests(block, task, requests);
  }
  const TileArrays tiles = global_arrays(task);
  plan_tiles<kind>(block, Source{task, requests, tiles, count}, shared.extra);
}

}  // namespace latte::cuda::planner
