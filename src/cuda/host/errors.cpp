#include "cuda/host/errors.hpp"

#include <string>

namespace latte::cuda {
namespace {

// Errors of kernels that ran before: the context is lost, and every later call repeats them.
bool is_earlier_fault(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
  }
}

// The stream is being captured in a graph, and what was asked for cannot be.
bool is_capture_error(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

}  // namespace

Status error_status(cudaError_t error, const char* doing) {
  // Launch errors also stay behind for the next cudaGetLastError, which may be someone else's.
  cudaGetLastError();
  const std::string got = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) return {Code::out_of_memory, "device memory", doing, got};
  if (error == cudaErrorInvalidResourceHandle || is_capture_error(error))
    return {Code::invalid_argument, "stream", doing, got};
  // A stream with a part of the multiprocessors only.
  if (error == cudaErrorCooperativeLaunchTooLarge) return {Code::unsupported, "limits.workers", doing, got};
  if (is_earlier_fault(error))
    return {Code::device_fault, "device", doing, got + " (by work that was queued before; the device's state is lost)"};
  return {Code::device_fault, "device", doing, got};
}

}  // namespace latte::cuda
