// The driver's encoder of tensor maps, without linking against the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace latte::cuda {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up once; null without a driver.
inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else  // the form without a version is gone in CUDA 13
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(found)
                                                                         : nullptr;
  }();
  return function;
}

// What the encoder's answer means. Behind a fault it no longer finds the tensor and calls its address invalid; the
// device then says what really happened.
inline cudaError_t encode_error(CUresult result) {
  if (result == CUDA_SUCCESS) return cudaSuccess;
  std::size_t free = 0, total = 0;
  const cudaError_t state = cudaMemGetInfo(&free, &total);
  return state != cudaSuccess ? state : cudaErrorInvalidValue;
}

}  // namespace latte::cuda
