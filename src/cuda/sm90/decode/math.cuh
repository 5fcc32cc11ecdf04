// What both kernels' math shares: exponentials, packing, the rule for a row's reference, stores of results.
//
// Probabilities are 2^(x - reference), x = score * scale * log2(e). A row's reference follows its running maximum
// lazily: it moves, and what was summed so far is rescaled, only when a block exceeds it by more than kSlack. Sums and
// values then carry a common factor of at most 2^kSlack, which the last division removes; 16-bit probabilities keep
// their relative precision. Whether a row's reference moves depends on that row alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/decode/config.cuh"

namespace latte::cuda::sm90 {

inline constexpr float kSlack = 6.0f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A row that has seen nothing has reference -inf; its probabilities are 2^(-inf - 0) = 0.
__device__ __forceinline__ float usable(float reference) { return reference == minus_infinity() ? 0.0f : reference; }

struct Reference {
  float value, factor;
};
__device__ __forceinline__ Reference follow(float reference, float maximum) {
  if (!(maximum > reference + kSlack)) return {reference, 1.0f};
  return {maximum, exp2_fast(reference - maximum)};
}

template <class Half>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

// Among four neighbouring lanes: word i of lane c becomes word c of lane i. By whole warps.
__device__ __forceinline__ void transpose_in_fours(std::uint32_t (&words)[4], int lane) {
  // The lower lane of a pair gives away the later word, the upper one the earlier.
  const auto exchange = [&](std::uint32_t& early, std::uint32_t& late, int step) {
    const bool upper = (lane & step) != 0;
    const std::uint32_t taken = __shfl_xor_sync(~0u, upper ? early : late, step);
    (upper ? early : late) = taken;
  };
  exchange(words[0], words[1], 1);
  exchange(words[2], words[3], 1);
  exchange(words[0], words[2], 2);
  exchange(words[1], words[3], 2);
}

// A thread's place: its warp within the warpgroup, its lane, and which of the two warpgroups that own value columns.
struct Lane {
  int side, warp, lane;
  __device__ Lane()
      : side(static_cast<int>(threadIdx.x) / kWarpgroup - 1),
        warp(static_cast<int>(threadIdx.x) / 32 % 4),
        lane(static_cast<int>(threadIdx.x) % 32) {}
};

__device__ __forceinline__ void convert(float value, float& to) { to = value; }
__device__ __forceinline__ void convert(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void convert(float value, __half& to) { to = __float2half_rn(value); }

// What a row's probabilities add up to, and what follows from it.
struct RowResult {
  float inverse, lse;
  __device__ RowResult(float reference, float sum)
      : inverse(sum > 0 ? 1.0f / sum : 0.0f), lse(sum > 0 ? (reference + log2f(sum)) * kLn2 : minus_infinity()) {}
  RowResult() = default;
};

// The type of partials: fp32, the columns of a row in the order in which a kernel's threads hold them (its
// PartialColumns, or ColumnsInOrder).
struct PartialValue {
  float value;
};

// Rows of the caller's output, or of partials.
class Sink {
 public:
  __device__ Sink(const KernelCall& call, const Piece& piece)
      : call_(call),
        first_row_(piece.first_row()),
        rows_(piece.rows),
        partial_row_(piece.split() ? std::int64_t{piece.record.partial_row} + piece.row_begin : -1),
        dtype_(call.out.dtype) {}

  // The first value of row r; null for rows that are not there.
  __device__ std::byte* row(int r, int latent) const {
    if (r >= rows_) return nullptr;
    if (partial_row_ >= 0)
      return reinterpret_cast<std::byte*>(call_.workspace.partial_out + (partial_row_ + r) * latent);
    const RowAddress at(call_, first_row_ + r);
    if (at.token >= call_.query_tokens) return nullptr;
    return static_cast<std::byte*>(call_.out.out) +
           (std::int64_t{at.token} * call_.out.out_token_stride + std::int64_t{at.head} * call_.out.out_head_stride) *
               (dtype_ == Dtype::f32 ? 4 : 2);
  }
  __device__ void put_lse(int r, float value) const {
    if (r >= rows_) return;
    if (partial_row_ >= 0) {
      call_.workspace.partial_lse[partial_row_ + r] = value;
    } else {
      const RowAddress at(call_, first_row_ + r);
      if (call_.out.lse && at.token < call_.query_tokens)
        call_.out.lse[std::int64_t{at.token} * call_.out.lse_token_stride +
                      std::int64_t{at.head} * call_.out.lse_head_stride] = value;
    }
  }
  // Calls store(Element{}) with the type of the values, so that the question is asked once and not at every store.
  template <class Store>
  __device__ void with_type(const Store& store) const {
    if (partial_row_ >= 0)
      store(PartialValue{});
    else if (dtype_ == Dtype::f32)
      store(float{});
    else if (dtype_ == Dtype::bf16)
      store(__nv_bfloat16{});
    else
      store(__half{});
  }

 private:
  const KernelCall& call_;
  std::int32_t first_row_, rows_;
  std::int64_t partial_row_;
  Dtype dtype_;
};

}  // namespace latte::cuda::sm90
