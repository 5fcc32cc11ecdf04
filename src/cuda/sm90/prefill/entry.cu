#include <algorithm>
#include <cfloat>
#include <cuda_fp8.h>

#include "cuda/prim/launch.cuh"
#include "cuda/sm90/prefill/config.cuh"
#include "cuda/sm90/prefill/entry.hpp"

namespace latte::cuda {
namespace {

namespace prefill = sm90::prefill;

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 132 * 16;  // enough to fill a device; they take turns

// Eight 16-bit values divided and rounded.
template <class Half>
__device__ uint2 to_fp8(const uint4& raw, float inverse) {
  Half values[8];
  reinterpret_cast<uint4&>(values) = raw;
  const auto four = [&](int first) {
    const auto value = [&](int i) { return static_cast<float>(values[first + i]) * inverse; };
    return prefill::pack_fp8(value(0), value(1), value(2), value(3));
  };
  return make_uint2(four(0), four(4));
}

// 16 source bytes a thread. fp8 values are exact in f16.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ ConvertCall call) {
  const int vectors = call.width / static_cast<int>(16 / sizeof(From));  // of a row
  const std::int64_t all = std::int64_t{call.from.tokens} * call.heads * vectors;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / vectors, token = row / call.heads;
    const auto head = static_cast<std::int32_t>(row - token * call.heads);
    const From* from = static_cast<const From*>(call.from.data) + token * call.from.token_stride +
                       std::int64_t{head} * call.from.head_stride;
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i % vectors);
    if constexpr (std::is_same_v<To, prefill::Fp8>) {
      static_cast<uint2*>(call.to)[i] = to_fp8<From>(raw, 1.0f / fmaxf(prefill::scale_of(call.scale, head), FLT_MIN));
    } else {
      From values[16];
      reinterpret_cast<uint4&>(values) = raw;
      To out[16];
#pragma unroll
      for (int v = 0; v < 16; ++v) out[v] = static_cast<To>(static_cast<float>(values[v]));
      static_cast<uint4*>(call.to)[2 * i] = reinterpret_cast<uint4*>(out)[0];
      static_cast<uint4*>(call.to)[2 * i + 1] = reinterpret_cast<uint4*>(out)[1];
    }
  }
}

}  // namespace

cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream) {
  const std::int64_t vectors =
      std::int64_t{call.from.tokens} * call.heads * call.width / (call.from_dtype == Dtype::fp8_e4m3 ? 16 : 8);
  const auto blocks = static_cast<unsigned>(std::min((vectors + kThreads - 1) / kThreads, kMostBlocks));
  if (blocks == 0) return cudaSuccess;
  const auto kernel = call.from_dtype == Dtype::bf16  ? convert_rows<__nv_bfloat16, prefill::Fp8>
                      : call.from_dtype == Dtype::f16 ? convert_rows<__half, prefill::Fp8>
                                                      : convert_rows<prefill::Fp8, __half>;
  return prim::launch(kernel, blocks, kThreads, 0, stream, call);
}

}  // namespace latte::cuda
