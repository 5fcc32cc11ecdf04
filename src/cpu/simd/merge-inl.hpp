// Joins normalised partials of one row: out = sum e^(lse_k - L) out_k with L = ln sum e^lse_k, in order of k. A partial
// that saw nothing (lse = -inf) is not even read.
#if defined(LATTE_CPU_MERGE_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_MERGE_INL_
#undef LATTE_CPU_MERGE_INL_
#else
#define LATTE_CPU_MERGE_INL_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"

#include "core/softmax_state.hpp"
#include "cpu/simd/convert-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE {

inline constexpr std::int32_t kMergeColumns = 512;  // columns joined at a time, on the stack

HWY_NOINLINE void merge_row(const MergeRow& row) {
  const F32 d;
  double best = kNegInf;
  float total = 0;
  bool empty = true;
  for (std::int32_t k = 0; k < row.count; ++k) {
    const double lse = row.lse(row.context, k);
    empty = empty && lse == kNegInf;
    best = std::max(best, lse);
  }
  const auto mass = [&](double lse) { return std::exp(static_cast<float>(lse - best)); };
  if (!empty)
    for (std::int32_t k = 0; k < row.count; ++k) total += mass(row.lse(row.context, k));

  const float share = empty ? 0.0f : 1.0f / total;
  const auto out_bytes = static_cast<std::int64_t>(dtype_bytes(row.out_dtype));
  float joined[kMergeColumns], values[kMergeColumns];
  for (std::int32_t begin = 0; begin < row.width; begin += kMergeColumns) {
    const std::int32_t columns = std::min(kMergeColumns, row.width - begin);
    std::fill(joined, joined + columns, 0.0f);
    for (std::int32_t k = 0; k < row.count; ++k) {
      const double lse = row.lse(row.context, k);
      if (lse == kNegInf) continue;
      const auto weight = hn::Set(d, mass(lse) * share);
      const auto [data, dtype] = row.values(row.context, k);
      const float* src = reinterpret_cast<const float*>(data) + begin;
      if (dtype != Dtype::f32) {
        to_f32(data + begin * static_cast<std::int64_t>(dtype_bytes(dtype)), dtype, columns, values);
        src = values;
      }
      for (std::int32_t c = 0; c < columns; c += kLanes)
        hn::StoreU(hn::MulAdd(weight, hn::LoadU(d, src + c), hn::LoadU(d, joined + c)), d, joined + c);
    }
    store_scaled(joined, 1.0f, columns, row.out + begin * out_bytes, row.out_dtype);
  }
  // Last: the output may be one of the partials.
  if (row.lse_out) *row.lse_out = empty ? kNegInf : static_cast<float>(best + std::log(total));
}

}  // namespace latte::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
