#include "backend/slots.hpp"

#include <array>

namespace latte::backend {

Status check_slot_count(std::int32_t slots) {
  constexpr std::int32_t kMost = 1024;
  if (slots >= 1 && slots <= kMost) return {};
  return invalid("options.slots", "1 .. " + text(kMost), text(slots));
}

Status check_slot_index(std::int32_t index, std::int32_t slots) {
  if (index >= 0 && index < slots) return {};
  return invalid("slot", "0 .. " + text(slots - 1), text(index));
}

Status moved_from() { return invalid("builder", "a builder that owns its buffers", "one that was moved from"); }

const Plan& empty_plan() {
  static constexpr std::array<std::int32_t, kMetaFields> kZeros{};
  static const Plan kPlan = [] {
    Plan plan;
    plan.work_meta_data = kZeros;
    return plan;
  }();
  return kPlan;
}

Status stale(std::uint64_t current, std::uint64_t given) {
  return {Code::stale_metadata, "metadata", "generation " + text(current) + ", which its slot holds now",
          "generation " + text(given)};
}

}  // namespace latte::backend
