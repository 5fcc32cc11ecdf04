// Page lists. On the CPU they are host memory, so every id that will be followed is looked at: O(pages of the step).
// Those of a device are not read; kernels clamp what they find there, and check it when validation is switched on.
#include <algorithm>
#include <string>

#include "backend/errors.hpp"
#include "backend/validate/validate.hpp"
#include "core/checked.hpp"

namespace latte::backend {
namespace {

// What a decode step reads: the tokens that some row of the request sees.
class StepDemand final : public PageDemand {
 public:
  explicit StepDemand(const PlannedStep& step)
      : PageDemand(step.place, step.problem.page_size, step.requests(), !step.planned_on_device), step_(step) {}
  std::int64_t tokens(std::size_t request) const override {
    const auto first = static_cast<std::size_t>(step_.query_start[request]);
    const auto last = static_cast<std::size_t>(step_.query_start[request + 1]);
    if (first == last) return 0;
    if (step_.visible.empty()) return step_.seq_lens[request];
    std::int64_t most = 0;
    for (std::size_t token = first; token < last; ++token) most = std::max<std::int64_t>(most, step_.visible[token]);
    return most;
  }

 private:
  const PlannedStep& step_;
};

// Pages whose ids may be read for a request. Ids behind may be wild.
std::int64_t pages_needed(const PageDemand& demand, std::int64_t request) {
  return ceil_div(demand.tokens(static_cast<std::size_t>(request)), demand.page_size);
}

// The first id outside [0, page_count), or `count`. The first loop has no branch and vectorises; it nearly always
// settles it.
std::int64_t first_bad_id(const std::int32_t* ids, std::int64_t count, std::int64_t page_count) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<std::uint32_t>(ids[i]));
  if (count == 0 || static_cast<std::int64_t>(largest) < page_count) return count;
  return std::find_if(ids, ids + count, [&](std::int32_t id) { return id < 0 || id >= page_count; }) - ids;
}

Status check_ids(const char* field, std::size_t request, const std::int32_t* ids, std::int64_t count,
                 std::int64_t page_count) {
  const std::int64_t bad = first_bad_id(ids, count, page_count);
  if (bad == count) return {};
  return invalid(field, "page ids in [0, " + text(page_count) + ")",
                 text(ids[bad]) + " as page " + text(bad) + " of request " + text(request));
}

Status check_block_table(const PageDemand& demand, const PageTable& pages, std::int64_t page_count) {
  const char* field = "pages.block_table";
  const std::int64_t requests = demand.requests;
  if (pages.max_pages < 0) return invalid("pages.max_pages", ">= 0", text(pages.max_pages));
  std::int64_t reach = 0;
  if (!checked_mul(pages.block_table_stride, requests * static_cast<std::int64_t>(sizeof(std::int32_t)), reach))
    return invalid("pages.block_table_stride", "a stride whose offsets fit 64 bits", text(pages.block_table_stride));
  for (std::int64_t b = 0; b < requests; ++b) {
    const auto request = static_cast<std::size_t>(b);
    const std::int64_t needed = pages_needed(demand, b);
    if (needed > pages.max_pages)
      return invalid("pages.max_pages", ">= " + text(needed) + ", which request " + text(b) + " needs",
                     text(pages.max_pages));
    if (needed == 0) continue;
    if (pages.block_table == nullptr) return missing(field, "a pointer", "null");
    LATTE_RETURN_IF_ERROR(
        check_ids(field, request, pages.block_table + b * pages.block_table_stride, needed, page_count));
  }
  return {};
}

// page_indptr alone is a part of a pair; with a list that is too short it is a whole one.
Status too_few_listed(const PageTable& pages, const std::string& least) {
  const char* field = "pages.page_indices";
  return pages.page_indices.data() == nullptr ? missing(field, ">= " + least)
                                              : invalid(field, ">= " + least, text(pages.page_indices.size()));
}

Status check_page_lists(const PageDemand& demand, const PageTable& pages, std::int64_t page_count) {
  const char* field = "pages.page_indptr";
  const std::span<const std::int32_t> indptr = pages.page_indptr;
  const auto requests = static_cast<std::size_t>(demand.requests);
  if (indptr.size() != requests + 1)
    return indptr.empty() ? missing(field, "B + 1 entries beside page_indices")
                          : invalid(field, text(requests + 1) + " entries", text(indptr.size()));
  if (indptr.data() == nullptr) return missing(field, "a pointer", "null");
  if (indptr[0] < 0) return invalid(field, "a first entry >= 0", text(indptr[0]));
  for (std::size_t b = 0; b < requests; ++b)
    if (indptr[b + 1] < indptr[b])
      return invalid(field, "entries that do not fall", text(indptr[b + 1]) + " after " + text(indptr[b]));
  const auto listed = static_cast<std::int64_t>(pages.page_indices.size());
  if (indptr.back() > listed) return too_few_listed(pages, text(indptr.back()) + " entries, the last of page_indptr");
  if (listed > 0 && pages.page_indices.data() == nullptr) return missing("pages.page_indices", "a pointer", "null");
  for (std::size_t b = 0; b < requests; ++b) {
    const std::int64_t needed = pages_needed(demand, static_cast<std::int64_t>(b));
    if (needed > indptr[b + 1] - indptr[b])
      return invalid(field, ">= " + text(needed) + " pages for request " + text(b), text(indptr[b + 1] - indptr[b]));
    LATTE_RETURN_IF_ERROR(
        check_ids("pages.page_indices", b, pages.page_indices.data() + indptr[b], needed, page_count));
  }
  return {};
}

// The longest request that the host knows about must fit a row of the table.
Status check_device_block_table(const PageDemand& demand, const PageTable& pages) {
  if (pages.max_pages < 0) return invalid("pages.max_pages", ">= 0", text(pages.max_pages));
  std::int64_t reach = 0;
  if (!checked_mul(pages.block_table_stride, demand.requests * static_cast<std::int64_t>(sizeof(std::int32_t)), reach))
    return invalid("pages.block_table_stride", "a stride whose offsets fit 64 bits", text(pages.block_table_stride));
  for (std::int64_t b = 0; b < demand.known_requests(); ++b)
    if (const std::int64_t needed = pages_needed(demand, b); needed > pages.max_pages)
      return invalid("pages.max_pages", ">= " + text(needed) + ", which request " + text(b) + " needs",
                     text(pages.max_pages));
  if (pages.block_table == nullptr) return missing("pages.block_table", "a pointer", "null");
  return {};
}

Status check_device_page_lists(const PageDemand& demand, const PageTable& pages) {
  const char* field = "pages.page_indptr";
  const auto entries = static_cast<std::int64_t>(pages.page_indptr.size());
  if (entries != demand.requests + 1)
    return entries == 0 ? missing(field, "B + 1 entries beside page_indices")
                        : invalid(field, text(demand.requests + 1) + " entries", text(entries));
  if (pages.page_indptr.data() == nullptr) return missing(field, "a pointer", "null");
  if (!pages.page_indices.empty() && pages.page_indices.data() == nullptr)
    return missing("pages.page_indices", "a pointer", "null");
  std::int64_t needed = 0;
  for (std::int64_t b = 0; b < demand.known_requests(); ++b) needed += pages_needed(demand, b);
  if (needed > static_cast<std::int64_t>(pages.page_indices.size()))
    return too_few_listed(pages, text(needed) + " entries, which the step's requests need");
  return {};
}

}  // namespace

Status validate_pages(const PageDemand& demand, const PageTable& pages, std::int64_t page_count) {
  const bool table = pages.block_table != nullptr || pages.max_pages != 0;
  const bool lists = !pages.page_indptr.empty() || !pages.page_indices.empty();
  if (table && lists) return invalid("pages", "a block table or page lists", "both");
  const bool device = demand.place == Place::device;
  if (lists) return device ? check_device_page_lists(demand, pages) : check_page_lists(demand, pages, page_count);
  if (table) return device ? check_device_block_table(demand, pages) : check_block_table(demand, pages, page_count);
  if (!demand.lengths_known) return missing("pages", "a block table or page lists");
  // A step that reads no token needs no page list; a table of zero columns has no address.
  for (std::int64_t b = 0; b < demand.known_requests(); ++b)
    if (pages_needed(demand, b) > 0) return missing("pages", "a block table or page lists");
  return {};
}

Status validate_pages(const PlannedStep& step, const PageTable& pages, std::int64_t page_count) {
  return validate_pages(StepDemand(step), pages, page_count);
}

}  // namespace latte::backend
