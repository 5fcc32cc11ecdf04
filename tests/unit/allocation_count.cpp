#include "tests/unit/allocation_count.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace latte::allocation_count {
namespace {

std::atomic<bool> counting{false};
std::atomic<std::int64_t> allocations{0};
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
std::atomic<std::size_t> most{kNoLimit};
constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
std::atomic<std::int64_t> until_failure{kNone};

void* counted(std::size_t bytes, std::size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  if (until_failure.load(std::memory_order_relaxed) != kNone && until_failure.fetch_sub(1) == 0) throw std::bad_alloc();
  if (bytes > most.load(std::memory_order_relaxed)) throw std::bad_alloc();
  // aligned_alloc wants a size that is a multiple of the alignment.
  void* memory = alignment <= alignof(std::max_align_t)
                     ? std::malloc(bytes > 0 ? bytes : 1)
                     : std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

AllocationCount::AllocationCount() {
  allocations = 0;
  counting = true;
}

AllocationCount::~AllocationCount() { counting = false; }

std::int64_t AllocationCount::stop() {
  counting = false;
  return allocations;
}

AllocationFailure::AllocationFailure(std::int64_t n) { until_failure = n; }

AllocationFailure::~AllocationFailure() { until_failure = kNone; }

bool AllocationFailure::happened() const { return until_failure < 0; }

AllocationLimit::AllocationLimit(std::size_t most_bytes) { most = most_bytes; }

AllocationLimit::~AllocationLimit() { most = kNoLimit; }

}  // namespace latte::allocation_count

using latte::allocation_count::counted;

// The whole test program allocates through these; they count only while an AllocationCount asks.
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new[](std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
// The forms that do not throw, too: what is deleted below must have come from here.
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes, static_cast<std::size_t>(alignment));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
