// Online softmax over a block of scores for kLanes rows at once. Scores lie as S^T: one vector of rows per token, so
// that maxima and sums need no shuffles and every row keeps its own causal bound.
#if defined(LATTE_CPU_SOFTMAX_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_SOFTMAX_INL_
#undef LATTE_CPU_SOFTMAX_INL_
#else
#define LATTE_CPU_SOFTMAX_INL_
#endif

#include <limits>

#include "hwy/highway.h"

#include "core/softmax_state.hpp"
#include "cpu/kernel.hpp"
#include "cpu/simd/convert-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE {

// 2^x for x <= kMaxLag, by 2^n * p(x - n) with n the nearest integer; p is minimax on [-0.5, 0.5], relative error 2e-8
// before rounding.
HWY_INLINE VF32 exp2_vector(VF32 x) {
  const F32 d;
  const I32 di;
  const auto lowest = hn::Set(d, -125.0f);
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // a NaN stays one, which a maximum does not promise
  const auto n = hn::NearestInt(x);
  const auto f = hn::Sub(x, hn::ConvertTo(d, n));
  auto p = hn::MulAdd(hn::Set(d, 0.00015345811f), f, hn::Set(d, 0.0013399931f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0096184891f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.055503286f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022646f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.69314718f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  // A product, not a sum of exponents: NaN times anything is NaN.
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127)))));
}

// The exponent of a score's probability. The product is rounded as that of the largest score was when it became the
// reference: fused, their difference could be anything where scores are huge.
HWY_INLINE VF32 exponent(VF32 score, VF32 scale_log2, VF32 reference) {
  return hn::Sub(hn::Mul(score, scale_log2), reference);
}

// RowState (core/softmax_state.hpp) of kLanes rows, and the tokens each may see.
struct PanelState {
  float* max_log2;
  float* sum;
  const std::int32_t* bound;
};

HWY_INLINE VF32 masked_out(VF32 scores, std::int32_t token, hn::Vec<I32> bound, float fill) {
  const F32 d;
  const auto seen = hn::RebindMask(d, hn::Lt(hn::Set(I32(), token), bound));
  return hn::IfThenElse(seen, scores, hn::Set(d, fill));
}

// The largest of `tokens` scores of each row, among those it sees; -inf where there is none.
HWY_INLINE VF32 panel_maxima(const float* scores, std::int64_t stride, std::int32_t first, std::int32_t tokens,
                             bool masked, const std::int32_t* bounds) {
  const F32 d;
  const auto bound = hn::LoadU(I32(), bounds);
  VF32 best0 = hn::Set(d, kNegInf), best1 = best0;
  std::int32_t t = 0;
  if (masked) {
    for (; t < tokens; ++t)
      best0 = hn::Max(best0, masked_out(hn::LoadU(d, scores + t * stride), first + t, bound, kNegInf));
  } else {
    for (; t + 2 <= tokens; t += 2) {
      best0 = hn::Max(best0, hn::LoadU(d, scores + t * stride));
      best1 = hn::Max(best1, hn::LoadU(d, scores + (t + 1) * stride));
    }
    if (t < tokens) best0 = hn::Max(best0, hn::LoadU(d, scores + t * stride));
  }
  return hn::Max(best0, best1);
}

// Raises the panel's references for new scores with these maxima (both times `scale_log2`) and says, in factor[lane],
// what sums and outputs accumulated so far must be multiplied with. Returns false when all factors are 1.
HWY_INLINE bool raise_panel(VF32 maxima, float scale_log2, const PanelState& state, float* factor) {
  const F32 d;
  const auto none = hn::Set(d, kNegInf);
  const auto best = hn::Mul(maxima, hn::Set(d, scale_log2));
  const auto old = hn::LoadU(d, state.max_log2);
  // An empty row (old = -inf) is raised by anything; otherwise only when the new maximum is kMaxLag above.
  const auto raise = hn::Gt(best, hn::Add(old, hn::Set(d, kMaxLag)));
  if (hn::AllFalse(d, raise)) return false;
  const auto raised = hn::IfThenElse(raise, best, old);
  const auto empty = hn::Eq(old, none);
  const auto step = hn::IfThenElse(raise, hn::Sub(old, raised), hn::Zero(d));
  const auto scale = hn::IfThenElse(empty, hn::Zero(d), exp2_vector(step));
  const auto kept = hn::IfThenElse(raise, scale, hn::Set(d, 1.0f));
  hn::StoreU(raised, d, state.max_log2);
  hn::StoreU(hn::Mul(hn::LoadU(d, state.sum), kept), d, state.sum);
  hn::StoreU(kept, d, factor);
  return true;
}

// The reference to subtract: 0 for rows that have seen nothing, whose probabilities are masked to 0 anyway.
HWY_INLINE VF32 finite_reference(const PanelState& state) {
  const F32 d;
  const auto reference = hn::LoadU(d, state.max_log2);
  return hn::IfThenElse(hn::Eq(reference, hn::Set(d, kNegInf)), hn::Zero(d), reference);
}

// Whether any row of the panel does not see all tokens before `end`.
HWY_INLINE bool needs_mask(const std::int32_t* bound, std::int32_t end) {
  const I32 di;
  return !hn::AllFalse(di, hn::Lt(hn::LoadU(di, bound), hn::Set(di, end)));
}

// The first panel from `panel` on with a row that sees more than `tokens` tokens; at most `panels`. Prefill's rows see
// more and more, so what lies in front of it has nothing to do with the tokens that follow.
HWY_INLINE std::int32_t skip_blind(const std::int32_t* bound, std::int32_t panel, std::int32_t panels,
                                   std::int32_t tokens) {
  const I32 di;
  while (panel < panels && hn::AllFalse(di, hn::Gt(hn::LoadU(di, bound + panel * kLanes), hn::Set(di, tokens))))
    ++panel;
  return panel;
}

// Output rows may be pages apart, where stores wait for every one of them.
inline constexpr std::int32_t kOutputsAhead = 8;
HWY_INLINE void fetch_output(const Piece& piece, std::int32_t r) {
  if (piece.record.partial_row >= 0) return;
  const std::byte* row = piece.out.row(piece.token(r), piece.head(r));
  const auto bytes = static_cast<std::size_t>(piece.shape.v_width) * dtype_bytes(piece.out.dtype);
  for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, 1);
}

// Of every row: RowState, and the sum of the weights that its values were added with. Where these are rounded
// probabilities they sum up to something else, and by as much if all of them are rounded alike.
struct FinishedRows {
  const float *max_log2, *sum, *weight;
};

// What every kernel does with finished rows of a piece: the final output, or a partial for the merge. `row_out` returns
// the address of a row's accumulated fp32 output; it may gather the row first.
template <class RowOut>
HWY_INLINE void finish_rows(const Piece& piece, std::int32_t begin, std::int32_t end, const FinishedRows& rows,
                            const RowOut& row_out) {
  const std::int32_t partial = piece.record.partial_row, v_width = piece.shape.v_width;
  for (std::int32_t r = begin; r < end; ++r) {
    const RowState state{rows.max_log2[r], rows.sum[r]};
    const std::int32_t token = piece.token(r), head = piece.head(r);
    if (r + kOutputsAhead < end) fetch_output(piece, r + kOutputsAhead);
    std::byte* out = piece.out.row(token, head);
    Dtype dtype = piece.out.dtype;
    if (partial >= 0) {
      out = reinterpret_cast<std::byte*>(piece.partial_out + (std::int64_t{partial} + r) * v_width);
      piece.partial_lse[partial + r] = precise_log_sum_exp(state);
      dtype = Dtype::f32;
    } else if (float* lse = piece.out.lse_at(token, head)) {
      *lse = log_sum_exp(state);
    }
    // A row that saw nothing is zero even if a token hidden from it was NaN.
    if (state.sum == 0)
      std::memset(out, 0, static_cast<std::size_t>(v_width) * dtype_bytes(dtype));
    else
      store_scaled(row_out(r), piece.value_scale / rows.weight[r], v_width, out, dtype);
  }
}

// Sums over many tokens lose a digit for every hundredfold of them, so long pieces are summed in two levels: every
// kFoldTokens the running sums move into totals and start again from zero. Both are relative to the same reference.
inline constexpr std::int32_t kFoldTokens = 4096;

// total (+)= part, part = 0. `first`: the totals hold nothing yet.
HWY_INLINE void fold(float* HWY_RESTRICT total, float* HWY_RESTRICT part, std::int64_t count, bool first) {
  const F32 d;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const auto add = hn::LoadU(d, part + i);
    hn::StoreU(first ? add : hn::Add(hn::LoadU(d, total + i), add), d, total + i);
    hn::StoreU(hn::Zero(d), d, part + i);
  }
}

}  // namespace latte::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
