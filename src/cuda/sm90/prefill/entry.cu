#include <algorithm>
#include <cuda_fp8.h>

#include "cuda/sm90/prefill/config.cuh"
#include "cuda/sm90/prefill/entry.hpp"

namespace latte::cuda {
namespace {

namespace prefill = sm90::prefill;

constexpr int kThreads = 256;

// 16 source bytes a thread: 16 fp8 values, or 8 that are divided by their scale and rounded.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ ConvertCall call) {
  constexpr int kCount = 16 / sizeof(From);
  const int vectors = call.width / kCount;  // of a row
  const std::int64_t all = std::int64_t{call.from.tokens} * call.heads * vectors;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / vectors, token = row / call.heads;
    const auto head = static_cast<std::int32_t>(row - token * call.heads);
    const From* from = static_cast<const From*>(call.from.data) + token * call.from.token_stride +
                       std::int64_t{head} * call.from.head_stride;
    From values[kCount];
    reinterpret_cast<uint4&>(values) = __ldg(reinterpret_cast<const uint4*>(from) + i % vectors);
    const auto value = [&](int v) { return static_cast<float>(values[v]); };
    if constexpr (std::is_same_v<To, prefill::Fp8>) {
      const float inverse = 1.0f / prefill::scale_of(call.scale, head);
      const auto four = [&](int v) {
        return prefill::pack_fp8(value(v) * inverse, value(v + 1) * inverse, value(v + 2) * inverse,
                                 value(v + 3) * inverse);
      };
      static_cast<uint2*>(call.to)[i] = make_uint2(four(0), four(4));
    } else {
      const auto two = [&](int v) { return sm90::pack<To>(value(v), value(v + 1)); };
      static_cast<uint4*>(call.to)[2 * i] = make_uint4(two(0), two(2), two(4), two(6));
      static_cast<uint4*>(call.to)[2 * i + 1] = make_uint4(two(8), two(10), two(12), two(14));
    }
  }
}

}  // namespace

cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 132 * 16;
  const std::int64_t vectors =
      std::int64_t{call.from.tokens} * call.heads * call.width / (call.from_dtype == Dtype::fp8_e4m3 ? 16 : 8);
  const auto blocks = static_cast<unsigned>(std::min((vectors + kThreads - 1) / kThreads, kMostBlocks));
  if (blocks == 0) return cudaSuccess;
  if (call.from_dtype == Dtype::bf16)
    convert_rows<__nv_bfloat16, prefill::Fp8><<<blocks, kThreads, 0, stream>>>(call);
  else if (call.from_dtype == Dtype::f16)
    convert_rows<__half, prefill::Fp8><<<blocks, kThreads, 0, stream>>>(call);
  else if (call.to_dtype == Dtype::bf16)
    convert_rows<prefill::Fp8, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(call);
  else
    convert_rows<prefill::Fp8, __half><<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace latte::cuda
