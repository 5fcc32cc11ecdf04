// What the tensors of a call go through before the kernel: values transposed for fp8 products, and conversions where the
// kernel multiplies another type than the caller's.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda {

// Transposed values: [heads][128 columns][tokens], each request's from a multiple of 128 on, zeros behind its last token
// up to the next one. Within 32 tokens they are in the order of the products' registers.
//   Request b begins at 128 * (kv_start[b] / 128 + b), which leaves room for whole blocks of 128: with x = kv_start[b],
//   y = kv_start[b + 1]:  y / 128 - x / 128 + 1 >= (y - x) / 128 + 1 >= ceil((y - x) / 128).
constexpr std::int32_t transposed_begin(std::int32_t kv_start, std::int32_t request) {
  return (kv_start / kPrefillBlock + request) * kPrefillBlock;
}
constexpr std::int64_t transposed_tokens(std::int64_t kv_tokens, std::int64_t requests) {
  return (kv_tokens / kPrefillBlock + requests) * kPrefillBlock;
}

struct TransposeCall {
  PrefillTensor v;
  Dtype dtype = Dtype::fp8_e4m3;  // of v; bf16 and f16 are divided by the scale and rounded
  ScaleView scale;
  std::int32_t heads = 1, requests = 0;
  const std::int32_t* kv_start = nullptr;
  void* to = nullptr;
  std::int64_t tokens = 0;  // of `to`: transposed_tokens()
};
cudaError_t launch_transpose_values(const TransposeCall& call, cudaStream_t stream);

struct ConvertCall {
  PrefillTensor from;
  Dtype from_dtype = Dtype::bf16, to_dtype = Dtype::fp8_e4m3;
  ScaleView scale;  // to fp8: divided by it. From fp8 the values stay as they are: the kernel knows the scale.
  std::int32_t heads = 1, width = kPrefillWidth;
  void* to = nullptr;  // [tokens, heads, width], dense
};
cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream);

}  // namespace latte::cuda
