// Launching a decode kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/call.hpp"

namespace latte::cuda {

struct LaunchOptions {
  bool dependent = false;  // may start before the launch before it has ended; the kernel waits for it itself
};

// Once before the first launch: lets the kernel use as much shared memory as it needs.
cudaError_t prepare_decode(const DecodeKernel& kernel);

cudaError_t launch_decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers,
                          const LaunchOptions& options, cudaStream_t stream);

}  // namespace latte::cuda
