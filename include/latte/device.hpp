// Memory, streams, graphs and times of the device a backend runs on, as far as tests, the program and small examples
// need them, so that these name no vendor. An engine has its own and hands latte its pointers and streams.
//
// On the CPU backend memory is the host's, copies are copies, and there are no streams, graphs or timers: those answer
// `unsupported`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "latte/backend.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte {

// Uninitialised memory for tensors, aligned to 256 bytes.
class DeviceMemory {
 public:
  static Result<DeviceMemory> allocate(const Backend& backend, std::size_t bytes);
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::optional<Backend> backend_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Queue a copy behind what the stream holds and wait until it is done.
Status copy_to_device(const Backend& backend, void* device, const void* host, std::size_t bytes,
                      Stream stream = nullptr);
Status copy_to_host(const Backend& backend, void* host, const void* device, std::size_t bytes, Stream stream = nullptr);
// Bytes of the device's memory that are free now; the host's are not looked at (0).
Result<std::size_t> free_memory(const Backend& backend);

// `count` values, nearly normal with mean 0 and the given spread, that depend on seed and position alone: gigabytes of
// benchmark input without the host. bf16, f16 or f32.
struct RandomFill {
  void* data = nullptr;
  Dtype dtype = Dtype::bf16;
  std::int64_t count = 0;
  float spread = 1;
  std::uint64_t seed = 1;
};
Status fill_random(const Backend& backend, const RandomFill& fill, Stream stream = nullptr);

// One of the device's handles (a stream, an event, a captured graph) with the backend that made it.
class DeviceHandle {
 public:
  using Release = void (*)(backend::Impl& impl, void* handle);
  DeviceHandle() = default;
  DeviceHandle(const Backend& backend, void* handle, Release release)
      : backend_(backend), handle_(handle), release_(release) {}
  DeviceHandle(DeviceHandle&& other) noexcept;
  DeviceHandle& operator=(DeviceHandle&& other) noexcept;
  ~DeviceHandle();

  void* get() const { return handle_; }
  const Backend& backend() const { return *backend_; }

 private:
  std::optional<Backend> backend_;
  void* handle_ = nullptr;
  Release release_ = nullptr;
};

// A stream that does not wait for the default one.
class OwnedStream {
 public:
  static Result<OwnedStream> create(const Backend& backend);
  Stream get() const { return handle_.get(); }

 private:
  explicit OwnedStream(DeviceHandle handle) : handle_(std::move(handle)) {}
  DeviceHandle handle_;
};

// Work that was recorded instead of run, to be run as often as wanted with the same addresses.
class Graph {
 public:
  // Between the two, what this thread queues in the stream is recorded. end_capture must follow, also after errors.
  static Status begin_capture(const Backend& backend, Stream stream);
  static Result<Graph> end_capture(const Backend& backend, Stream stream);
  // Records what `body`, which returns a Status, queues in the stream.
  template <class Body>
  static Result<Graph> capture(const Backend& backend, Stream stream, Body body) {
    if (Status status = begin_capture(backend, stream); !status.ok()) return status;
    const Status queued = body();
    Result<Graph> graph = end_capture(backend, stream);
    if (!queued.ok()) return queued;
    return graph;
  }
  Status launch(Stream stream) const;

 private:
  explicit Graph(DeviceHandle handle) : handle_(std::move(handle)) {}
  DeviceHandle handle_;
};

// Time between two places of a stream, by the device's clock.
class Timer {
 public:
  static Result<Timer> create(const Backend& backend);
  Status start(Stream stream) const;
  Status stop(Stream stream) const;
  // Waits until the stream has passed stop().
  Result<double> microseconds() const;

 private:
  Timer(DeviceHandle begin, DeviceHandle end) : begin_(std::move(begin)), end_(std::move(end)) {}
  DeviceHandle begin_, end_;
};

}  // namespace latte
