// Host buffers and their copies in a device's memory.
#pragma once

#include <span>
#include <vector>

#include "latte/device.hpp"
#include "testkit/buffer.hpp"

namespace latte::testkit {

// Owns device memory, and turns pointers into the host's buffers into pointers into their copies.
class DeviceCopies {
 public:
  explicit DeviceCopies(const Backend& backend) : backend_(backend) {}

  // Both return null and set `status` when they fail.
  void* allocate(std::size_t bytes, Status& status) {
    Result<DeviceMemory> memory = DeviceMemory::allocate(backend_, bytes);
    if (!memory) {
      status = memory.status();
      return nullptr;
    }
    memory_.push_back(std::move(*memory));
    return memory_.back().data();
  }
  void* copy(const void* host, std::size_t bytes, Status& status) {
    void* device = allocate(bytes, status);
    if (device != nullptr && status.ok()) status = copy_to_device(backend_, device, host, bytes);
    return device;
  }
  // Also remembers the buffer for move().
  std::byte* copy(const Buffer& host, Status& status) {
    auto* bytes = static_cast<std::byte*>(copy(host.data(), host.size(), status));
    if (host.data() != nullptr) copies_.push_back({host, bytes});
    return bytes;
  }

  template <class T>
  void move(T*& pointer) const {
    const auto* at = reinterpret_cast<const std::byte*>(pointer);
    for (const Copied& copy : copies_)
      if (at != nullptr && at >= copy.host.data() && at <= copy.host.data() + copy.host.size()) {
        pointer = reinterpret_cast<T*>(copy.device + (at - copy.host.data()));
        return;
      }
  }
  template <class View>
  void move_view(View& view) const {
    auto* bytes = view.bytes();
    move(bytes);
    view.data = bytes;
  }
  template <class T>
  void move_span(std::span<const T>& span) const {
    const T* data = span.data();
    move(data);
    span = {data, span.size()};
  }

 private:
  struct Copied {
    Buffer host;
    std::byte* device;
  };
  Backend backend_;
  std::vector<DeviceMemory> memory_;
  std::vector<Copied> copies_;
};

}  // namespace latte::testkit
