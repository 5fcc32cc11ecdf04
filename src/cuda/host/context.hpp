// A device's context, current for as long as a call takes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace latte::cuda {

// The device's primary context, which the run time uses too. Made current by the driver's own calls: cudaSetDevice
// would also make a context on the device that it goes back to, several hundred MB of it on a GPU that is nobody's
// business here; and a thread that never asked for a device has none current, though the run time says device 0.
class Context {
 public:
  explicit Context(int ordinal) : ordinal_(ordinal) {}
  // Before all else. It is kept until the process ends, as the run time keeps it.
  cudaError_t retain();

  // For the calling thread. Another context of the same device stays: its streams are of no use in this one.
  class Use {
   public:
    explicit Use(const Context& context);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    cudaError_t error() const { return error_; }

   private:
    cudaError_t error_ = cudaSuccess;
    bool pushed_ = false;
  };

 private:
  const int ordinal_;
  CUcontext primary_ = nullptr;
};

}  // namespace latte::cuda
