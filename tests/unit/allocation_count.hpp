// Counts what is allocated, or refuses what is too large, by any thread, while one of these lives. One of each at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace latte::allocation_count {

class AllocationCount {
 public:
  AllocationCount();
  ~AllocationCount();
  AllocationCount(const AllocationCount&) = delete;
  AllocationCount& operator=(const AllocationCount&) = delete;

  // Ends the counting and says how many there were.
  std::int64_t stop();
};

// A machine without memory for anything larger than so many bytes.
class AllocationLimit {
 public:
  explicit AllocationLimit(std::size_t most_bytes);
  ~AllocationLimit();
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;
};

}  // namespace latte::allocation_count
