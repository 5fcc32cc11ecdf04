// What both decode kernels share: the shape they are compiled for, the layout of keys and values in shared memory, and
// the part of a record a thread block does.
#pragma once

#include <cstdint>

#include "cuda/prim/sync.cuh"
#include "cuda/sm90/common/block.cuh"
#include "cuda/sm90/decode/instances.cuh"

namespace latte::cuda::sm90 {

// Rows of a thread block, KV tokens of a stage, widths, the 16-bit type of q and cache, the parts a block comes in.
//   stage:  kv[part][slab of 8 tokens][group of 64 columns][8 tokens][128 bytes], 128-byte swizzle.
// Keys read it K-major, values MN-major, and a page of any multiple of 8 tokens is whole slabs. A part has some of the
// columns of all tokens: their scores need not wait for the others.
// The last group is the rope part. When a block's scores are done it is dead, and the probabilities take its place:
//   slab j holds tokens 8j .. 8j + 7 of all rows, 16 bytes a row.
template <int kRowsOf, int kTokensOf, int kLatentOf, class HalfOf, int kPartsOf = 1>
struct Config {
  using Half = HalfOf;
  static constexpr int kRows = kRowsOf;
  static constexpr int kLatent = kLatentOf;
  static constexpr int kRope = 64;
  static constexpr int kWidth = kLatent + kRope;
  static constexpr int kGroups = kWidth / 64;
  static constexpr int kHalfGroups = kLatent / 64 / 2;  // value columns of one warpgroup, in groups
  static constexpr int kRopeGroup = kGroups - 1;
  static constexpr int kTokens = kTokensOf;
  static constexpr int kParts = kPartsOf;
  static constexpr int kPartGroups = kGroups / kParts;
  static constexpr int kSlabBytes = kPartGroups * kAtomBytes;  // of a part
  static constexpr int kSlabs = kTokens / 8;
  static constexpr int kPartBytes = kSlabs * kSlabBytes;
  static constexpr int kStageBytes = kParts * kPartBytes;
  // Where a group's first slab is in a stage.
  static constexpr int group_offset(int group) {
    return group / kPartGroups * kPartBytes + group % kPartGroups * kAtomBytes;
  }
  static constexpr int kRopeOffset = group_offset(kRopeGroup);
  // A stage is given back to the loader in units of tokens, as their values are done. With few rows, where memory is
  // the limit, units of 16 or 32 won nothing.
  static constexpr int kUnitTokens = kRows > 48 ? 16 : kTokens;
  static constexpr int kUnits = kTokens / kUnitTokens;
  // Tokens of the largest box that the copy engine brings: 16, as larger ones were no faster, or, where blocks come in
  // parts, all, as there would be many. A box is in one unit: it is asked for when that is free.
  static constexpr int kBoxTokens = kParts > 1 ? kTokens : 16;
  static_assert(kUnitTokens % kBoxTokens == 0);
  static_assert(kGroups % kParts == 0);
  static_assert(kRows % 8 == 0 && kRows <= 64 && kTokens % 16 == 0 && kRope == 64);
};

// The part of a record that a thread block does: all of its rows, or its half of a pair's.
struct Piece {
  WorkRecord record;
  std::int32_t row_begin;  // within the record
  std::int32_t rows;

  __device__ std::int32_t tokens() const { return record.kv_end - record.kv_begin; }
  template <class Config>
  __device__ std::int32_t blocks() const {
    return (tokens() + Config::kTokens - 1) / Config::kTokens;
  }
  __device__ bool split() const { return record.partial_row >= 0; }
  __device__ std::int32_t first_row() const { return record.row_begin + row_begin; }
  __device__ bool has(std::int32_t r) const { return r < rows; }
  // Of row r; of the last row for those that are not there.
  __device__ std::int32_t packed_row(std::int32_t r) const { return first_row() + min(r, rows - 1); }
};

// The records of one thread block. Each read is made anew where it stands: registers are too few to keep a record over
// a whole piece, and the compiler would.
struct Share {
  const PlanView& plan;
  std::int32_t ranks;  // thread blocks a worker, one or two
  std::int32_t begin, end;

  __device__ Share(const PlanView& of, std::int32_t blocks_a_worker) : plan(of), ranks(blocks_a_worker) {
    begin = load_word(plan.indptr + worker());
    end = load_word(plan.indptr + worker() + 1);
  }

  __device__ bool empty() const { return begin == end; }
  __device__ std::int32_t worker() const { return static_cast<std::int32_t>(blockIdx.x) >> (ranks - 1); }
  __device__ std::int32_t workers() const { return static_cast<std::int32_t>(gridDim.x) >> (ranks - 1); }

  __device__ std::int32_t rank() const { return static_cast<std::int32_t>(blockIdx.x) & (ranks - 1); }

  // A piece without rows is not this thread block's business.
  __device__ Piece piece(std::int32_t index) const {
    // Nothing is promised about alignment but that of words.
    const auto* words = reinterpret_cast<const std::int32_t*>(plan.records + index);
    Piece piece{.record = {load_word(words), load_word(words + 1), load_word(words + 2), load_word(words + 3),
                           load_word(words + 4), load_word(words + 5), load_word(words + 6), load_word(words + 7)}};
    const std::int32_t rows = piece.record.row_end - piece.record.row_begin;
    const std::int32_t share = ranks == 1 ? rows : (rows + 1) / 2;
    piece.row_begin = rank() * share;
    piece.rows = min(share, rows - piece.row_begin);
    return piece;
  }

 private:
  __device__ static std::int32_t load_word(const std::int32_t* word) {
    std::int32_t value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(word));
    return value;
  }
};

// A thread block's first steps once its barriers are initialised: its share is asked for before they are awaited.
__device__ __forceinline__ Share begin_share(const PlanView& plan, const LaunchShape& shape) {
  if (!shape.overlap_previous) prim::wait_previous_launch();
  const Share share(plan, shape.blocks_a_worker);
  __syncthreads();
  return share;
}
// And its last where it has none: nobody may take this launch for done before the one before.
__device__ __forceinline__ void end_without_share() { prim::wait_previous_launch(); }

// The next launch may start once this one has seen the end of the one before it: then what is older than that is done
// for both.
__device__ __forceinline__ void after_previous_launch() {
  prim::wait_previous_launch();
  prim::allow_next_launch();
}

// Packed row -> query token and head.
struct RowAddress {
  std::int32_t token, head;
  __device__ RowAddress(const KernelCall& call, std::int32_t row)
      : token(call.by_heads.divide(row)), head(row - token * call.heads) {}
};

// KV tokens before this position are seen by a packed row of the piece.
__device__ __forceinline__ std::int32_t row_bound(const KernelCall& call, const Piece& piece, std::int32_t row) {
  const std::int32_t token = call.by_heads.divide(row);
  std::int32_t visible = INT32_MAX;
  if (call.lengths.visible) {
    visible = call.lengths.visible[min(token, call.query_tokens - 1)];
  } else if (call.mask == Mask::causal) {
    const std::int32_t seq_len = piece.record.kv_end + piece.record.kv_after;
    visible = seq_len - call.lengths.query_start[piece.record.request + 1] + token + 1;
  }
  return min(visible, piece.record.kv_end);
}

}  // namespace latte::cuda::sm90
