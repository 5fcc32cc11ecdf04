// CUDA's error codes as error values.
#pragma once

#include <cuda_runtime.h>

#include "latte/status.hpp"

// Hands an error of a CUDA call to the caller as a Status.
#define LATTE_RETURN_IF_CUDA_ERROR(expression, doing)                             \
  do {                                                                            \
    if (const cudaError_t latte_error = (expression); latte_error != cudaSuccess) \
      return ::latte::cuda::error_status(latte_error, doing);                     \
  } while (false)

namespace latte::cuda {

// `doing` is what was asked for: "a decode launch". Faults of earlier asynchronous work come out of whatever call is
// next, so the text says that too.
Status error_status(cudaError_t error, const char* doing);

}  // namespace latte::cuda
