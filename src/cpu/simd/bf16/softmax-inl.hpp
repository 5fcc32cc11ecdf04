// Scores to probabilities: references raised once a block, exponentials in slices between the products.
#pragma once

#include "cpu/simd/bf16/load-inl.hpp"
#include "cpu/simd/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Two tokens' probabilities as bf16 pairs, one word a row.
HWY_INLINE __m512i pair_bf16(__m512 even, __m512 odd) {
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, both);
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

// Raises the references of rows for a scored block, and rescales what those that rose have accumulated.
HWY_INLINE void raise(Work& w, const Block& block) {
  const float scale_log2 = w.piece.score_scale * kLog2e;
  for (std::int32_t panel = 0; panel < w.panels; ++panel) {
    const std::int32_t tokens = std::min(block.tokens, block.extent[panel / 2]), row = panel * kPanel;
    const PanelState state{w.s.max_log2 + row, w.s.sum + row, w.s.bound + row};
    const float* scores = block.s + static_cast<std::int64_t>(row) * kStep;
    const VF32 best =
        panel_maxima(scores, block.first, tokens, needs_mask(state.bound, block.first + tokens), state.bound);
    float factor[kPanel];
    if (!raise_panel(best, scale_log2, state, factor)) continue;
    rescale_panel(w, w.s.o, panel, factor);
    for (std::int32_t r = 0; r < kPanel; ++r) w.s.weight[row + r] *= factor[r];
    if (!w.folded) continue;
    rescale_panel(w, w.s.total_o, panel, factor);
    for (std::int32_t r = 0; r < kPanel; ++r)
      w.s.total_sum[row + r] *= factor[r], w.s.total_weight[row + r] *= factor[r];
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

// Probabilities of one token for a panel's rows, 0 for those that do not see it.
template <bool masked>
HWY_INLINE __m512 probability(const float* scores, __m512 scale, __m512 reference, const std::int32_t* bound,
                              std::int32_t token) {
  const __m512 p = exp2_short(exponent(VF32{_mm512_loadu_ps(scores)}, VF32{scale}, VF32{reference}).raw);
  if constexpr (!masked) return p;
  return _mm512_maskz_mov_ps(_mm512_cmpgt_epi32_mask(_mm512_loadu_si512(bound), _mm512_set1_epi32(token)), p);
}

// How P lies in its tiles, each of 16 rows x 64 bytes.
enum class Probabilities {
  paired,  // p[panel][token / 32][16][32]: tokens side by side, to meet value pairs
  spread,  // p[token / 16][2][16][16][2]: each token beside a zero, first before it, then behind it
};

// S^T -> P of a scored and raised block. Tokens past the end of the block get probability 0. A slice is four tokens of
// a panel, or the transposition of a finished tile.
template <Probabilities layout>
class Absorb {
 public:
  Absorb(Work& w, const Block& block) : w_(w), block_(block), scale_(w.piece.score_scale * kLog2e), panel_(-1) {
    next_panel();
  }

  HWY_INLINE void step() {
    if (panel_ >= w_.panels) return;
    if (t_ == tile_ + kTokens) {
      finish_tile();
      tile_ = t_;
      if (t_ >= end_) next_panel();
      return;
    }
    if (masked_)
      four_tokens<true>();
    else
      four_tokens<false>();
    t_ += 4;
  }
  HWY_INLINE void finish() {
    while (panel_ < w_.panels) step();
  }

 private:
  static constexpr std::int32_t kTokens = layout == Probabilities::paired ? kPair : kPanel;  // of a tile

  HWY_INLINE void finish_tile() {
    auto* tiles = reinterpret_cast<std::uint32_t*>(w_.s.p + static_cast<std::int64_t>(panel_) * kPanel * kStep);
    if constexpr (layout == Probabilities::paired) {
      transpose_16x16(w_.s.pairs, kPanel, tiles + tile_ / kTokens * kPanel * kPanel, kPanel);
    } else {
      tiles += tile_ / kTokens * 2 * kPanel * kPanel;
      transpose_16x16(w_.s.pairs, kPanel, tiles, kPanel);
      for (std::int32_t r = 0; r < kPanel; ++r)
        _mm512_storeu_si512(tiles + (kPanel + r) * kPanel,
                            _mm512_slli_epi32(_mm512_loadu_si512(tiles + r * kPanel), 16));
    }
  }

  // The next panel that sees something of the block.
  HWY_INLINE void next_panel() {
    t_ = tile_ = 0;
    do
      if (++panel_ >= w_.panels) return;
    while (block_.extent[panel_ / 2] == 0);
    end_ = block_.extent[panel_ / 2];
    const std::int32_t row = panel_ * kPanel, block_end = block_.first + block_.tokens;
    scores_ = block_.s + static_cast<std::int64_t>(panel_) * kStep * kPanel;
    sum_ = w_.s.sum + row;
    weight_ = w_.s.weight + row;
    _mm512_storeu_ps(reference_, finite_reference({w_.s.max_log2 + row, sum_, w_.s.bound + row}).raw);
    const __m512i bound = _mm512_min_epi32(_mm512_loadu_si512(w_.s.bound + row), _mm512_set1_epi32(block_end));
    _mm512_storeu_si512(bound_, bound);
    masked_ = _mm512_cmplt_epi32_mask(bound, _mm512_set1_epi32(block_.first + end_)) != 0;
  }

  template <bool masked>
  HWY_INLINE void four_tokens() {
    const __m512 scale = _mm512_set1_ps(scale_), reference = _mm512_loadu_ps(reference_);
    const auto at = [&](std::int32_t t) {
      return probability<masked>(scores_ + t * kPanel, scale, reference, bound_, block_.first + t);
    };
    const __m512 p0 = at(t_), p1 = at(t_ + 1), p2 = at(t_ + 2), p3 = at(t_ + 3);
    std::uint32_t* words = w_.s.pairs + (t_ - tile_) * kPanel / (kTokens / kPanel);
    __m512 weight = _mm512_loadu_ps(weight_);
    const auto put = [&](__m512i probabilities) {
      _mm512_storeu_si512(words, probabilities);
      weight = dot_pairs(weight, probabilities, _mm512_set1_epi16(kOneBf16));
      words += kPanel;
    };
    if constexpr (layout == Probabilities::paired) {
      put(pair_bf16(p0, p1));
      put(pair_bf16(p2, p3));
    } else {
      for (const __m512 p : {p0, p1, p2, p3}) put(_mm512_cvtepu16_epi32(round_bf16(p)));
    }
    _mm512_storeu_ps(weight_, weight);
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(p0, p1), _mm512_add_ps(p2, p3));
    _mm512_storeu_ps(sum_, _mm512_add_ps(_mm512_loadu_ps(sum_), sum));
  }

  Work& w_;
  const Block& block_;
  const float scale_;
  std::int32_t panel_, end_ = 0, t_ = 0, tile_ = 0;
  bool masked_ = false;
  const float* scores_ = nullptr;
  float *sum_ = nullptr, *weight_ = nullptr;
  alignas(64) float reference_[kPanel];
  alignas(64) std::int32_t bound_[kPanel];
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
