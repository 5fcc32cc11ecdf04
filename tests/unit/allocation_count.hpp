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

// The n-th allocation from now on fails, counted from 0, and no other.
class AllocationFailure {
 public:
  explicit AllocationFailure(std::int64_t n);
  ~AllocationFailure();
  AllocationFailure(const AllocationFailure&) = delete;
  AllocationFailure& operator=(const AllocationFailure&) = delete;

  // Whether it came to that.
  bool happened() const;
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
