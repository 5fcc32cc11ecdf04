// Launching a decode kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/call.hpp"

namespace latte::cuda {

// Once before the first launch: lets the kernel use as much shared memory as it needs.
cudaError_t prepare_decode(const DecodeKernel& kernel);

// `overlap_previous`: as in DecodeArgs.
cudaError_t launch_decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers,
                          bool overlap_previous, cudaStream_t stream);

}  // namespace latte::cuda
