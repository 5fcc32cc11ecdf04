// What the tensors of a call go through before the kernel: values transposed for fp8 products, and conversions where
// the kernel multiplies another type than the caller's.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda {

cudaError_t launch_transpose_values(const TransposeCall& call, cudaStream_t stream);
cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream);

}  // namespace latte::cuda
