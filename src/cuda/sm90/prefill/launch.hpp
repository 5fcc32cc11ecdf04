// Launching a prefill kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda {

// Once before the first launch: lets the kernel use as much shared memory as it needs.
cudaError_t prepare_prefill(const PrefillKernel& kernel);

// `workers` thread blocks, one for each of the plan's. For fp8 call.v is what launch_transpose_values() makes, which
// was queued right before: the kernel overlaps its end. For fp8 call.v is what launch_transpose_values() makes, which
// was queued right before: the kernel overlaps its end.
cudaError_t launch_prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers,
                           cudaStream_t stream);

}  // namespace latte::cuda
