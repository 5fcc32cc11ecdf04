// What the builders of decode and of prefill say alike about their slots.
#pragma once

#include <cstdint>

#include "backend/errors.hpp"
#include "latte/plan.hpp"

namespace latte::backend {

Status check_slot_count(std::int32_t slots);
Status check_slot_index(std::int32_t index, std::int32_t slots);
Status moved_from();
// A plan that is not on the host, or was never made: no work, and readable counts.
const Plan& empty_plan();

Status stale(std::uint64_t current, std::uint64_t given);

// An error when the metadata was never built, or its slot holds another step by now.
template <class Slot, class Metadata>
Status check_generation(const Slot* slot, const Metadata& metadata) {
  if (slot == nullptr) return invalid("metadata", "what a builder's build() returned", "one that was never built");
  const std::uint64_t current = slot->generation.load();
  if (current == metadata.generation() && current != 0) return {};
  return stale(current, metadata.generation());
}

}  // namespace latte::backend
