#include "testkit/buffer.hpp"

#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace latte::testkit {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Buffer::Buffer(std::size_t bytes) : size_(bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const std::size_t capacity = round_up(bytes + 1, alignment);
  void* memory = std::aligned_alloc(alignment, capacity);
  if (memory == nullptr) throw std::bad_alloc();
  owner_ = std::shared_ptr<void>(memory, std::free);
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePage) madvise(memory, capacity, MADV_HUGEPAGE);
#endif
  data_ = static_cast<std::byte*>(memory);
}

Buffer Buffer::fenced(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t readable = round_up(bytes, page);
  void* memory = mmap(nullptr, readable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  Buffer buffer;
  buffer.owner_ = std::shared_ptr<void>(memory, [=](void* start) { munmap(start, readable + page); });
  mprotect(static_cast<std::byte*>(memory) + readable, page, PROT_NONE);
  buffer.data_ = static_cast<std::byte*>(memory) + readable - bytes;
  buffer.size_ = bytes;
  return buffer;
}

}  // namespace latte::testkit
