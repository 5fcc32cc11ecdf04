// What a tensor view must look like before a kernel may walk it, and how those of results are handed to the backends.
#pragma once

#include <array>
#include <cstdint>

#include "latte/ops.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte::backend {

struct ViewRule {
  const char* field = "";
  std::int32_t rank = 0;
  // Exact extents, except the first: that one must be at least shape[0], and shape[0] rows of it are used.
  std::array<std::int64_t, kMaxRank> shape{};
  bool exact_first = false;  // the first extent must be shape[0] too
  std::uint32_t dtypes = 0;  // bits of those allowed
  bool dense_last = true;
  std::int64_t align_bytes = 1;  // base and outer strides are multiples of this (and of the element)
};

// A scale of one number, where the host can read it.
inline float scale_of(const Fp8Scale& scale) { return scale.ptr != nullptr ? *scale.ptr : scale.value; }

// A view counts as given when anything of it was set: an empty tensor may well have no address.
inline bool given(const ConstTensorView& view) { return view.data != nullptr || view.rank != 0; }

Status check_view(const ConstTensorView& view, const ViewRule& rule);

// Whether rows of `width` elements at i * stride0 + j * stride1 (i < extent0, j < extent1) never share an element.
bool rows_disjoint(std::int64_t extent0, std::int64_t stride0, std::int64_t extent1, std::int64_t stride1,
                   std::int64_t width);

// For outputs: the rows that are written, view[0..rows)[*], must not overlap. `width` elements each.
Status check_disjoint(const ConstTensorView& view, const char* field, std::int64_t rows, std::int64_t width);

// Each backend's room has an OutputView and a MergePart of its own, with the same fields.
template <class View>
View output_view(const TensorView& out, const TensorView& lse) {
  return {.out = out.bytes(),
          .out_token_stride = out.stride[0],
          .out_head_stride = out.stride[1],
          .dtype = out.dtype,
          .lse = static_cast<float*>(lse.data),
          .lse_token_stride = lse.stride[0],
          .lse_head_stride = lse.stride[1]};
}
template <class Part>
Part merge_part(const Partial& partial) {
  return {.out = partial.out.bytes(),
          .token_stride = partial.out.stride[0],
          .head_stride = partial.out.stride[1],
          .dtype = partial.out.dtype,
          .lse = static_cast<const float*>(partial.lse.data),
          .lse_token_stride = partial.lse.stride[0],
          .lse_head_stride = partial.lse.stride[1]};
}

}  // namespace latte::backend
