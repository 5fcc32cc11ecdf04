// A plain launch that returns its own error. <<<>>> leaves it in cudaGetLastError(), among those of others in the
// process who have not asked for theirs.
#pragma once

#include <cstddef>
#include <cuda_runtime.h>
#include <type_traits>

namespace latte::cuda::prim {

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                   cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace latte::cuda::prim
