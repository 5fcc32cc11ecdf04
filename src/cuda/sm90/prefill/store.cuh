// What becomes of a warpgroup's 64 rows: the caller's output, or a partial and, if it was the tile's last, the join.
#pragma once

#include "cuda/sm90/prefill/config.cuh"

namespace latte::cuda::sm90::prefill {

// Named barriers, one for each consumer.
inline constexpr int kBarrierJoin = 1;
inline constexpr int kBarrierTurn = 3;

// A thread's place among the rows of a tile: it holds two rows, and of each the columns 8 j + 2 (lane % 4) + {0, 1}.
struct Place {
  int side, warp, lane;
  __device__ Place()
      : side(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        warp(static_cast<int>(threadIdx.x) / 32 % 4),
        lane(static_cast<int>(threadIdx.x) % 32) {}
  __device__ int row(int which) const { return side * 64 + warp * 16 + lane / 4 + which * 8; }
};

struct RowOut {
  const PrefillCall& call;
  const Piece& piece;

  __device__ void lse(int row, float value) const {
    if (piece.split())
      call.workspace.partial_lse[std::int64_t{piece.record.partial_row} + row] = value;
    else if (call.out.lse)
      call.out.lse[std::int64_t{piece.token + row} * call.out.lse_token_stride +
                   std::int64_t{piece.head} * call.out.lse_head_stride] = value;
  }
  __device__ float* partial(int row) const {
    return call.workspace.partial_out + (std::int64_t{piece.record.partial_row} + row) * kValues;
  }
  template <class Out>
  __device__ Out* final(int row) const {
    return static_cast<Out*>(call.out.out) + std::int64_t{piece.token + row} * call.out.out_token_stride +
           std::int64_t{piece.head} * call.out.out_head_stride;
  }
};

// Rows of a piece that have a place to go to.
__device__ __forceinline__ std::int32_t stored_rows(const PrefillCall& call, const Piece& piece) {
  return piece.split() ? piece.rows() : min(piece.rows(), call.out_tokens - piece.token);
}

// Row values of both kinds as fp32: pairs, as threads hold them.
__device__ __forceinline__ void store_pairs(float* row, const float (&o)[64], int which, float factor, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
    reinterpret_cast<float2*>(row)[4 * j + lane % 4] =
        make_float2(o[4 * j + 2 * which] * factor, o[4 * j + 2 * which + 1] * factor);
}

// As 16-bit values: four lanes exchange so that each stores 16 bytes. By whole warps; `row` is null where there is
// none.
template <class Half>
__device__ __forceinline__ void store_packed(Half* row, const float (&o)[64], int which, float factor, int lane) {
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack<Half>(o[4 * (j + i) + 2 * which] * factor, o[4 * (j + i) + 2 * which + 1] * factor);
    transpose_in_fours(words, lane);
    if (row) reinterpret_cast<uint4*>(row)[j + lane % 4] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void store_rows(const PrefillCall& call, const Piece& piece, const Place& at,
                                           const float (&o)[64], const RowResult (&results)[2]) {
  const RowOut out{call, piece};
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int row = at.row(which);
    const bool there = row < stored_rows(call, piece);
    const float factor = results[which].inverse * piece.value_scale;
    if (there && at.lane % 4 == 0) out.lse(row, results[which].lse());
    if (piece.split()) {
      if (there) store_pairs(out.partial(row), o, which, factor, at.lane);
    } else if (call.out.dtype == Dtype::f32) {
      if (there) store_pairs(out.final<float>(row), o, which, factor, at.lane);
    } else if (call.out.dtype == Dtype::bf16) {
      store_packed(there ? out.final<__nv_bfloat16>(row) : nullptr, o, which, factor, at.lane);
    } else {
      store_packed(there ? out.final<__half>(row) : nullptr, o, which, factor, at.lane);
    }
  }
}

// Four values of a row into the caller's output.
template <class Out>
__device__ __forceinline__ void store_four(Out* row, int lane, float4 value) {
  if constexpr (std::is_same_v<Out, float>)
    reinterpret_cast<float4*>(row)[lane] = value;
  else
    reinterpret_cast<uint2*>(row)[lane] = make_uint2(pack<Out>(value.x, value.y), pack<Out>(value.z, value.w));
}

// Joins the partials of this warpgroup's rows in the plan's order, a warp a row.
__device__ __forceinline__ void join_rows(const PrefillCall& call, const Piece& piece, const Place& at,
                                          std::int32_t first, std::int32_t pieces) {
  Piece whole = piece;
  whole.record.partial_row = -1;
  const RowOut out{call, whole};
  const int end = min(stored_rows(call, whole), at.side * 64 + 64);
  for (int row = at.side * 64 + at.warp; row < end; row += 4) {
    float reference = minus_infinity();
    for (std::int32_t p = 0; p < pieces; ++p)
      reference = fmaxf(reference, __ldcg(call.workspace.partial_lse + std::int64_t{row} +
                                          __ldg(call.plan.reduce_partial_map + first + p)));
    const float base = usable(reference);
    float sum = 0;
    float4 value = make_float4(0, 0, 0, 0);
    for (std::int32_t p = 0; p < pieces; ++p) {
      const std::int64_t partial = std::int64_t{row} + __ldg(call.plan.reduce_partial_map + first + p);
      const float weight = __expf(__ldcg(call.workspace.partial_lse + partial) - base);
      const float4 more =
          __ldcg(reinterpret_cast<const float4*>(call.workspace.partial_out + partial * kValues) + at.lane);
      sum += weight;
      value.x += weight * more.x;
      value.y += weight * more.y;
      value.z += weight * more.z;
      value.w += weight * more.w;
    }
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    value = make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
    if (at.lane == 0) out.lse(row, sum > 0 ? reference + __logf(sum) : minus_infinity());
    if (call.out.dtype == Dtype::f32)
      store_four(out.final<float>(row), at.lane, value);
    else if (call.out.dtype == Dtype::bf16)
      store_four(out.final<__nv_bfloat16>(row), at.lane, value);
    else
      store_four(out.final<__half>(row), at.lane, value);
  }
}

// This warpgroup's rows of a partial are stored: the one that comes last joins them all. Nobody waits.
__device__ __forceinline__ void join_if_last(const PrefillCall& call, const Piece& piece, const Place& at) {
  const std::int32_t first = __ldg(call.plan.reduce_indptr + piece.record.tile);
  const std::int32_t pieces = __ldg(call.plan.reduce_indptr + piece.record.tile + 1) - first;
  const int barrier = kBarrierJoin + at.side;
  prim::named_sync<kWarpgroup>(barrier);
  bool last = false;
  if (threadIdx.x % kWarpgroup == 0) {
    const auto highest = static_cast<std::uint32_t>(pieces - 1);
    last = prim::add_wrapping_acq_rel(call.workspace.arrived + 2 * piece.record.tile + at.side, highest) == highest;
  }
  if (prim::named_any<kWarpgroup>(barrier, last)) join_rows(call, piece, at, first, pieces);
}

}  // namespace latte::cuda::sm90::prefill
