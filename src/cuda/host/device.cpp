// One GPU behind the front door: memory, streams, events and graphs. launches.cpp has the kernels' launches.
#include <cstdio>
#include <new>
#include <string>

#include "cuda/host/gpu.hpp"

namespace latte::cuda {
namespace {

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ..." is the only place that tells without more libraries.
std::string kernel_module_version() {
  std::string version;
  if (std::FILE* file = std::fopen("/proc/driver/nvidia/version", "r")) {
    char line[256];
    if (std::fgets(line, sizeof line, file) != nullptr) {
      const std::string text = line;
      for (std::size_t at = 0; at + 1 < text.size() && version.empty(); ++at) {
        if (text[at] != ' ' || text[at + 1] < '0' || text[at + 1] > '9') continue;
        const std::size_t end = text.find_first_not_of("0123456789.", at + 1);
        const std::string word = text.substr(at + 1, end - at - 1);
        if (word.find('.') != std::string::npos) version = word;
      }
    }
    std::fclose(file);
  }
  return version;
}

std::string driver_text() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const std::string module = kernel_module_version();
  return (module.empty() ? std::string() : "driver " + module + ", ") + "CUDA " + std::to_string(driver / 1000) + "." +
         std::to_string(driver % 1000 / 10);
}

DeviceInfo describe(int ordinal, const cudaDeviceProp& properties) {
  int clock_khz = 0, memory_clock_khz = 0;
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ordinal);
  cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, ordinal);
  DeviceInfo info;
  info.name = properties.name;
  info.driver = driver_text();
  info.multiprocessors = properties.multiProcessorCount;
  info.features = "sm_" + std::to_string(properties.major) + std::to_string(properties.minor) + ", " +
                  std::to_string(properties.multiProcessorCount) + " multiprocessors, " +
                  std::to_string(clock_khz / 1000) + " MHz at most, memory " + std::to_string(memory_clock_khz / 1000) +
                  " MHz, " + std::to_string(properties.totalGlobalMem >> 30) + " GiB, L2 " +
                  std::to_string(properties.l2CacheSize >> 20) + " MiB, " +
                  std::to_string(properties.sharedMemPerBlockOptin) + " bytes of shared memory a block";
  return info;
}

// Another thread may be capturing a graph; what has nothing to do with that must not spoil it.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

cudaError_t Gpu::start() {
  if (const cudaError_t error = context_.retain(); error != cudaSuccess) return error;
  const Context::Use use(context_);
  if (use.error() != cudaSuccess) return use.error();
  const RelaxedCapture relaxed;
  return cudaFree(nullptr);
}

Result<void*> Gpu::allocate(std::size_t bytes, Memory where) {
  LATTE_USE_DEVICE();
  void* memory = nullptr;
  const std::size_t some = bytes > 0 ? bytes : 1;
  const cudaError_t error =
      where == Memory::device ? cudaMalloc(&memory, some) : cudaHostAlloc(&memory, some, cudaHostAllocPortable);
  if (error != cudaSuccess)
    return error_status(error, ("an allocation of " + std::to_string(bytes) + " bytes").c_str());
  return memory;
}

void Gpu::release(void* memory, Memory where) noexcept {
  if (memory == nullptr) return;
  const Context::Use use(context_);
  if (where == Memory::device)
    cudaFree(memory);
  else
    cudaFreeHost(memory);
}

Result<std::size_t> Gpu::free_memory() {
  LATTE_USE_DEVICE();
  std::size_t free = 0, total = 0;
  LATTE_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total), "the free memory");
  return free;
}

Status Gpu::copy(void* to, const void* from, std::size_t bytes, Copy direction, Stream stream) {
  if (bytes == 0) return {};
  LATTE_USE_DEVICE();
  const cudaMemcpyKind kind = direction == Copy::to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  LATTE_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, kind, as_stream(stream)), "a copy");
  return {};
}

Status Gpu::clear(void* memory, std::size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory, 0, bytes, as_stream(stream)), "zeros");
  return {};
}

Result<void*> Gpu::make_stream() {
  LATTE_USE_DEVICE();
  cudaStream_t stream = nullptr;
  LATTE_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  return static_cast<void*>(stream);
}

void Gpu::release_stream(void* stream) noexcept {
  const Context::Use use(context_);
  cudaStreamDestroy(as_stream(stream));
}

Status Gpu::synchronize(Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(as_stream(stream)), "work without faults");
  return {};
}

Result<void*> Gpu::make_event(bool timed) {
  LATTE_USE_DEVICE();
  cudaEvent_t event = nullptr;
  LATTE_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
                             "an event");
  return static_cast<void*>(event);
}

void Gpu::release_event(void* event) noexcept {
  const Context::Use use(context_);
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

Status Gpu::record(void* event, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(cudaEventRecord(static_cast<cudaEvent_t>(event), as_stream(stream)), "an event");
  return {};
}

Status Gpu::wait(void* event) {
  LATTE_USE_DEVICE();
  const RelaxedCapture relaxed;
  cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    error = cudaEventSynchronize(static_cast<cudaEvent_t>(event));
  }
  LATTE_RETURN_IF_CUDA_ERROR(error, "work without faults");
  return {};
}

Result<double> Gpu::elapsed_us(void* begin, void* end) {
  LATTE_USE_DEVICE();
  float milliseconds = 0;
  LATTE_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(static_cast<cudaEvent_t>(end)), "work without faults");
  LATTE_RETURN_IF_CUDA_ERROR(
      cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)),
      "the time between two events");
  return static_cast<double>(milliseconds) * 1e3;
}

Result<bool> Gpu::capturing(Stream stream) {
  LATTE_USE_DEVICE();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  LATTE_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(as_stream(stream), &status), "the state of a stream");
  return status != cudaStreamCaptureStatusNone;
}

Status Gpu::begin_capture(Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal),
                             "a stream that can be captured");
  return {};
}

Result<void*> Gpu::end_capture(Stream stream) {
  LATTE_USE_DEVICE();
  cudaGraph_t graph = nullptr;
  LATTE_RETURN_IF_CUDA_ERROR(cudaStreamEndCapture(as_stream(stream), &graph), "a captured graph");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  LATTE_RETURN_IF_CUDA_ERROR(error, "a graph that can be run");
  return static_cast<void*>(executable);
}

Status Gpu::launch_graph(void* graph, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream)), "a graph launch");
  return {};
}

void Gpu::release_graph(void* graph) noexcept {
  const Context::Use use(context_);
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

Result<std::unique_ptr<Device>> open_device(std::int32_t ordinal) {
  const auto refuse = [](std::string expected, std::string got) {
    return Status(Code::unsupported, "device", std::move(expected), std::move(got));
  };
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    const bool no_driver = error == cudaErrorInsufficientDriver;
    return refuse("a GPU and its driver", no_driver ? "no driver, or one older than the CUDA this build needs"
                                                    : std::string(cudaGetErrorString(error)));
  }
  if (count == 0) return refuse("a GPU and its driver", "no GPU");
  if (ordinal < 0 || ordinal >= count)
    return Status(Code::invalid_argument, "device", "0 .. " + std::to_string(count - 1), std::to_string(ordinal));
  cudaDeviceProp properties{};
  LATTE_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, ordinal), "the device's properties");
  if (properties.major != 9 || properties.minor != 0)
    return refuse("a GPU of compute capability 9.0 (Hopper)", std::string(properties.name) + " of " +
                                                                  std::to_string(properties.major) + "." +
                                                                  std::to_string(properties.minor));
  auto gpu = std::make_unique<Gpu>(ordinal, describe(ordinal, properties));
  const cudaError_t error = gpu->start();
  // Another process has it to itself, or nobody may use it.
  if (error == cudaErrorDevicesUnavailable || error == cudaErrorNotPermitted) {
    cudaGetLastError();
    return refuse("a GPU that takes work", std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
  }
  LATTE_RETURN_IF_CUDA_ERROR(error, "a device that can be used");
  return Result<std::unique_ptr<Device>>(std::move(gpu));
}

}  // namespace latte::cuda
