// What validation kernels find, from the device to whoever asks next.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <string>

#include "backend/cuda/impl.hpp"
#include "backend/errors.hpp"

namespace latte::backend {

Findings::~Findings() {
  const std::lock_guard<std::mutex> lock(impl_.findings_mutex_);
  std::erase(impl_.findings_, this);
}

Status Findings::allocate() {
  LATTE_RETURN_IF_ERROR(report_.allocate(*impl_.device(), sizeof(cuda::ValidationReport), cuda::Memory::pinned));
  new (report_.data()) cuda::ValidationReport();
  const std::lock_guard<std::mutex> lock(impl_.findings_mutex_);
  impl_.findings_.push_back(this);
  return {};
}

Status Findings::look(cuda::ValidateCall call, Stream stream) {
  if (report_.data() == nullptr) return {};
  call.limits = limits_;
  call.report = reinterpret_cast<cuda::ValidationReport*>(report_.data());
  return impl_.device()->validate(call, stream);
}

// Calls on any slot of the builder, and synchronize(), ask every slot: one of them takes the finding. The kernel writes
// the rest of a report before `finding`, and only while that is none.
std::optional<cuda::ValidationReport> Findings::take_report() {
  if (report_.data() == nullptr) return {};
  auto& report = *reinterpret_cast<cuda::ValidationReport*>(report_.data());
  const std::atomic_ref<cuda::Finding> finding(report.finding);
  const auto nothing = [&] { return finding.load(std::memory_order_acquire) == cuda::Finding::none; };
  if (nothing()) return {};
  const std::lock_guard<std::mutex> lock(taking_);
  if (nothing()) return {};
  const cuda::ValidationReport found{
      .finding = finding.load(), .request = report.request, .position = report.position, .value = report.value};
  finding.store(cuda::Finding::none, std::memory_order_release);
  return found;
}

Status Findings::take() {
  const auto taken = take_report();
  if (!taken) return {};
  const cuda::ValidationReport& found = *taken;
  const std::string request = " of request " + text(found.request);
  switch (found.finding) {
    case cuda::Finding::seq_len:
      return found.position == 0
                 ? invalid(lengths_, "0 .. " + text(limits_.max_kv_tokens), text(found.value) + request)
                 : invalid(lengths_, "at most " + text(limits_.max_total_kv_tokens) + " KV tokens in all",
                           "more, counted up to the " + text(found.value) + request);
    case cuda::Finding::query_start:
      return invalid("query_start", "prefix sums from 0 within the query tensor and the limits",
                     text(found.value) + " at [" + text(found.request + found.position) + "]");
    case cuda::Finding::visible:
      return invalid("visible", "0 .. the request's KV tokens",
                     text(found.value) + " for query token " + text(found.position) + request);
    case cuda::Finding::page_list:
      return invalid("pages", "a list with a page for every KV token that is seen",
                     found.value < 0 ? "bounds that make no sense" + request : text(found.value) + " pages" + request);
    case cuda::Finding::page_id:
      return invalid("pages", "page ids within the cache",
                     text(found.value) + " as page " + text(found.position) + request);
    case cuda::Finding::none: break;
  }
  return invalid("validation", "a known finding", text(static_cast<std::int32_t>(found.finding)));
}

}  // namespace latte::backend
