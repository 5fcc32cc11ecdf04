// The driver's own functions, found at run time: nothing is linked against the driver.
#pragma once

#include <cuda_runtime_api.h>

namespace latte::cuda {

// As CUDA 12.0 has it; null where there is no driver, or none that knows it.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else  // the form without a version is gone in CUDA 13
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return reinterpret_cast<Function>(found);
  cudaGetLastError();
  return nullptr;
}

}  // namespace latte::cuda
