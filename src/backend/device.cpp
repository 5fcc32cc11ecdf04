#include "latte/device.hpp"

#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "core/codec.hpp"
#include "core/hashed_normal.hpp"

namespace latte {
namespace {

constexpr std::align_val_t kHostAlignment{256};

Status no_device(const char* what) {
  return backend::unsupported("backend", std::string("one with a device, for ") + what, "cpu");
}

Status check_stream(const Backend& backend, Stream stream) {
  return backend::validate_stream(backend.impl().place(), stream);
}

Status check_copy(const Backend& backend, const void* device, const void* host, std::size_t bytes, Stream stream) {
  LATTE_RETURN_IF_ERROR(check_stream(backend, stream));
  if (bytes > 0 && device == nullptr) return backend::missing("device", "a pointer", "null");
  if (bytes > 0 && host == nullptr) return backend::missing("host", "a pointer", "null");
  return {};
}

// Nothing, too, for sizes that no address range has: rounded up to the alignment they would wrap.
void* allocate_on_host(std::size_t bytes) {
  constexpr std::size_t kMost = std::numeric_limits<std::ptrdiff_t>::max();
  return bytes <= kMost ? ::operator new(bytes > 0 ? bytes : 1, kHostAlignment, std::nothrow) : nullptr;
}

}  // namespace

Result<DeviceMemory> DeviceMemory::allocate(const Backend& backend, std::size_t bytes) {
  DeviceMemory memory;
  if (cuda::Device* device = backend.impl().device()) {
    const auto given = device->allocate(bytes, cuda::Memory::device);
    if (!given.ok()) return given.status();
    memory.data_ = static_cast<std::byte*>(*given);
  } else {
    memory.data_ = static_cast<std::byte*>(allocate_on_host(bytes));
    if (memory.data_ == nullptr) return Status(Code::out_of_memory, "memory", backend::text(bytes) + " bytes", "none");
  }
  memory.backend_ = backend;
  memory.size_ = bytes;
  return memory;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  if (cuda::Device* device = backend_->impl().device())
    device->release(data_, cuda::Memory::device);
  else
    ::operator delete(data_, kHostAlignment);
}

Status copy_to_device(const Backend& backend, void* device, const void* host, std::size_t bytes, Stream stream) {
  LATTE_RETURN_IF_ERROR(check_copy(backend, device, host, bytes, stream));
  if (cuda::Device* gpu = backend.impl().device()) {
    LATTE_RETURN_IF_ERROR(gpu->copy(device, host, bytes, cuda::Copy::to_device, stream));
    return gpu->synchronize(stream);
  }
  if (bytes > 0) std::memcpy(device, host, bytes);
  return {};
}

Status copy_to_host(const Backend& backend, void* host, const void* device, std::size_t bytes, Stream stream) {
  LATTE_RETURN_IF_ERROR(check_copy(backend, device, host, bytes, stream));
  if (cuda::Device* gpu = backend.impl().device()) {
    LATTE_RETURN_IF_ERROR(gpu->copy(host, device, bytes, cuda::Copy::to_host, stream));
    return gpu->synchronize(stream);
  }
  if (bytes > 0) std::memcpy(host, device, bytes);
  return {};
}

Result<std::size_t> free_memory(const Backend& backend) {
  if (cuda::Device* device = backend.impl().device()) return device->free_memory();
  return std::size_t{0};
}

Status fill_random(const Backend& backend, const RandomFill& fill, Stream stream) {
  LATTE_RETURN_IF_ERROR(check_stream(backend, stream));
  if (!backend::contains(backend::kFloatDtypes, fill.dtype))
    return backend::unsupported("dtype", backend::dtype_set_text(backend::kFloatDtypes), dtype_name(fill.dtype));
  if (fill.count < 0) return backend::invalid("count", ">= 0", backend::text(fill.count));
  if (fill.count > 0 && fill.data == nullptr) return backend::missing("data", "a pointer", "null");
  if (cuda::Device* device = backend.impl().device()) return device->fill_random(fill, stream);
  for (std::int64_t i = 0; i < fill.count; ++i) {
    const float value = hashed_normal(fill.seed, static_cast<std::uint64_t>(i)) * fill.spread;
    if (fill.dtype == Dtype::f32)
      static_cast<float*>(fill.data)[i] = value;
    else
      static_cast<std::uint16_t*>(fill.data)[i] = fill.dtype == Dtype::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
  }
  return {};
}

DeviceHandle::DeviceHandle(DeviceHandle&& other) noexcept { *this = std::move(other); }

DeviceHandle& DeviceHandle::operator=(DeviceHandle&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(handle_, other.handle_);
  std::swap(release_, other.release_);
  return *this;
}

DeviceHandle::~DeviceHandle() {
  if (handle_ != nullptr) release_(backend_->impl(), handle_);
}

Result<OwnedStream> OwnedStream::create(const Backend& backend) {
  cuda::Device* device = backend.impl().device();
  if (device == nullptr) return no_device("streams");
  const auto stream = device->make_stream();
  if (!stream.ok()) return stream.status();
  return OwnedStream(
      {backend, *stream, [](backend::Impl& impl, void* handle) { impl.device()->release_stream(handle); }});
}

Status Graph::begin_capture(const Backend& backend, Stream stream) {
  cuda::Device* device = backend.impl().device();
  return device == nullptr ? no_device("graphs") : device->begin_capture(stream);
}

Result<Graph> Graph::end_capture(const Backend& backend, Stream stream) {
  cuda::Device* device = backend.impl().device();
  if (device == nullptr) return no_device("graphs");
  const auto graph = device->end_capture(stream);
  if (!graph.ok()) return graph.status();
  return Graph({backend, *graph, [](backend::Impl& impl, void* handle) { impl.device()->release_graph(handle); }});
}

Status Graph::launch(Stream stream) const {
  if (handle_.get() == nullptr) return backend::invalid("graph", "a captured one", "one that was moved from");
  return handle_.backend().impl().device()->launch_graph(handle_.get(), stream);
}

Result<Timer> Timer::create(const Backend& backend) {
  cuda::Device* device = backend.impl().device();
  if (device == nullptr) return no_device("timers");
  const auto release = [](backend::Impl& impl, void* handle) { impl.device()->release_event(handle); };
  const auto begin = device->make_event(true);
  if (!begin.ok()) return begin.status();
  DeviceHandle first(backend, *begin, release);
  const auto end = device->make_event(true);
  if (!end.ok()) return end.status();
  return Timer(std::move(first), {backend, *end, release});
}

Status Timer::start(Stream stream) const { return begin_.backend().impl().device()->record(begin_.get(), stream); }

Status Timer::stop(Stream stream) const { return end_.backend().impl().device()->record(end_.get(), stream); }

Result<double> Timer::microseconds() const {
  return begin_.backend().impl().device()->elapsed_us(begin_.get(), end_.get());
}

}  // namespace latte
