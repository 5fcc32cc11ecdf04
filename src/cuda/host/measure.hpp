// What benchmarks need of a device beside the operations: its ceilings, and random input.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "latte/backend.hpp"
#include "latte/device.hpp"

namespace latte::cuda {

// On the current device, in a stream of its own; about a second.
cudaError_t measure_ceilings(std::int32_t multiprocessors, Ceilings& ceilings);

cudaError_t launch_fill_random(const RandomFill& fill, cudaStream_t stream);

}  // namespace latte::cuda
