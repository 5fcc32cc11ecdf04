// Tiles of two pieces that the plain kernel joins in shared memory (merge.cuh): the other piece's partial is fetched
// beside this thread block's own, which never goes through memory.
//   At a seam whoever has the first piece joins all rows. Of twins each joins half of them, and stores the other half.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/sm90/decode/plain_store.cuh"
#include "cuda/sm90/decode/seam.hpp"

namespace latte::cuda::sm90::plain {

// Where record i lies; nowhere if it has no rows for this thread block.
__device__ __forceinline__ Seam seam(const KernelCall& call, const Share& share, std::int32_t i) {
  const Piece piece = share.piece(i);
  if (piece.rows <= 0) return Seam::none;
  return find_seam(call.plan, {share.workers(), share.worker(), share.begin, share.end}, i, piece.record);
}

// Which of a piece's rows its thread block joins, and so keeps. A warp has 16 rows, and keeps all or none.
struct RowRange {
  int begin = 0, end = 0;
  __device__ RowRange(Seam here, int rows) {
    const int half = min(rows, (rows + 31) / 32 * 16);
    if (here == Seam::second_twin) begin = half;
    if (here == Seam::before || here == Seam::second_twin) end = rows;
    if (here == Seam::first_twin) end = half;
  }
};

// Where they are joined: in place of the stages, which are free behind a share's last piece.
//   values of the first | of the second | tails of the first | of the second
template <class Config>
struct SeamRoom {
  using Row = PartialRow<AsHeld, Config::kLatent>;
  static constexpr int kValueBytes = Config::kRows * Config::kLatent * 2;

  std::byte* room;

  template <int kStages>
  __device__ explicit SeamRoom(std::byte (&stages)[kStages][Config::kStageBytes])
      : room(reinterpret_cast<std::byte*>(stages)) {
    static_assert(2 * (kValueBytes + Config::kRows * sizeof(Tail)) <= sizeof(stages));
  }
  __device__ Row first() const { return {room, room + 2 * kValueBytes, 0}; }
  __device__ Row second() const { return {room, room + 2 * kValueBytes, Config::kRows}; }

  // Where this thread block's own partial is kept.
  __device__ Row own(Seam here) const { return here == Seam::second_twin ? second() : first(); }

  // At a seam, when all merging threads have computed the first piece.
  __device__ void fetch_second(const KernelCall& call, const Piece& piece, const Share& share,
                               prim::Barrier& fetched) const {
    if (threadIdx.x == kWarpgroup) {
      std::uint32_t* const counter = arrived(call, piece, share);
      while (prim::load_acquire(counter) == 0) {
      }
      prim::store_relaxed(counter, 0);
    }
    merge_sync();  // nobody has any more use for the stages
    if (threadIdx.x == kWarpgroup) fetch_other(call, piece, Seam::before, fetched);
  }
  // Of twins, when this one is announced. By one thread.
  __device__ void fetch_twin(const KernelCall& call, const Piece& piece, const Share& share, Seam here,
                             prim::Barrier& fetched) const {
    std::uint32_t* const counter = arrived(call, piece, share);
    while (prim::load_acquire(counter) < 2) {
    }
    prim::add_wrapping(counter, 3);  // as slices of two do
    fetch_other(call, piece, here, fetched);
  }

  // Joins this thread block's rows when both are there. By all merging threads, a vector each.
  __device__ void store_sum(const Sink& sink, Seam here) const {
    static_assert(Row::kVectors % 32 == 0);  // so that whole warps have vectors, or none
    const Row a = first(), b = second();
    const RowRange mine(here, sink.rows());
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroup + mine.begin * Row::kVectors; i < mine.end * Row::kVectors;
         i += kMergeThreads) {
      const int r = i / Row::kVectors, v = i % Row::kVectors, side = v / (Row::kVectors / 2);
      // As slices are joined elsewhere, so that a row's bits do not tell which it was.
      const Tail tails[2] = {a.tail[r], b.tail[r]};
      const Words<Row::kVector> words[2] = {a.values[i], b.values[i]};
      Joined<Row::kVector> sum;
      const float base = sum.raise({tails[0].lse_log2, tails[1].lse_log2});
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float weight = exp2_fast(tails[k].lse_log2 - base);
        sum.sum += weight;
        sum.add(words[k], weight * (side == 0 ? tails[k].scale[0] : tails[k].scale[1]));
      }
      const RowResult result(sum.reference, sum.sum);
      std::byte* const row = sink.row(r);
      sink.with_type([&](auto element) {
        AsHeld::put_exchanged(reinterpret_cast<decltype(element)*>(row), v / 4 * 32, v, sum.value, result.inverse);
      });
      if (v == 0) sink.put_lse(r, result.lse());
    }
  }

 private:
  // The other piece's partial, of the rows that are joined here. `fetched` is used once a launch.
  __device__ void fetch_other(const KernelCall& call, const Piece& piece, Seam here, prim::Barrier& fetched) const {
    const RowRange mine(here, piece.rows);
    // The second piece's partial lies behind the first one's.
    const std::int32_t tile_rows = piece.record.row_end - piece.record.row_begin;
    const std::int64_t other =
        std::int64_t{piece.record.partial_row} + (here == Seam::second_twin ? -tile_rows : tile_rows);
    const Row from(call.workspace, other + piece.row_begin + mine.begin);
    const Row to = (here == Seam::second_twin ? first() : second()) + mine.begin;
    const std::uint32_t rows = mine.end - mine.begin;
    const std::uint32_t value_bytes = rows * Config::kLatent * 2, tail_bytes = rows * sizeof(Tail);
    prim::fence_async_proxy_global();
    fetched.arrive_expecting(value_bytes + tail_bytes);
    if (rows == 0) return;
    prim::load_bytes(fetched, prim::shared_address(to.values), from.values, value_bytes);
    prim::load_bytes(fetched, prim::shared_address(to.tail), from.tail, tail_bytes);
  }
};

}  // namespace latte::cuda::sm90::plain
