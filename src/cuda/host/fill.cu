// Random input of benchmarks, made where it is needed.
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/hashed_normal.hpp"
#include "cuda/host/measure.hpp"
#include "cuda/prim/launch.cuh"

namespace latte::cuda {
namespace {

template <class T>
__global__ void fill_random(T* data, std::int64_t count, float spread, std::uint64_t seed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    data[i] = static_cast<T>(hashed_normal(seed, static_cast<std::uint64_t>(i)) * spread);
}

template <class T>
cudaError_t launch(const RandomFill& fill, cudaStream_t stream) {
  constexpr std::int64_t kThreads = 256;
  const std::int64_t blocks = std::min<std::int64_t>((fill.count + kThreads - 1) / kThreads, 4096);
  return prim::launch(fill_random<T>, static_cast<unsigned>(blocks), static_cast<unsigned>(kThreads), 0, stream,
                      static_cast<T*>(fill.data), fill.count, fill.spread, fill.seed);
}

}  // namespace

cudaError_t launch_fill_random(const RandomFill& fill, cudaStream_t stream) {
  if (fill.count == 0) return cudaSuccess;
  switch (fill.dtype) {
    case Dtype::bf16: return launch<__nv_bfloat16>(fill, stream);
    case Dtype::f16: return launch<__half>(fill, stream);
    case Dtype::f32: return launch<float>(fill, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace latte::cuda
