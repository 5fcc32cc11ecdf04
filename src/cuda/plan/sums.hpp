// What the planner's scans add up. Each offers map(), which takes a function over each of its numbers: a thread block
// moves numbers, not structures.
#pragma once

#include <cstdint>

#include "cuda/plan/division.hpp"

namespace latte::cuda::planner {

struct TileCount {
  std::uint32_t tiles = 0;
  LATTE_DEVICE TileCount operator+(const TileCount& o) const { return {tiles + o.tiles}; }
  LATTE_DEVICE TileCount operator-(const TileCount& o) const { return {tiles - o.tiles}; }
  template <class Fn>
  LATTE_DEVICE TileCount map(const Fn& fn) const {
    return {fn(tiles)};
  }
};

struct Ticks {
  std::int64_t ticks = 0;
  LATTE_DEVICE Ticks operator+(const Ticks& o) const { return {ticks + o.ticks}; }
  LATTE_DEVICE Ticks operator-(const Ticks& o) const { return {ticks - o.ticks}; }
  template <class Fn>
  LATTE_DEVICE Ticks map(const Fn& fn) const {
    return {fn(ticks)};
  }
};

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

}  // namespace latte::cuda::planner
