// What the tensors of a call go through before the kernel, where it multiplies another type than the caller's.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda {

cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream);

}  // namespace latte::cuda
