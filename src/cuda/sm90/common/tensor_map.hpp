// The driver's encoder of tensor maps, without linking against the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/host/driver.hpp"

namespace latte::cuda {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up once; null without a driver.
inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap function = driver_function<EncodeTensorMap>("cuTensorMapEncodeTiled");
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
