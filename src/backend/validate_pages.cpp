// Page lists. On the CPU they are host memory, so every id that will be followed is looked at: O(pages of the step).
// Those of a device are not read; kernels clamp what they find there, and check it when validation is switched on.
#include <algorithm>
#include <string>

#include "backend/errors.hpp"
#include "backend/validate.hpp"
#include "core/checked.hpp"

namespace latte::backend {
namespace {

// Pages whose ids may be read for a request: those that hold a token some row of it sees. Ids behind may be wild.
std::int64_t pages_needed(const PlannedStep& step, std::size_t request) {
  const auto first = static_cast<std::size_t>(step.query_start[request]);
  const auto last = static_cast<std::size_t>(step.query_start[request + 1]);
  if (first == last) return 0;
  std::int64_t tokens = step.seq_lens[request];
  if (!step.visible.empty()) {
    tokens = 0;
    for (std::size_t token = first; token < last; ++token) tokens = std::max<std::int64_t>(tokens, step.visible[token]);
  }
  return ceil_div(tokens, step.problem.page_size);
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

Status check_block_table(const PlannedStep& step, const PageTable& pages, std::int64_t page_count) {
  const char* field = "pages.block_table";
  const auto requests = static_cast<std::int64_t>(step.seq_lens.size());
  if (pages.max_pages < 0) return invalid("pages.max_pages", ">= 0", text(pages.max_pages));
  std::int64_t reach = 0;
  if (!checked_mul(pages.block_table_stride, requests * static_cast<std::int64_t>(sizeof(std::int32_t)), reach))
    return invalid("pages.block_table_stride", "a stride whose offsets fit 64 bits", text(pages.block_table_stride));
  for (std::int64_t b = 0; b < requests; ++b) {
    const auto request = static_cast<std::size_t>(b);
    const std::int64_t needed = pages_needed(step, request);
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

Status check_page_lists(const PlannedStep& step, const PageTable& pages, std::int64_t page_count) {
  const char* field = "pages.page_indptr";
  const std::span<const std::int32_t> indptr = pages.page_indptr;
  if (indptr.size() != step.seq_lens.size() + 1)
    return indptr.empty() ? missing(field, "B + 1 entries beside page_indices")
                          : invalid(field, text(step.seq_lens.size() + 1) + " entries", text(indptr.size()));
  if (indptr.data() == nullptr) return missing(field, "a pointer", "null");
  if (indptr[0] < 0) return invalid(field, "a first entry >= 0", text(indptr[0]));
  for (std::size_t b = 0; b < step.seq_lens.size(); ++b)
    if (indptr[b + 1] < indptr[b])
      return invalid(field, "entries that do not fall", text(indptr[b + 1]) + " after " + text(indptr[b]));
  const auto listed = static_cast<std::int64_t>(pages.page_indices.size());
  if (indptr.back() > listed)
    return invalid("pages.page_indices", ">= " + text(indptr.back()) + " entries, the last of page_indptr",
                   text(listed));
  if (listed > 0 && pages.page_indices.data() == nullptr) return missing("pages.page_indices", "a pointer", "null");
  for (std::size_t b = 0; b < step.seq_lens.size(); ++b) {
    const std::int64_t needed = pages_needed(step, b);
    if (needed > indptr[b + 1] - indptr[b])
      return invalid(field, ">= " + text(needed) + " pages for request " + text(b), text(indptr[b + 1] - indptr[b]));
    LATTE_RETURN_IF_ERROR(
        check_ids("pages.page_indices", b, pages.page_indices.data() + indptr[b], needed, page_count));
  }
  return {};
}

// The longest request that the host knows about must fit a row of the table.
Status check_device_block_table(const PlannedStep& step, const PageTable& pages) {
  if (pages.max_pages < 0) return invalid("pages.max_pages", ">= 0", text(pages.max_pages));
  std::int64_t reach = 0;
  if (!checked_mul(pages.block_table_stride, step.requests() * static_cast<std::int64_t>(sizeof(std::int32_t)), reach))
    return invalid("pages.block_table_stride", "a stride whose offsets fit 64 bits", text(pages.block_table_stride));
  for (std::size_t b = 0; b < step.seq_lens.size(); ++b)
    if (const std::int64_t needed = pages_needed(step, b); needed > pages.max_pages)
      return invalid("pages.max_pages", ">= " + text(needed) + ", which request " + text(b) + " needs",
                     text(pages.max_pages));
  if (pages.block_table == nullptr) return missing("pages.block_table", "a pointer", "null");
  return {};
}

Status check_device_page_lists(const PlannedStep& step, const PageTable& pages) {
  const char* field = "pages.page_indptr";
  const auto entries = static_cast<std::int64_t>(pages.page_indptr.size());
  if (entries != step.requests() + 1)
    return entries == 0 ? missing(field, "B + 1 entries beside page_indices")
                        : invalid(field, text(step.requests() + 1) + " entries", text(entries));
  if (pages.page_indptr.data() == nullptr) return missing(field, "a pointer", "null");
  if (!pages.page_indices.empty() && pages.page_indices.data() == nullptr)
    return missing("pages.page_indices", "a pointer", "null");
  std::int64_t needed = 0;
  for (std::size_t b = 0; b < step.seq_lens.size(); ++b) needed += pages_needed(step, b);
  if (needed > static_cast<std::int64_t>(pages.page_indices.size()))
    return invalid("pages.page_indices", ">= " + text(needed) + " entries, which the step's requests need",
                   text(pages.page_indices.size()));
  return {};
}

}  // namespace

Status validate_pages(const PlannedStep& step, const PageTable& pages, std::int64_t page_count) {
  const bool table = pages.block_table != nullptr || pages.max_pages != 0;
  const bool lists = !pages.page_indptr.empty() || !pages.page_indices.empty();
  if (table && lists) return invalid("pages", "a block table or page lists", "both");
  const bool device = step.place == Place::device;
  if (lists) return device ? check_device_page_lists(step, pages) : check_page_lists(step, pages, page_count);
  if (table) return device ? check_device_block_table(step, pages) : check_block_table(step, pages, page_count);
  if (step.planned_on_device) return missing("pages", "a block table or page lists");
  // A step that reads no token needs no page list; a table of zero columns has no address.
  for (std::size_t b = 0; b < step.seq_lens.size(); ++b)
    if (pages_needed(step, b) > 0) return missing("pages", "a block table or page lists");
  return {};
}

}  // namespace latte::backend
