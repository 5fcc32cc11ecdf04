#include "backend/views.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "backend/errors.hpp"
#include "core/checked.hpp"

namespace latte::backend {
namespace {

std::span<const std::int64_t> extents(const ConstTensorView& view) {
  return {view.shape.data(), static_cast<std::size_t>(view.rank)};
}

Status check_shape(const ConstTensorView& view, const ViewRule& rule) {
  bool match =
      rule.exact_first ? view.shape[0] == rule.shape[0] : view.shape[0] >= std::max<std::int64_t>(0, rule.shape[0]);
  for (std::size_t axis = 1; axis < static_cast<std::size_t>(rule.rank); ++axis)
    match = match && view.shape[axis] == rule.shape[axis];
  if (match) return {};
  return invalid(rule.field,
                 "shape " + shape_text({rule.shape.data(), static_cast<std::size_t>(rule.rank)}, !rule.exact_first),
                 shape_text(extents(view)));
}

// The farthest byte from the base must be a 64-bit distance away, so that no kernel has to think about overflow.
bool offsets_fit(const ConstTensorView& view, const ViewRule& rule, std::int64_t element_bytes) {
  std::int64_t span = 1;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(rule.rank); ++axis) {
    const std::int64_t stride = view.stride[axis];
    if (view.shape[axis] <= 1) continue;
    if (stride == std::numeric_limits<std::int64_t>::min()) return false;
    std::int64_t reach = 0;
    if (!checked_mul(std::abs(stride), view.shape[axis] - 1, reach) || !checked_add(span, reach, span)) return false;
  }
  return checked_mul(span, element_bytes, span);
}

}  // namespace

Status check_view(const ConstTensorView& view, const ViewRule& rule) {
  if (!given(view)) return missing(rule.field, "a tensor");
  if (view.rank != rule.rank) return invalid(rule.field, "rank " + text(rule.rank), "rank " + text(view.rank));
  if (!contains(rule.dtypes, view.dtype))
    return invalid(rule.field, "dtype " + dtype_set_text(rule.dtypes), std::string("dtype ") + dtype_name(view.dtype));
  LATTE_RETURN_IF_ERROR(check_shape(view, rule));

  const auto last = static_cast<std::size_t>(rule.rank) - 1;
  if (rule.dense_last && view.shape[last] > 1 && view.stride[last] != 1)
    return invalid(rule.field, "last stride 1", "last stride " + text(view.stride[last]));
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  if (!offsets_fit(view, rule, element_bytes))
    return invalid(rule.field, "strides whose byte offsets fit 64 bits", "strides that overflow");

  const bool empty = std::any_of(extents(view).begin(), extents(view).end(), [](std::int64_t n) { return n == 0; });
  if (empty) return {};
  if (view.data == nullptr) return missing(rule.field, "a data pointer", "null");
  const std::int64_t align = std::max(rule.align_bytes, element_bytes);
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(align) != 0)
    return invalid(rule.field, "an address that is a multiple of " + text(align) + " bytes", "a misaligned one");
  for (std::size_t axis = 0; axis < last; ++axis)
    if (view.shape[axis] > 1 && view.stride[axis] * element_bytes % align != 0)
      return invalid(rule.field, "strides that are multiples of " + text(align) + " bytes",
                     text(view.stride[axis] * element_bytes) + " bytes");
  return {};
}

bool rows_disjoint(std::int64_t extent0, std::int64_t stride0, std::int64_t extent1, std::int64_t stride1,
                   std::int64_t width) {
  if (extent0 == 0 || extent1 == 0) return true;
  // Only differences of indices matter, and those come with both signs: so the strides' signs do not.
  std::int64_t near = extent0 == 1 ? 0 : std::abs(stride0), near_count = extent0;
  std::int64_t far = extent1 == 1 ? 0 : std::abs(stride1), far_count = extent1;
  if (near_count == 1 || (far_count != 1 && far < near)) {
    std::swap(near, far);
    std::swap(near_count, far_count);
  }
  if (near_count == 1) return true;
  if (near < width) return false;
  if (far_count == 1) return true;
  const std::int64_t reach = near * (near_count - 1) + width;
  // Usually one dimension lies wholly inside the other and this loop does not run; where they interleave, ask for every
  // step of the outer one whether it lands on a row of the inner one. far >= near bounds it by the smaller count.
  for (std::int64_t step = 1; step < far_count && step * far < reach; ++step) {
    const std::int64_t index = step * far / near;
    const std::int64_t rest = step * far % near;
    if (rest < width && index < near_count) return false;
    if (near - rest < width && index + 1 < near_count) return false;
  }
  return true;
}

Status check_disjoint(const ConstTensorView& view, const char* field, std::int64_t rows, std::int64_t width) {
  if (rows_disjoint(rows, view.stride[0], view.shape[1], view.stride[1], width)) return {};
  return invalid(field, "rows that do not overlap, " + text(width) + " elements each",
                 "strides " + shape_text({view.stride.data(), 2}));
}

}  // namespace latte::backend
