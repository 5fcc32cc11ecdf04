#include "backend/plan_memory.hpp"

#include <utility>

#include "backend/errors.hpp"
#include "backend/validate/validate.hpp"
#include "core/checked.hpp"
#include "plan/layout.hpp"

namespace latte::backend {
namespace {

// Where the part behind one of `count` words begins.
std::size_t behind(std::size_t part, std::int64_t count) {
  constexpr auto kPartWords = static_cast<std::int64_t>(kPlanAlignment / sizeof(std::int32_t));
  return part + static_cast<std::size_t>(round_up(count, kPartWords));
}

}  // namespace

DecodeWords::DecodeWords(const PlanConfig& config, const PlanSizes& sizes) {
  const Limits limits = plan::resolve(config.limits);
  const std::int64_t requests = limits.max_requests;
  query_start = behind(0, requests);
  visible = behind(query_start, requests + 1);
  plan = behind(visible, limits.max_total_query_tokens);
  plan_words = static_cast<std::size_t>(sizes.words);
  count = behind(plan, sizes.words);
}

PrefillWords::PrefillWords(const PlanConfig& config, const PlanSizes& sizes) {
  const std::int64_t requests = plan::resolve(config.limits).max_requests;
  context_lens = behind(0, requests);
  query_start = behind(context_lens, requests);
  kv_start = behind(query_start, requests + 1);
  plan = behind(kv_start, requests + 1);
  plan_words = static_cast<std::size_t>(sizes.words);
  count = behind(plan, sizes.words);
}

Result<PlanMemory> PlanMemory::make(const Backend& backend, std::span<std::byte> given, std::size_t bytes) {
  PlanMemory memory;
  if (given.empty()) {
    auto own = DeviceMemory::allocate(backend, bytes);
    if (!own.ok()) return own.status();
    memory.own_ = std::move(*own);
    given = {memory.own_.data(), bytes};
  } else {
    LATTE_RETURN_IF_ERROR(validate_workspace(given, bytes, kPlanAlignment, "options.plan_memory"));
  }
  memory.next_ = reinterpret_cast<std::int32_t*>(given.data());
  return memory;
}

std::int32_t* PlanMemory::take(std::size_t words) { return std::exchange(next_, next_ + words); }

}  // namespace latte::backend
