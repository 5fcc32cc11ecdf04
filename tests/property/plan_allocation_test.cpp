// Planning allocates nothing. This file replaces the program's operator new to count; it must stay alone in doing so.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "plan_cases.hpp"

namespace {
std::atomic<std::int64_t> allocations{0};

void* counted(std::size_t size, std::size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment + alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}
}  // namespace

// g++ 12 takes the free() below for a mismatch once it has inlined one operator and not the other.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace latte {
namespace {

using namespace plan_test;

TEST(PlanAllocation, TheCounterCounts) {
  const std::int64_t before = allocations.load();
  const std::vector<std::int32_t> some(100);
  EXPECT_GT(allocations.load(), before) << some.size();
}

TEST(PlanAllocation, MakePlanAllocatesNothing) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      const std::int64_t before = allocations.load();
      const Result<Plan> made = make_plan(c.config, c.lengths(), guarded.words());
      const std::int64_t used = allocations.load() - before;
      if (!made.ok()) return made.status().message();
      if (used != 0) return std::to_string(used) + " allocations";
    }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
