// Prefill with the parts of the bf16 kernels (kernel-inl.hpp): the same layouts and products, in another order.
//
// Rows of 192/128 have a third of decode's products to a score, so scores that travel to L2 and back cost more than
// their products. Here they have 8 KB, meant to stay in L1. Work goes by cells of 32 rows x 32 tokens; the cells of 32
// rows and a block of tokens are a strip:
//
//   for every block, strip and cell:  score the cell, beside the softmax of the one before (AbsorbCell)
//                                     accumulate the strip of the one before, if it was the last of it
//                                     maxima, raise
//                                     StageKeys and PairUp of the next block, a few tokens
//
// Values do not take turns with scores, although softmax would then have more products to run beside: queries, keys,
// scores, probabilities, values and outputs of 32 rows are more than L1 holds together. One after the other, a strip's
// queries can stay in L1 for all of its scores and its probabilities for all of its columns
// (docs/kernels/prefill_cpu.md has a count of lines, and what it gained).
//
// A cell may raise references after earlier cells of its strip became probabilities: these few are scaled again, in
// bf16, where they no longer matter much. The outputs wait until their strip is accumulated (Scratch::lag).
//
// Keys are always staged: where they lie they are a stride of all heads apart, which puts the rows of a tile into one
// or two sets of L1, and they are read once for every 32 rows. V is paired up from where it lies. Both are fetched into
// L2 one block before they are read, not earlier: strides of 4 KB and more leave them few sets of L2.
//
// Budget for 512 rows and 256 tokens a step at 192/128. L1: q of a strip 12 KB, a cell's keys 12, s 2 x 4, then p 16,
// two column panels of v 16, their o 4. L2: q 197, k 2 x 98, v 2 x 66, o 262 = 787 KB.
#pragma once

#include "cpu/simd/bf16/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Spreads slices evenly over turns.
class Pace {
 public:
  Pace(std::int64_t slices, std::int64_t turns) : slices_(slices), turns_(std::max<std::int64_t>(turns, 1)) {}

  template <class Slices>
  HWY_INLINE void turn(Slices& slices) {
    for (owed_ += slices_; owed_ >= turns_; owed_ -= turns_) slices.step();
  }

 private:
  const std::int64_t slices_, turns_;
  std::int64_t owed_ = 0;
};

// 32 tokens of the one or two panels of a strip.
struct Cell {
  Block* block = nullptr;
  std::int32_t panel = 0, panels = 0, t = 0;
  float* s = nullptr;  // s[panel][32 tokens][16]

  static constexpr std::int64_t kScores = kPair * kPanel;                // of a panel
  static constexpr std::int64_t kProbabilities = kPrefillStep * kPanel;  // of a panel: p[panel][step / 32][16][32]

  std::int32_t first() const { return block->first + t; }
  std::int32_t tokens() const { return std::min(kPair, block->tokens - t); }
  bool ends_strip() const { return t + kPair >= block->extent[panel / 2]; }
};

// S^T -> P of a cell. A slice is four tokens of a panel, or the transposition of its tile.
class AbsorbCell {
 public:
  AbsorbCell(Work& w, const Cell& cell) : w_(w), cell_(cell), scale_(w.piece.score_scale * kLog2e) {
    left_ = slices(cell);
    if (left_ > 0) open_panel();
  }

  static std::int32_t slices(const Cell& cell) { return cell.panels * (kPair / 4 + 1); }

  HWY_INLINE void step() {
    if (left_ == 0) return;
    --left_;
    if (t_ == kPair) {
      auto* tile = reinterpret_cast<std::uint32_t*>(w_.s.p + panel_ * Cell::kProbabilities + cell_.t * kPanel);
      transpose_16x16(w_.s.pairs, kPanel, tile, kPanel);
      ++panel_;
      if (left_ > 0) open_panel();
      return;
    }
    if (masked_)
      four_tokens<true>();
    else
      four_tokens<false>();
    t_ += 4;
  }
  HWY_INLINE void finish() {
    while (left_ > 0) step();
  }

 private:
  HWY_INLINE void open_panel() {
    const std::int32_t row = (cell_.panel + panel_) * kPanel;
    t_ = 0;
    scores_ = cell_.s + panel_ * Cell::kScores;
    sum_ = w_.s.sum + row;
    _mm512_store_ps(reference_, finite_reference({w_.s.max_log2 + row, sum_, w_.s.bound + row}).raw);
    const __m512i bound = _mm512_min_epi32(_mm512_loadu_si512(w_.s.bound + row),
                                           _mm512_set1_epi32(cell_.block->first + cell_.block->tokens));
    _mm512_store_si512(bound_, bound);
    masked_ = _mm512_cmplt_epi32_mask(bound, _mm512_set1_epi32(cell_.first() + kPair)) != 0;
  }

  template <bool masked>
  HWY_INLINE void four_tokens() {
    const __m512 scale = _mm512_set1_ps(scale_), reference = _mm512_load_ps(reference_);
    const auto at = [&](std::int32_t t) {
      return probability<masked>(scores_ + t * kPanel, scale, reference, bound_, cell_.first() + t);
    };
    const __m512 p0 = at(t_), p1 = at(t_ + 1), p2 = at(t_ + 2), p3 = at(t_ + 3);
    std::uint32_t* words = w_.s.pairs + t_ / 2 * kPanel;
    _mm512_storeu_si512(words, pair_bf16(p0, p1));
    _mm512_storeu_si512(words + kPanel, pair_bf16(p2, p3));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(p0, p1), _mm512_add_ps(p2, p3));
    _mm512_storeu_ps(sum_, _mm512_add_ps(_mm512_loadu_ps(sum_), sum));
  }

  Work& w_;
  const Cell& cell_;
  const float scale_;
  std::int32_t left_, panel_ = 0, t_ = 0;
  bool masked_ = false;
  const float* scores_ = nullptr;
  float* sum_ = nullptr;
  alignas(64) float reference_[kPanel];
  alignas(64) std::int32_t bound_[kPanel];
};

// The pipeline of cells of one piece.
template <class Math>
class Strips {
 public:
  explicit Strips(Work& w) : w_(w) { std::fill(w.s.lag, w.s.lag + w.panels * kPanel, 1.0f); }

  // Scores a cell beside the softmax of the one before, and ends that one's strip if it was the last of it. `aside` is
  // called at every turn of the products.
  template <class Aside>
  HWY_INLINE void score(Block& block, std::int32_t panel, std::int32_t t, const Aside& aside) {
    turn_ ^= 1;
    const Cell next{
        .block = &block, .panel = panel, .panels = std::min(2, w_.panels - panel), .t = t, .s = w_.s.s[turn_]};
    AbsorbCell absorb(w_, now_);
    Pace pace(AbsorbCell::slices(now_), Math::score_cell_turns(w_));
    Math::score_cell(w_, block, t, panel, next.s, Cell::kScores, [&] {
      pace.turn(absorb);
      aside();
    });
    absorb.finish();
    accumulate(aside);
    now_ = next;
    for (std::int32_t i = 0; i < next.panels; ++i) raise_cell(i);
  }

  // Everything scored is in the outputs.
  void drain() {
    AbsorbCell(w_, now_).finish();
    accumulate([] {});
    now_ = {};
  }

 private:
  // Adds the strip of now_ to the outputs, if now_ is its last cell.
  template <class Aside>
  HWY_INLINE void accumulate(const Aside& aside) {
    if (now_.block == nullptr || !now_.ends_strip()) return;
    rescale_strip();
    for (std::int32_t column = 0; column < w_.column_panels; column += Math::kColumns)
      Math::accumulate_strip(w_, *now_.block, now_.panel, column, w_.s.p, aside);
  }

  // References of a panel of the cell just scored.
  HWY_INLINE void raise_cell(std::int32_t i) {
    const std::int32_t panel = now_.panel + i, row = panel * kPanel, first = now_.first(), tokens = now_.tokens();
    const std::int32_t* bound = w_.s.bound + row;
    const PanelState state{w_.s.max_log2 + row, w_.s.sum + row, bound};
    const VF32 best = panel_maxima(now_.s + i * Cell::kScores, first, tokens, needs_mask(bound, first + tokens), bound);
    if (!raise_panel(best, w_.piece.score_scale * kLog2e, state, w_.s.factor + row)) return;
    for (std::int32_t r = row; r < row + kPanel; ++r) {
      w_.s.lag[r] *= w_.s.factor[r];
      if (w_.folded) w_.s.total_sum[r] *= w_.s.factor[r];
    }
    lags_ = true;
    // Probabilities of this strip's earlier cells.
    std::uint16_t* p = w_.s.p + i * Cell::kProbabilities;
    for (std::int32_t t = 0; t < now_.t; t += kPair)
      for (std::int32_t r = 0; r < kPanel; ++r, p += kPair) {
        const __m512 factor = _mm512_set1_ps(w_.s.factor[row + r]);
        const __m512i pairs = _mm512_loadu_si512(p);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
        _mm512_storeu_si512(p, pair_bf16(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor)));
      }
  }

  // Outputs of a strip whose references rose, before its probabilities are added.
  HWY_INLINE void rescale_strip() {
    if (!lags_) return;
    lags_ = false;
    for (std::int32_t panel = now_.panel; panel < now_.panel + now_.panels; ++panel) {
      const std::int32_t row = panel * kPanel;
      rescale_panel(w_, w_.s.o, panel, w_.s.lag + row);
      if (w_.folded) rescale_panel(w_, w_.s.total_o, panel, w_.s.lag + row);
      std::fill(w_.s.lag + row, w_.s.lag + row + kPanel, 1.0f);
    }
  }

  Work& w_;
  Cell now_;  // the cell scored last
  std::int32_t turn_ = 0;
  bool lags_ = false;  // some lag of the strip of now_ is not 1
};

template <class Math>
HWY_INLINE void run_prefill_with(const Piece& piece) {
  const std::int32_t begin = piece.record.kv_begin, end = piece.record.kv_end;
  Carver carver(piece.scratch);
  Work w = open_work(piece, carver);
  // The first two blocks are fetched beside the queries, all others two blocks before they are used.
  Prefetch keys(piece.keys, row_bytes(piece.shape.format, piece.shape.width));
  Prefetch values(piece.values, row_bytes(piece.shape.format, piece.shape.v_width));
  keys.aim(begin, std::min(begin + 2 * kPrefillStep, end));
  values.aim(begin, std::min(begin + 2 * kPrefillStep, end));
  const std::int32_t first_keys = keys.share(2 * kPrefillStep, w.rows);
  const std::int32_t first_values = values.share(2 * kPrefillStep, w.rows);
  pack_query(w, [&] {
    keys.lines(first_keys);
    values.lines(first_values);
  });
  Strips<Math> strips(w);

  // Block j is blocks[j % 3]. Its keys are in use until its last score, its values until its last strip is accumulated,
  // which is with the first cell of block j + 1. There is one: the last row of a tile sees all tokens of its piece.
  Block blocks[3] = {};
  if (begin < end) {
    blocks[0].k = w.s.k[0], blocks[0].v = w.s.v[0];
    aim(w, blocks[0], begin);
    StageKeys(w, blocks[0], true).finish();
    PairUp(w, blocks[0]).finish();
  }
  const auto strip_count = static_cast<std::int32_t>(ceil_div(w.panels, 2));
  const std::int32_t cells = strip_count * (kPrefillStep / kPair);
  const auto column_groups = static_cast<std::int32_t>(ceil_div(w.column_panels, Math::kColumns));
  const std::int32_t turns = cells * Math::score_cell_turns(w) + strip_count * column_groups * Math::kStripTurns;
  const std::int32_t key_lines = keys.share(kPrefillStep, turns), value_lines = values.share(kPrefillStep, turns);
  Pace stage_pace(kPrefillStep, cells), pair_pace(PairUp::slices(w), cells);

  std::int32_t j = 0;
  for (std::int32_t first = begin; first < end; first += kPrefillStep, ++j) {
    Block &now = blocks[j % 3], &next = blocks[(j + 1) % 3];
    const bool more = first + kPrefillStep < end;
    if (more) {
      next.k = w.s.k[(j + 1) % 2], next.v = w.s.v[(j + 1) % 2];
      aim(w, next, first + kPrefillStep);
    }
    StageKeys stage(w, next, more);
    PairUp pairs(w, next, more);
    keys.aim(first + 2 * kPrefillStep, std::min(first + 3 * kPrefillStep, end));
    values.aim(first + 2 * kPrefillStep, std::min(first + 3 * kPrefillStep, end));
    for (std::int32_t panel = 0; panel < w.panels; panel += 2)
      for (std::int32_t t = 0; t < now.extent[panel / 2]; t += kPair) {
        strips.score(now, panel, t, [&] {
          keys.lines(key_lines);
          values.lines(value_lines);
        });
        stage_pace.turn(stage);
        pair_pace.turn(pairs);
      }
    stage.finish();
    pairs.finish();
    if (more && (first + kPrefillStep - begin) % kFoldTokens == 0) {
      strips.drain();
      fold_sums(w);
    }
  }
  strips.drain();
  finish_work<Math>(w);
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
