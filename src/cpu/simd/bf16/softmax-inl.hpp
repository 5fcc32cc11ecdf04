// Scores to probabilities: references raised once a cell, exponentials in steps between the products.
#pragma once

#include "cpu/simd/bf16/load-inl.hpp"
#include "cpu/simd/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Two vectors as pairs of bf16.
HWY_INLINE __m512i pair_bf16(__m512 even, __m512 odd) {
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, both);
}

HWY_INLINE __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
HWY_INLINE __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
}

// Multiplies 32 probabilities of a row, which rounds them once more. Returns what that added to their sum.
HWY_INLINE float scale_pairs(std::uint16_t* p, float factor) {
  const __m512i pairs = _mm512_load_si512(p);
  const __m512 factors = _mm512_set1_ps(factor);
  const __m512 even = _mm512_mul_ps(even_of(pairs), factors), odd = _mm512_mul_ps(odd_of(pairs), factors);
  const __m512i scaled = pair_bf16(even, odd);
  _mm512_store_si512(p, scaled);
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_sub_ps(even_of(scaled), even), _mm512_sub_ps(odd_of(scaled), odd)));
}

// 2^x by 2^floor(x) * p(x - floor(x)); p is minimax on [0, 1), relative error 8e-5, a 50th of what the rounding to
// bf16 that follows may cost.
HWY_INLINE __m512 exp2_short(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0780245123f), f, _mm512_set1_ps(0.22606717f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833535f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925219f));
  return _mm512_scalef_ps(p, x);
}

// Multiplies each row of a panel of outputs with its factor.
HWY_INLINE void rescale_panel(const Work& w, float* outputs, std::int32_t panel, const float* factor) {
  for (std::int32_t c = 0; c < w.column_panels; ++c)
    for (std::int32_t r = 0; r < kPanel; ++r) {
      float* o = outputs + w.o_panel(panel, c) + r * kPanel;
      _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(factor[r])));
    }
}

// Moves the running sums into the totals (kFoldTokens).
HWY_INLINE void fold_sums(Work& w) {
  fold(w.s.total_o, w.s.o, w.o_panel(w.panels, 0), !w.folded);
  fold(w.s.total_sum, w.s.sum, w.panels * kPanel, !w.folded);
  fold(w.s.total_weight, w.s.weight, w.panels * kPanel, !w.folded);
  w.folded = true;
}

// The outputs of a finished piece.
template <class Math>
HWY_INLINE void finish_work(Work& w) {
  if (w.folded) fold_sums(w);
  finish_rows(w.piece, 0, w.rows,
              {w.s.max_log2, w.folded ? w.s.total_sum : w.s.sum, w.folded ? w.s.total_weight : w.s.weight},
              [&](std::int32_t r) {
                Math::gather_row(w, r, w.s.row);
                return w.s.row;
              });
}

// How P lies in its tiles, each of 16 rows x 64 bytes.
enum class Probabilities {
  paired,  // p[panel][token / 32][16][32]: tokens side by side, to meet value pairs
  spread,  // p[token / 16][2][16][16][2]: each token beside a zero, first before it, then behind it
};

// What rows whose references rose have accumulated so far, and their probabilities in `tiles` of the block, which are
// not added yet.
template <Probabilities layout>
HWY_NOINLINE void rescale_rows(Work& w, std::int32_t panel, const float* factor, std::uint16_t* p, std::int32_t tiles) {
  const std::int32_t row = panel * kPanel;
  rescale_panel(w, w.s.o, panel, factor);
  for (std::int32_t r = 0; r < kPanel; ++r) w.s.weight[row + r] *= factor[r];
  for (std::int32_t tile = 0; tile < tiles; ++tile)
    for (std::int32_t r = 0; r < kPanel; ++r, p += kPair) {
      const float more = scale_pairs(p, factor[r]);
      if (layout == Probabilities::paired || tile % 2 == 0) w.s.weight[row + r] += more;  // spread ones are there twice
    }
  if (!w.folded) return;
  rescale_panel(w, w.s.total_o, panel, factor);
  for (std::int32_t r = 0; r < kPanel; ++r) w.s.total_sum[row + r] *= factor[r], w.s.total_weight[row + r] *= factor[r];
}

// Positive numbers as bf16, with zeros behind. Ties go up, which costs nothing and saves the units that multiply.
HWY_INLINE __m512i rounded(__m512 p) {
  return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000)),
                          _mm512_set1_epi32(~0xffff));
}

// S^T -> P of a cell of decode: begin(), then steps of four tokens of a panel, then finish(). Tokens past the end of
// the block get probability 0.
template <Probabilities layout>
class Absorb {
 public:
  Absorb(Work& w, const Cell& cell)
      : w_(w), cell_(cell), scale_(w.piece.score_scale * kLog2e), units_(cell.panels() * kUnits) {}

  // Raises references where the cell's scores ask for it. Cells in which something is hidden are few, and done at once.
  HWY_INLINE void begin() {
    bool masked = false;
    for (std::int32_t panel = cell_.panel; panel < cell_.panel + cell_.panels(); ++panel)
      masked = masked || _mm512_cmplt_epi32_mask(seen(panel), _mm512_set1_epi32(cell_.first() + kPair)) != 0;
    for (std::int32_t i = 0; i < cell_.panels(); ++i)
      if (masked)
        begin_panel<true>(i);
      else
        begin_panel<false>(i);
    if (masked)
      while (unit_ < units_) four_tokens<true>();
  }
  HWY_INLINE void step() {
    if (unit_ < units_) four_tokens<false>();
  }
  HWY_INLINE void finish() {
    while (unit_ < units_) four_tokens<false>();
    for (std::int32_t i = 0; i < cell_.panels(); ++i)
      for (std::int32_t t = 0; t < kPair; t += kTokens) finish_tile(words(i, t), tile(cell_.panel + i, cell_.t + t));
  }
  static constexpr std::int32_t steps(std::int32_t panels) { return panels * kUnits; }

 private:
  static constexpr std::int32_t kTokens = layout == Probabilities::paired ? kPair : kPanel;  // of a tile
  static constexpr std::int32_t kUnits = kPair / 4;

  // What each row of the panel sees of the block's tokens.
  HWY_INLINE __m512i seen(std::int32_t panel) const {
    return _mm512_min_epi32(_mm512_load_si512(w_.s.bound + panel * kPanel),
                            _mm512_set1_epi32(cell_.block->first + cell_.block->tokens));
  }
  // The panel's probabilities from token t of the block on.
  HWY_INLINE std::uint16_t* tile(std::int32_t panel, std::int32_t t) const {
    return w_.s.p + static_cast<std::int64_t>(panel) * kPanel * w_.step + tile_elements(t);
  }
  static constexpr std::int32_t tile_elements(std::int32_t t) {
    return t * kPanel * (layout == Probabilities::paired ? 1 : 4);
  }
  // The same before they are transposed: one word for a row and one or two tokens.
  HWY_INLINE std::uint32_t* words(std::int32_t i, std::int32_t t) const {
    return w_.s.pairs + (i * kPair + t) * kPanel * kPanel / kTokens;
  }

  template <bool masked>
  HWY_INLINE void begin_panel(std::int32_t i) {
    const std::int32_t panel = cell_.panel + i;
    alignas(64) std::int32_t bound[kPanel];
    _mm512_store_si512(bound, seen(panel));
    const PanelState state{w_.s.max_log2 + panel * kPanel, w_.s.sum + panel * kPanel, bound};
    alignas(64) float factor[kPanel];
    if (raise_panel(panel_maxima(cell_.s + i * kPair * kPanel, kPanel, cell_.first(), kPair, masked, bound), scale_,
                    state, factor)) [[unlikely]]
      rescale_rows<layout>(w_, panel, factor, tile(panel, 0), tile_elements(cell_.t) / (kPanel * kPair));
    _mm512_store_ps(reference_[i], finite_reference(state).raw);
  }

  template <bool masked>
  HWY_INLINE void four_tokens() {
    const std::int32_t i = unit_ / kUnits, t = unit_ % kUnits * 4, panel = cell_.panel + i;
    const float* scores = cell_.s + unit_ * 4 * kPanel;
    const __m512 scale = _mm512_set1_ps(scale_), reference = _mm512_load_ps(reference_[i]);
    const auto at = [&](std::int32_t n) {
      const __m512 score = _mm512_load_ps(scores + n * kPanel);
      const __m512 p = exp2_short(exponent(VF32{score}, VF32{scale}, VF32{reference}).raw);
      if constexpr (!masked) return p;
      return _mm512_maskz_mov_ps(_mm512_cmpgt_epi32_mask(seen(panel), _mm512_set1_epi32(cell_.first() + t + n)), p);
    };
    const __m512 p0 = at(0), p1 = at(1), p2 = at(2), p3 = at(3);
    const __m512i r0 = rounded(p0), r1 = rounded(p1), r2 = rounded(p2), r3 = rounded(p3);
    add(w_.s.sum + panel * kPanel, p0, p1, p2, p3);
    add(w_.s.weight + panel * kPanel, _mm512_castsi512_ps(r0), _mm512_castsi512_ps(r1), _mm512_castsi512_ps(r2),
        _mm512_castsi512_ps(r3));
    std::uint32_t* to = words(i, t);
    if constexpr (layout == Probabilities::paired) {
      _mm512_store_si512(to, _mm512_or_si512(r1, _mm512_srli_epi32(r0, 16)));
      _mm512_store_si512(to + kPanel, _mm512_or_si512(r3, _mm512_srli_epi32(r2, 16)));
    } else {
      for (const __m512i r : {r0, r1, r2, r3}) _mm512_store_si512(to, _mm512_srli_epi32(r, 16)), to += kPanel;
    }
    ++unit_;
  }

  HWY_INLINE static void add(float* sums, __m512 a, __m512 b, __m512 c, __m512 d) {
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))));
  }

  HWY_INLINE static void finish_tile(const std::uint32_t* words, std::uint16_t* p) {
    auto* rows = reinterpret_cast<std::uint32_t*>(p);
    transpose_16x16(words, kPanel, rows, kPanel);
    if constexpr (layout == Probabilities::spread)
      for (std::int32_t r = 0; r < kPanel; ++r)
        _mm512_store_si512(rows + (kPanel + r) * kPanel, _mm512_slli_epi32(_mm512_load_si512(rows + r * kPanel), 16));
  }

  Work& w_;
  const Cell cell_;
  const float scale_;
  const std::int32_t units_;
  std::int32_t unit_ = 0;
  alignas(64) float reference_[2][kPanel];
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
