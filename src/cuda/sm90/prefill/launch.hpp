// Launching a prefill kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda {

// Once before the first launch: lets the kernel use as much shared memory as it needs.
cudaError_t prepare_prefill(const PrefillKernel& kernel);

// `workers` thread blocks, one for each of the plan's. fp8: one launch at a time with the same call.values.
cudaError_t launch_prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers,
                           cudaStream_t stream);

}  // namespace latte::cuda
