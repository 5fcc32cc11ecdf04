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

}  // namespace latte::cuda
