// A seam (merge.cuh) of the plain kernel, from its first piece's side: the second piece's partial is fetched beside
// this one's, and both are joined in shared memory.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/sm90/decode/plain_store.cuh"

namespace latte::cuda::sm90::plain {

// Two partials of a row, one side's values. What comes out has the bits that Joined gives it, as elsewhere a tile of
// two pieces is joined in slices.
struct SumOfTwo {
  float first, second;  // what the values of each are multiplied by
  RowResult result;

  __device__ SumOfTwo(const Tail& a, const Tail& b, int side) {
    const float highest = fmaxf(a.lse_log2, b.lse_log2), base = usable(highest);
    const float weights[2] = {exp2_fast(a.lse_log2 - base), exp2_fast(b.lse_log2 - base)};
    result = RowResult(highest, weights[0] + weights[1]);
    first = weights[0] * (side == 0 ? a.scale[0] : a.scale[1]);
    second = weights[1] * (side == 0 ? b.scale[0] : b.scale[1]);
  }
  // Of two values each. A product added to zero is not quite a product: it is never -0.
  __device__ float2 operator()(std::uint32_t a, std::uint32_t b) const {
    const float2 x = unpack<__half>(a), y = unpack<__half>(b);
    return make_float2(__fmaf_rn(y.x, second, __fmaf_rn(x.x, first, 0.0f)),
                       __fmaf_rn(y.y, second, __fmaf_rn(x.y, first, 0.0f)));
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
      const int r = i / Row::kVectors, v = i % Row::kVectors;
      const SumOfTwo sum(a.tail[r], b.tail[r], v / (Row::kVectors / 2));
      const uint4 x = a.values[i], y = b.values[i];
      const float2 pairs[4] = {sum(x.x, y.x), sum(x.y, y.y), sum(x.z, y.z), sum(x.w, y.w)};
      const auto& values = reinterpret_cast<const float(&)[8]>(pairs);
      std::byte* const row = sink.row(r);
      sink.with_type([&](auto element) {
        AsHeld::put_exchanged(reinterpret_cast<decltype(element)*>(row), v / 4 * 32, v, values, sum.result.inverse);
      });
      if (v == 0) sink.put_lse(r, sum.result.lse());
    }
  }
};

}  // namespace latte::cuda::sm90::plain
