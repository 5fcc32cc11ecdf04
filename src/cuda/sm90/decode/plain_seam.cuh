// A seam (merge.cuh) of the plain kernel, from its first piece's side: the second piece's partial is fetched beside
// this one's, and both are joined in shared memory.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/sm90/decode/plain_store.cuh"

namespace latte::cuda::sm90::plain {

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

  // By all merging threads, when they have computed the first piece. `fetched` is used once a launch.
  __device__ void fetch_second(const KernelCall& call, const Piece& piece, const Share& share,
                               prim::Barrier& fetched) const {
    if (threadIdx.x == kWarpgroup) {
      std::uint32_t* const counter = arrived(call, piece, share);
      while (prim::load_acquire(counter) == 0) {
      }
      prim::store_relaxed(counter, 0);
    }
    merge_sync();  // nobody has any more use for the stages
    if (threadIdx.x != kWarpgroup) return;
    // Its partial lies behind the first one's.
    const Row from(call.workspace, std::int64_t{piece.record.partial_row} + piece.row_begin + piece.record.row_end -
                                       piece.record.row_begin);
    const Row to = second();
    const std::uint32_t value_bytes = piece.rows * Config::kLatent * 2, tail_bytes = piece.rows * sizeof(Tail);
    prim::fence_async_proxy_global();
    fetched.arrive_expecting(value_bytes + tail_bytes);
    prim::load_bytes(fetched, prim::shared_address(to.values), from.values, value_bytes);
    prim::load_bytes(fetched, prim::shared_address(to.tail), from.tail, tail_bytes);
  }

  // When both are there. By all merging threads, a vector each.
  __device__ void store_sum(const Sink& sink) const {
    static_assert(Row::kVectors % 32 == 0);  // so that whole warps have vectors, or none
    const Row a = first(), b = second();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroup; i < sink.rows() * Row::kVectors; i += kMergeThreads) {
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
};

}  // namespace latte::cuda::sm90::plain
