// O = softmax(scale * Q K^T) V with fp32 multiply-adds, for any format, any width that is a multiple of 16, any target.
//
//   tokens --scores--> s[64 tokens][rows] --absorb--> the same, now P^T
//                                                      v
//   tokens -------------------------------------> accumulate --> o
//
// V is the first columns of the same tokens in decode and a tensor of its own in prefill. The two matrix products are
// in many-inl.hpp and few-inl.hpp. A plan's pieces all take the same ones, by its row tile, and each adds up in one
// order, so that a row's bits do not depend on the rows beside it.
//
// Registers: many rows have kTokens x 2 accumulators in `scores`, kRows x 2 in `accumulate`. AVX-512: 16 of 32; AVX2:
// 12 of 16, two FMA ports with a latency of 4 need 8, and 8 is what few rows have there. L1: widened tokens 18 KB,
// their columns of a panel of q 12 KB. L2, beside the tokens themselves, for 64 rows: q 147, s 20, o 131 KB; prefill's
// 256 rows: 196, 70, 131 KB; from fp8 k 152 KB more.
#if defined(LATTE_CPU_FP32_KERNEL_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_KERNEL_INL_
#undef LATTE_CPU_FP32_KERNEL_INL_
#else
#define LATTE_CPU_FP32_KERNEL_INL_
#endif

#include "cpu/simd/fp32/few-inl.hpp"
#include "cpu/simd/fp32/many-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

template <bool masked>
HWY_INLINE void absorb_panel(float* s, std::int64_t rows, std::int32_t first, std::int32_t tokens, float scale_log2,
                             const PanelState& state) {
  const F32 d;
  const auto reference = finite_reference(state), scale = hn::Set(d, scale_log2);
  const auto bound = hn::LoadU(I32(), state.bound);
  auto sum = hn::Zero(d);
  for (std::int32_t t = 0; t < tokens; ++t) {
    auto p = exp2_vector(exponent(hn::LoadU(d, s + t * rows), scale, reference));
    if constexpr (masked) p = masked_out(p, first + t, bound, 0.0f);
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, s + t * rows);
  }
  hn::StoreU(hn::Add(sum, hn::LoadU(d, state.sum)), d, state.sum);
}

HWY_INLINE void rescale(float* row, std::int32_t count, float factor) {
  const F32 d;
  for (std::int32_t c = 0; c < count; c += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::Set(d, factor)), d, row + c);
}

// S^T -> P^T in place; rescales the outputs of rows whose reference rose.
HWY_NOINLINE void absorb(Work& w, std::int32_t first, std::int32_t tokens) {
  const float scale_log2 = w.piece.score_scale * kLog2e;
  for (std::int32_t p = w.panel_begin; p < w.panels; ++p) {
    const std::int32_t row = p * kLanes;
    float* s = w.s.s + row;
    const PanelState state{w.s.max_log2 + row, w.s.sum + row, w.s.bound + row};
    const bool masked = needs_mask(state.bound, first + tokens);
    const auto maxima = panel_maxima(s, w.s.rows, first, tokens, masked, state.bound);
    if (raise_panel(maxima, scale_log2, state, w.s.factor + row))
      for (std::int32_t r = row; r < std::min(row + kLanes, w.rows); ++r) {
        const float factor = w.s.factor[r];
        if (factor == 1.0f) continue;
        rescale(w.s.o + static_cast<std::int64_t>(r) * w.v_width, w.v_width, factor);
        if (!w.folded) continue;
        rescale(w.s.total_o + static_cast<std::int64_t>(r) * w.v_width, w.v_width, factor);
        w.s.total_sum[r] *= factor;
      }
    if (masked)
      absorb_panel<true>(s, w.s.rows, first, tokens, scale_log2, state);
    else
      absorb_panel<false>(s, w.s.rows, first, tokens, scale_log2, state);
  }
}

HWY_INLINE void fold_sums(Work& w) {
  fold(w.s.total_o, w.s.o, static_cast<std::int64_t>(w.rows) * w.v_width, !w.folded);
  fold(w.s.total_sum, w.s.sum, w.panels * kLanes, !w.folded);
  w.folded = true;
}

template <class Math>
HWY_NOINLINE void run_with(const Piece& piece) {
  Carver carver(piece.scratch);
  Work w{.piece = piece,
         .s = Scratch(carver, piece.rows(), piece.shape),
         .rows = piece.rows(),
         .panels = static_cast<std::int32_t>(ceil_div(piece.rows(), kLanes)),
         .width = piece.shape.width,
         .v_width = piece.shape.v_width,
         .ahead = {piece.keys, row_bytes(piece.shape.format, piece.shape.width)}};
  for (std::int32_t r = 0; r < w.panels * kLanes; ++r) {
    w.s.bound[r] = r < w.rows ? piece.visible(r) : std::numeric_limits<std::int32_t>::max();
    w.s.max_log2[r] = kNegInf;
    w.s.sum[r] = 0;
  }
  std::fill(w.s.o, w.s.o + static_cast<std::int64_t>(w.panels) * kLanes * w.v_width, 0.0f);
  Math::pack_query(w);
  const std::int32_t key_lines = w.ahead.share(kStep / 2, Math::score_turns(w));
  const std::int32_t value_lines = w.ahead.share(kStep / 2, Math::accumulate_turns(w));
  for (std::int32_t t = piece.record.kv_begin; t < piece.record.kv_end; t += kStep) {
    const std::int32_t tokens = std::min(kStep, piece.record.kv_end - t), done = t - piece.record.kv_begin;
    if (done > 0 && done % kFoldTokens == 0) fold_sums(w);
    w.panel_begin = skip_blind(w.s.bound, w.panel_begin, w.panels, t);
    open(w, t, tokens);
    if (piece.shape.values_in_keys) w.ahead.aim(t + kStep, std::min(t + 2 * kStep, piece.record.kv_end));
    w.lines = key_lines;
    Math::scores(w, tokens);
    absorb(w, t, tokens);
    w.lines = value_lines;
    Math::accumulate(w, tokens);
  }
  if (w.folded) fold_sums(w);
  const float* sum = w.folded ? w.s.total_sum : w.s.sum;
  const float* o = w.folded ? w.s.total_o : w.s.o;
  finish_rows(piece, 0, piece.rows(), {w.s.max_log2, sum, sum},
              [&](std::int32_t r) { return o + static_cast<std::int64_t>(r) * w.v_width; });
}

HWY_NOINLINE void run(const Piece& piece) {
#if HWY_TARGET != HWY_SCALAR
  if (piece.shape.values_in_keys && are_few(piece.shape)) return run_with<Few>(piece);
#endif
  run_with<Many>(piece);
}

std::size_t scratch_bytes(const Shape& shape) {
  Carver carver;
  Scratch(carver, shape.row_tile, shape);
  return carver.used();
}

// Independent multiply-adds on registers: the most this target's fp32 units can do.
HWY_NOINLINE double burn(double seconds) {
  const F32 d;
  constexpr std::int32_t kChains = 12, kRounds = 4096;
  VF32 acc[kChains];
  for (std::int32_t i = 0; i < kChains; ++i) acc[i] = hn::Set(d, 1.0f + static_cast<float>(i));
  const auto a = hn::Set(d, 0.999999f), b = hn::Set(d, 1e-6f);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (std::int32_t n = 0; n < kRounds; ++n) {
      HWY_UNROLL(12)
      for (std::int32_t i = 0; i < kChains; ++i) acc[i] = hn::MulAdd(acc[i], a, b);
    }
    operations += 2.0 * kChains * kRounds * kLanes;
  }
  auto sum = acc[0];
  for (std::int32_t i = 1; i < kChains; ++i) sum = hn::Add(sum, acc[i]);
  keep(hn::GetLane(sum));
  return operations;
}

}  // namespace latte::cpu::HWY_NAMESPACE::fp32
HWY_AFTER_NAMESPACE();

#endif
