#include "cuda/host/context.hpp"

#include "cuda/host/driver.hpp"

namespace latte::cuda {
namespace {

struct Calls {
  decltype(&cuDevicePrimaryCtxRetain) retain = driver_function<decltype(retain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxGetCurrent) current = driver_function<decltype(current)>("cuCtxGetCurrent");
  decltype(&cuCtxGetDevice) device = driver_function<decltype(device)>("cuCtxGetDevice");
  decltype(&cuCtxPushCurrent) push = driver_function<decltype(push)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = driver_function<decltype(pop)>("cuCtxPopCurrent");

  bool all() const { return retain && current && device && push && pop; }
};
const Calls& calls() {
  static const Calls found;
  return found;
}

// The driver's codes have the run time's numbers.
cudaError_t as_error(CUresult result) { return static_cast<cudaError_t>(result); }

}  // namespace

cudaError_t Context::retain() {
  if (!calls().all()) return cudaErrorNotSupported;
  return as_error(calls().retain(&primary_, ordinal_));
}

Context::Use::Use(const Context& context) {
  if (context.primary_ == nullptr) {
    error_ = cudaErrorDeviceUninitialized;
    return;
  }
  CUcontext current = nullptr;
  CUdevice device = -1;
  error_ = as_error(calls().current(&current));
  if (error_ == cudaSuccess && current != nullptr) error_ = as_error(calls().device(&device));
  if (error_ != cudaSuccess || device == context.ordinal_) return;
  error_ = as_error(calls().push(context.primary_));
  pushed_ = error_ == cudaSuccess;
}

Context::Use::~Use() {
  CUcontext popped = nullptr;
  if (pushed_) calls().pop(&popped);
}

}  // namespace latte::cuda
