// Memory for test and benchmark tensors.
#pragma once

#include <cstddef>
#include <memory>

namespace latte::testkit {

// Uninitialised memory. Large buffers ask for huge pages, as an engine's cache allocation would have.
class Buffer {
 public:
  Buffer() = default;
  // 64-byte aligned.
  explicit Buffer(std::size_t bytes);
  // Ends where an unreadable page begins: a kernel that reads one byte too far dies at once.
  static Buffer fenced(std::size_t bytes);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace latte::testkit
