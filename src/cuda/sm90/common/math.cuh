// What the kernels' math shares: exponentials, packing, the rule for a row's reference, what a row's sums give.
//
// Probabilities are 2^(x - reference), x = score * scale * log2(e). A row's reference follows its running maximum
// lazily: it moves, and what was summed so far is rescaled, only when a block exceeds it by more than kMaxLag. Sums and
// values then carry a common factor of at most 2^kMaxLag, which the last division removes; 16-bit probabilities keep
// their relative precision. Whether a row's reference moves depends on that row alone. Prefill has its own for each
// type (Shape::kMaxLag), and keeps the reference as a score, before the scale.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace latte::cuda::sm90 {

inline constexpr float kMaxLag = 6.0f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float minus_infinity() { return -infinity(); }
inline constexpr float kLowest = -FLT_MAX;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A row that has seen nothing has reference -inf; its probabilities are 2^(-inf - 0) = 0. (In the plain kernel it is
// kLowest, which needs no such care.) One that is not there may have +inf, which no score moves; its probabilities are
// 2^(x - inf) = 0.
__device__ __forceinline__ float usable(float reference) { return reference == minus_infinity() ? 0.0f : reference; }

struct Reference {
  float value, factor;
};
__device__ __forceinline__ Reference follow(float reference, float maximum) {
  if (!(maximum > reference + kMaxLag)) return {reference, 1.0f};
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

// What pack() made of them.
template <class Half>
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  else
    return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Between lanes `step` apart: the lower one gives away the later word, the upper one the earlier. By whole warps.
__device__ __forceinline__ void exchange(std::uint32_t& early, std::uint32_t& late, int lane, int step) {
  const bool upper = (lane & step) != 0;
  const std::uint32_t taken = __shfl_xor_sync(~0u, upper ? early : late, step);
  (upper ? early : late) = taken;
}
// Among four neighbouring lanes: word i of lane c becomes word c of lane i. By whole warps.
__device__ __forceinline__ void transpose_in_fours(std::uint32_t (&words)[4], int lane) {
  exchange(words[0], words[1], lane, 1);
  exchange(words[2], words[3], lane, 1);
  exchange(words[0], words[2], lane, 2);
  exchange(words[1], words[3], lane, 2);
}

__device__ __forceinline__ void convert(float value, float& to) { to = value; }
__device__ __forceinline__ void convert(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void convert(float value, __half& to) { to = __float2half_rn(value); }

// What a row's probabilities add up to, and what follows from it.
// `weight`: the sum of what values were multiplied by, where that is probabilities rounded to 16 bits. Rounding may do
// the same to all of them, and would not average out.
struct RowResult {
  float inverse, lse_log2;
  __device__ RowResult(float reference, float sum, float weight)
      : inverse(sum > 0 ? reciprocal_fast(weight) : 0.0f),
        lse_log2(sum > 0 ? reference + log2_fast(sum) : minus_infinity()) {}
  __device__ RowResult(float reference, float sum) : RowResult(reference, sum, sum) {}
  __device__ float lse() const { return lse_log2 * kLn2; }
  RowResult() = default;
};

}  // namespace latte::cuda::sm90
