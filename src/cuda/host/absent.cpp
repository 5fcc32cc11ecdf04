// The front door of a build without a CUDA toolkit.
#include "cuda/host/cuda.hpp"

namespace latte::cuda {

Result<std::unique_ptr<Device>> open_device(std::int32_t /*ordinal*/) {
  return Status(Code::unsupported, "name", "a build with the CUDA backend (nvcc 12 or newer when latte is built)",
                "one without");
}

}  // namespace latte::cuda
