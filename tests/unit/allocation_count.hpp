// Counts what is allocated, by any thread, while one of these lives. One at a time.
#pragma once

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

}  // namespace latte::allocation_count
