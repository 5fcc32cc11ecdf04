// Prefill of the bf16 kernels (kernel-inl.hpp). Both of its products are of one form, rows times columns:
//
//   S[row][token]   = Q[row] . K[token]               keys staged as columns, value pairs transposed (TurnKeys)
//   O[row][column] += P[row][token] . V[token]        values paired up (PairUp)
//
// So a row's scores lie side by side, and its softmax is one pass over them: no maxima beforehand, no transposition of
// P. The row that finds a score too far above its reference raises that and begins again (AbsorbCell).
//
// Rows of 192/128 have a third of decode's products to a score, so scores that travel to L2 and back cost more than
// their products. Here they have 8 KB, meant to stay in L1. Work goes by cells of 32 rows x 32 tokens; the cells of 32
// rows and a block of tokens are a strip:
//
//   for every block, strip and cell:  score the cell, beside the softmax of the one before
//                                     add the values of that one's strip if it was its last, beside the staging of
//                                     the next block
//
// A strip's queries are read when its first cell comes, and its rows are written when its last one is done, so that
// memory is waited for beside products, not before and after them.
//
// A row may raise its reference after earlier cells of its strip became probabilities: these are scaled again, in bf16,
// and the sum that divides outputs follows what that rounds them to. The outputs wait until their strip is accumulated
// (Scratch::lag).
//
// Budget for 512 rows and 256 tokens a step at 192/128. L1: q of a strip 12 KB, a cell's keys 12, s 2 x 4, then p 16,
// two column panels of v 16, their o 4. L2: q 197, k 2 x 98, v 2 x 66, o 262, lane sums 2 x 33 = 850 KB.
#pragma once

#include <cmath>
#include <limits>

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

// Of a row that has seen nothing. Finite, so that a token which the row does not see is not above it, and any other is.
inline constexpr float kNoReference = std::numeric_limits<float>::lowest();

// S -> P of a cell, row by row.
class AbsorbCell {
 public:
  AbsorbCell(Work& w, const Cell& cell)
      : rows_(cell.rows),
        t_(cell.t),
        scale_(w.piece.score_scale * kLog2e),
        s_(cell.s),
        reference_(w.s.max_log2 + cell.row()),
        sum_(w.s.sum + cell.row()),
        weight_(w.s.weight + cell.row()),
        lane_sum_(w.s.lane_sum + cell.row() * kPanel),
        lane_weight_(w.s.lane_weight + cell.row() * kPanel),
        lag_(w.s.lag + cell.row()),
        p_(w.s.p) {
    if (rows_ == 0) return;
    // The rows that do not see all of it, and all rows if some tokens are not there, are done with at once.
    const std::int32_t first = cell.first(), end = cell.block->first + cell.block->tokens;
    const std::int32_t* bound = w.s.bound + cell.row();
    bool masked = end < first + kPair;
    for (std::int32_t panel = 0; panel < cell.panels(); ++panel)
      masked = masked || needs_mask(bound + panel * kPanel, first + kPair);
    if (!masked) return;
    for (; row_ < rows_; ++row_)
      absorb<true>(static_cast<std::uint32_t>(std::clamp(std::min(bound[row_], end) - first, 0, kPair)));
  }

  HWY_INLINE void rows(std::int32_t count) {
    for (const std::int32_t end = std::min(row_ + count, rows_); row_ < end; ++row_) absorb<false>(kPair);
  }
  HWY_INLINE void finish() { rows(rows_); }

 private:
  template <bool masked>
  HWY_INLINE void absorb(std::uint32_t seen) {
    const float* s = s_ + row_ * kPanel;
    const __m512 scale = _mm512_set1_ps(scale_), none = _mm512_set1_ps(kNegInf);
    const auto low = static_cast<__mmask16>(_bzhi_u32(0xffff, seen));
    const auto high = static_cast<__mmask16>(_bzhi_u32(~0u, seen) >> kPanel);
    __m512 s0 = _mm512_load_ps(s), s1 = _mm512_load_ps(s + kPair * kPanel);
    if constexpr (masked) s0 = _mm512_mask_mov_ps(none, low, s0), s1 = _mm512_mask_mov_ps(none, high, s1);
    __m512 reference = _mm512_set1_ps(reference_[row_]);
    const auto x = [&](__m512 score) { return exponent(VF32{score}, VF32{scale}, VF32{reference}).raw; };
    __m512 x0 = x(s0), x1 = x(s1);
    if (_mm512_cmp_ps_mask(_mm512_max_ps(x0, x1), _mm512_set1_ps(kMaxLag), _CMP_GT_OQ) != 0) [[unlikely]] {
      raise(_mm512_max_ps(s0, s1));
      reference = _mm512_set1_ps(reference_[row_]);
      x0 = x(s0), x1 = x(s1);
    }
    __m512 p0 = exp2_short(x0), p1 = exp2_short(x1);
    if constexpr (masked) p0 = _mm512_maskz_mov_ps(low, p0), p1 = _mm512_maskz_mov_ps(high, p1);
    const auto p = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p1, p0));
    float *sum = lane_sum_ + row_ * kPanel, *weight = lane_weight_ + row_ * kPanel;
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(p0, p1)));
    _mm512_store_ps(weight, dot_pairs(_mm512_load_ps(weight), p, _mm512_set1_epi16(kOneBf16)));
    _mm512_store_si512(p_ + (t_ + row_) * kPair, p);
  }

  // A row's new reference. What it has so far is made to match; its outputs follow with their strip.
  HWY_NOINLINE void raise(__m512 scores) {
    const float old = reference_[row_], best = _mm512_reduce_max_ps(scores) * scale_;
    reference_[row_] = best;
    if (old == kNoReference) return;  // and nothing but zeros
    const float factor = std::exp2(old - best);
    sum_[row_] *= factor;
    weight_[row_] *= factor;
    lag_[row_] *= factor;
    const __m512 factors = _mm512_set1_ps(factor);
    for (float* lanes : {lane_sum_ + row_ * kPanel, lane_weight_ + row_ * kPanel})
      _mm512_store_ps(lanes, _mm512_mul_ps(_mm512_load_ps(lanes), factors));
    for (std::int32_t t = 0; t < t_; t += kPair) weight_[row_] += scale_pairs(p_ + (t + row_) * kPair, factor);
  }

  const std::int32_t rows_, t_;
  const float scale_;
  const float* const s_;
  float *const reference_, *const sum_, *const weight_, *const lane_sum_, *const lane_weight_, *const lag_;
  std::uint16_t* const p_;  // p[step / 32][32 rows][32]
  std::int32_t row_ = 0;
};

// Brings keys and values of the blocks to come to where products find them, in small parts.
class Staging {
 public:
  // `turns`: how often turn() is called while a block is worked on.
  Staging(const Work& w, std::int32_t turns)
      : key_lines_(w.piece.keys, row_bytes(w.piece.shape.format, w.piece.shape.width)),
        value_lines_(w.piece.values, row_bytes(w.piece.shape.format, w.piece.shape.v_width)),
        keys_(w),
        values_(w),
        key_pace_(TurnKeys::slices(w), turns / kTurns),
        value_pace_(PairUp::slices(w), turns / kTurns),
        token_pace_(kPrefillStep, turns / kTurns) {
    const std::int32_t begin = w.piece.record.kv_begin, end = w.piece.record.kv_end;
    key_lines_.aim(begin, end);
    value_lines_.aim(begin, end);
    for (std::int32_t t = 0; t < kAhead; ++t) step();
  }

  void aim(const Block& block) {
    keys_.aim(block);
    values_.aim(block);
    key_lines_.skip_to(block.first);
    value_lines_.skip_to(block.first);
  }
  HWY_INLINE void turn() {
    if (++turn_ % kTurns == 0) part();
  }
  void finish() {
    while (!keys_.done() || !values_.done()) part();
  }

  // Fetches a token into L2.
  HWY_INLINE void step() {
    key_lines_.lines(key_lines_.share(1, 1));
    value_lines_.lines(value_lines_.share(1, 1));
  }

 private:
  static constexpr std::int32_t kTurns = 4;   // of the products, for every part
  static constexpr std::int32_t kAhead = 64;  // tokens that are fetched before they are read

  HWY_NOINLINE void part() {
    token_pace_.turn(*this);
    key_pace_.turn(keys_);
    value_pace_.turn(values_);
  }

  Prefetch key_lines_, value_lines_;
  TurnKeys keys_;
  PairUp values_;
  Pace key_pace_, value_pace_, token_pace_;
  std::uint32_t turn_ = 0;
};

// The pipeline of cells of one piece.
template <class Math>
class Strips {
 public:
  explicit Strips(Work& w)
      : w_(w), staging_(w, Math::turns(values(w, {.rows = std::min(kStrip, w.rows)}, kPrefillStep)) * w.strips()) {
    reset_rows(w, kNoReference);
    std::fill(w.s.lag, w.s.lag + w.panels * kPanel, 1.0f);
    for (float* lanes : {w.s.lane_sum, w.s.lane_weight}) std::fill(lanes, lanes + w.panels * kPanel * kPanel, 0.0f);
  }

  void run() {
    const std::int32_t begin = w_.piece.record.kv_begin, end = w_.piece.record.kv_end;
    // Block j is blocks[j % 3]. Its keys are in use until its last score, its values until its last strip is added,
    // which is with the first cell of block j + 1; only then those of block j + 2 take their place. There is such a
    // cell: the last row of a tile sees all tokens of its piece.
    for (std::int32_t r = 0; r < std::min(kStrip, w_.rows); ++r) fetch_query(w_, r);
    if (begin < end) stage(0, begin);
    staging_.finish();
    std::int32_t j = 0;
    for (std::int32_t first = begin; first < end; first += kPrefillStep, ++j) {
      now_ = &blocks_[j % 3];
      const bool more = first + kPrefillStep < end;
      if (more) stage(j + 1, first + kPrefillStep);
      for (std::int32_t panel = 0; panel < w_.panels; panel += 2) {
        if (first == begin) open(panel);
        const std::int32_t cells = now_->extent[panel / 2] / kPair;
        for (std::int32_t cell = 0; cell < cells; ++cell) {
          if (now_->last[panel / 2]) fetch_outputs(panel, cell, cells);
          score(panel, cell * kPair);
        }
      }
      if (more) staging_.finish();
      if (more && (first + kPrefillStep - begin) % kFoldTokens == 0) {
        drain();
        for (std::int32_t panel = 0; panel < w_.panels; ++panel) fold_panel(panel, true);
        w_.folded = true;
      }
    }
    drain();
    for (std::int32_t panel = 0; panel < w_.panels; panel += 2)
      if (!closed_[panel / 2]) close(panel);
  }

 private:
  std::int32_t panels(std::int32_t panel) const { return std::min(2, w_.panels - panel); }
  std::int32_t rows(std::int32_t panel) const { return std::min(kStrip, w_.rows - panel * kPanel); }

  // Where a strip's rows will go, some rows with each of its last cells.
  void fetch_outputs(std::int32_t panel, std::int32_t cell, std::int32_t cells) {
    const std::int32_t count = rows(panel);
    for (std::int32_t r = cell * count / cells; r < (cell + 1) * count / cells; ++r)
      fetch_output(w_.piece, panel * kPanel + r);
  }

  void stage(std::int32_t j, std::int32_t first) {
    Block& block = blocks_[j % 3];
    block.k = w_.s.k[j % 2], block.v = w_.s.v[j % 2];
    aim(w_, block, first);
    staging_.aim(block);
  }

  // A strip's queries, q[strip][width / 32][32 rows][32], and no outputs yet. Those of the next strip are fetched.
  void open(std::int32_t panel) {
    auto* row = reinterpret_cast<std::uint16_t*>(w_.s.row);
    std::uint16_t* q = w_.s.q + static_cast<std::int64_t>(panel) * kPanel * w_.width;
    for (std::int32_t r = 0; r < panels(panel) * kPanel; ++r) {
      fetch_query(w_, panel * kPanel + kStrip + r);
      stage_query(w_, panel * kPanel + r, row);
      for (std::int32_t c = 0; c < w_.width; c += kPair)
        _mm512_store_si512(q + c * kStrip + r * kPair, _mm512_loadu_si512(row + c));
    }
    std::fill(w_.s.o + w_.o_panel(panel, 0), w_.s.o + w_.o_panel(panel + panels(panel), 0), 0.0f);
  }

  // Writes the rows of a strip that has seen everything.
  void close(std::int32_t panel) {
    closed_[panel / 2] = true;
    for (std::int32_t i = panel; i < panel + panels(panel); ++i) fold_panel(i, w_.folded);
    finish_rows(w_.piece, panel * kPanel, panel * kPanel + rows(panel), {w_.s.max_log2, w_.s.sum, w_.s.weight},
                [&](std::int32_t r) {
                  gather_panels(w_, r, w_.s.row);
                  return w_.s.row;
                });
  }

  // Scores a cell beside the softmax of the one before, and ends the strip of that one if it was its last.
  HWY_INLINE void score(std::int32_t panel, std::int32_t t) {
    turn_ ^= 1;
    const Cell next{.block = now_, .panel = panel, .rows = rows(panel), .t = t, .s = w_.s.s[turn_]};
    const Product product = scores(w_, next);
    AbsorbCell absorb(w_, last_);
    const auto share = static_cast<std::int32_t>(ceil_div(last_.rows, Math::turns(product)));
    Math::multiply(
        product, [&]() __attribute__((always_inline)) { absorb.rows(share); });
    absorb.finish();
    accumulate();
    last_ = next;
  }

  // Everything scored is in the outputs.
  void drain() {
    AbsorbCell(w_, last_).finish();
    accumulate();
    last_ = {};
  }

  static Product scores(const Work& w, const Cell& cell) {
    return {.a = w.s.q + static_cast<std::int64_t>(cell.panel) * kPanel * w.width,
            .b = cell.block->k + static_cast<std::int64_t>(cell.t) * w.width,
            .c = cell.s,
            .b_panel = static_cast<std::int64_t>(kPanel) * w.width,
            .c_row_panel = Cell::kTile,
            .c_column_panel = 2 * Cell::kTile,
            .rows = cell.rows,
            .column_panels = 2,
            .depth = w.width,
            .add = false};
  }
  static Product values(const Work& w, const Cell& cell, std::int32_t depth) {
    return {.a = w.s.p,
            .b = cell.block != nullptr ? cell.block->v : nullptr,
            .c = w.s.o + w.o_panel(cell.panel, 0),
            .b_panel = w.s.v_panel,
            .c_row_panel = w.o_panel(1, 0),
            .c_column_panel = Cell::kTile,
            .rows = cell.rows,
            .column_panels = w.column_panels,
            .depth = depth,
            .add = true};
  }

  // Adds the strip of the last cell to the outputs if it ends there, beside the staging of the next block. (That has to
  // wait while values of the block before are in the place of the next one's.)
  HWY_INLINE void accumulate() {
    const Cell& cell = last_;
    if (cell.block == nullptr || !cell.ends_strip()) return;
    for (std::int32_t panel = cell.panel; panel < cell.panel + cell.panels(); ++panel) catch_up(panel);
    const bool stages = cell.block == now_;
    Math::multiply(
        values(w_, cell, cell.block->extent[cell.panel / 2]), [&]() __attribute__((always_inline)) {
          if (stages) staging_.turn();
        });
    if (cell.block->last[cell.panel / 2]) close(cell.panel);
  }

  // Outputs of a panel in which references rose, before its probabilities are added.
  HWY_INLINE void catch_up(std::int32_t panel) {
    float* lag = w_.s.lag + panel * kPanel;
    const __m512 one = _mm512_set1_ps(1.0f);
    if (_mm512_cmpneq_ps_mask(_mm512_load_ps(lag), one) == 0) return;
    rescale_panel(w_, w_.s.o, panel, lag);
    if (w_.folded) rescale_panel(w_, w_.s.total_o, panel, lag);
    _mm512_store_ps(lag, one);
  }

  // Moves the running sums of a panel into the totals (kFoldTokens), and its outputs if it is in parts.
  HWY_INLINE void fold_panel(std::int32_t panel, bool outputs) {
    const auto add_up = [](float* lanes, float& sum) {
      sum += _mm512_reduce_add_ps(_mm512_load_ps(lanes));
      _mm512_store_ps(lanes, _mm512_setzero_ps());
    };
    for (std::int32_t r = panel * kPanel; r < (panel + 1) * kPanel; ++r) {
      add_up(w_.s.lane_sum + static_cast<std::int64_t>(r) * kPanel, w_.s.sum[r]);
      add_up(w_.s.lane_weight + static_cast<std::int64_t>(r) * kPanel, w_.s.weight[r]);
    }
    if (!outputs) return;
    const std::int64_t at = w_.o_panel(panel, 0);
    fold(w_.s.total_o + at, w_.s.o + at, w_.o_panel(1, 0), !w_.folded);
  }

  Work& w_;
  Staging staging_;
  Block blocks_[3] = {};
  Block* now_ = nullptr;
  Cell last_;  // scored last
  std::int32_t turn_ = 0;
  bool closed_[kMaxRows / kStrip] = {};
};

template <class Math>
HWY_INLINE void run_prefill_with(const Piece& piece) {
  Carver carver(piece.scratch);
  Work w = open_work(piece, carver);
  Strips<Math>(w).run();
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
