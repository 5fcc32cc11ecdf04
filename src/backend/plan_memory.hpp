// The memory of planning: where the lengths and the plan of a step lie, and the buffer that holds all steps of a
// builder. Kernels read it, so on a device it is device memory; what the host stages there is the step's own business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "latte/backend.hpp"
#include "latte/device.hpp"
#include "latte/plan.hpp"
#include "latte/status.hpp"

namespace latte::backend {

// Of the buffer, of every step in it and of every part of a step.
inline constexpr std::size_t kPlanAlignment = 256;

// The int32 words of a decode step: lengths at their largest, then the plan.
struct DecodeWords {
  struct Parts {
    std::int32_t* seq_lens;
    std::int32_t* query_start;
    std::int32_t* visible;
    std::span<std::int32_t> plan;
  };
  DecodeWords() = default;
  DecodeWords(const PlanConfig& config, const PlanSizes& sizes);
  Parts at(std::int32_t* words) const {
    return {words, words + query_start, words + visible, {words + plan, plan_words}};
  }

  std::size_t query_start = 0, visible = 0, plan = 0;  // where they begin; seq_lens comes first
  std::size_t plan_words = 0;
  std::size_t count = 0;
};

// The same of a prefill step: the new tokens of a slot, or a chunk of its context.
struct PrefillWords {
  struct Parts {
    std::int32_t* kv_lens;       // [max_requests], for the planner
    std::int32_t* context_lens;  // [max_requests]
    std::int32_t* query_start;   // [max_requests + 1]
    std::int32_t* kv_start;      // [max_requests + 1]
    std::span<std::int32_t> plan;
  };
  PrefillWords() = default;
  PrefillWords(const PlanConfig& config, const PlanSizes& sizes);
  Parts at(std::int32_t* words) const {
    return {words, words + context_lens, words + query_start, words + kv_start, {words + plan, plan_words}};
  }

  std::size_t context_lens = 0, query_start = 0, kv_start = 0, plan = 0;  // kv_lens comes first
  std::size_t plan_words = 0;
  std::size_t count = 0;
};

// One buffer for the words of all steps of a builder: the caller's, or its own.
class PlanMemory {
 public:
  // `given`: BuilderOptions::plan_memory. Nothing is filled: on a CPU large limits cost address space, not memory.
  static Result<PlanMemory> make(const Backend& backend, std::span<std::byte> given, std::size_t bytes);
  // The next so many, a count as the structs above have it. All together no more than `bytes`.
  std::int32_t* take(std::size_t words);

 private:
  DeviceMemory own_;
  std::int32_t* next_ = nullptr;
};

}  // namespace latte::backend
