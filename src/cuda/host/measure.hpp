// What benchmarks need of a device beside the operations: its ceilings, and random input.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "latte/backend.hpp"
#include "latte/device.hpp"

namespace latte::cuda {

// On the current device, in a stream of its own; about a second. The arithmetic is that of bf16, or of fp8.
cudaError_t measure_ceilings(std::int32_t multiprocessors, bool fp8, Ceilings& ceilings);

cudaError_t launch_fill_random(const RandomFill& fill, cudaStream_t stream);

}  // namespace latte::cuda
