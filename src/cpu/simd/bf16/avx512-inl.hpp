// The two matrix products with AVX-512 BF16 dot products, of more than a few rows; kernel-inl.hpp has their definition.
#pragma once

#include <cstring>

#include "cpu/simd/bf16/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

HWY_INLINE __m512i broadcast_pair(const std::uint16_t* pair) {
  std::int32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Register blocks of 8 tokens (or rows) x 2 panels: 16 accumulators, 2 operands and a broadcast of 32 registers.
struct Avx512 {
  static constexpr Queries kQueries = Queries::paired;
  static constexpr bool kPairsValues = true;
  static constexpr Probabilities kProbabilities = Probabilities::paired;
  static constexpr std::int32_t kBlock = 8;
  static constexpr std::int32_t kTurnColumns = 64;  // of scores, between fetches

  template <std::int32_t panels, class Aside>
  HWY_INLINE static void score_block(const Work& w, const Block& block, std::int32_t segment, std::int32_t t,
                                     std::int32_t panel, float* s, std::int64_t s_panel, Aside& aside) {
    const KeyTile& tile = block.keys[t / kPanel];
    const std::uint16_t* k = tile.data + t % kPanel * tile.stride;
    const std::uint16_t* q = w.s.q + static_cast<std::int64_t>(panel) * w.width * kPanel;
    const std::int64_t q_panel = static_cast<std::int64_t>(w.width) * kPanel;
    __m512 acc[kBlock][panels];
    for (auto& token : acc)
      for (__m512& a : token) a = _mm512_setzero_ps();
    const std::int32_t last = w.segment_end(segment);
    for (std::int32_t c = w.segment_begin(segment); c < last;) {
      for (const std::int32_t end = std::min(c + kTurnColumns, last); c < end; c += 2) {
        __m512i query[panels];
        for (std::int32_t p = 0; p < panels; ++p) query[p] = _mm512_loadu_si512(q + p * q_panel + c * kPanel);
        HWY_UNROLL(8)
        for (std::int32_t i = 0; i < kBlock; ++i) {
          const __m512i key = broadcast_pair(k + i * tile.stride + c);
          for (std::int32_t p = 0; p < panels; ++p) acc[i][p] = dot_pairs(acc[i][p], query[p], key);
        }
      }
      aside.fetch();
    }
    for (std::int32_t i = 0; i < kBlock; ++i)
      for (std::int32_t p = 0; p < panels; ++p) _mm512_storeu_ps(s + p * s_panel + i * kPanel, acc[i][p]);
  }

  static std::int32_t turns_a_key(const Work& w) {
    return static_cast<std::int32_t>(ceil_div(w.scored_width(), kTurnColumns));
  }
  static std::int32_t score_turns(const Work& w) { return kPair / kBlock * w.segments; }
  static std::int32_t fetch_turns(const Work& w) { return kPair / kBlock * turns_a_key(w); }
  static std::int32_t accumulate_turns(const Work& w) {
    return static_cast<std::int32_t>(ceil_div(w.rows, kBlock)) * w.column_panels / 2 * (w.step / kPair);
  }

  template <class Aside>
  HWY_INLINE static void score(const Work& w, const Cell& cell, Aside& aside) {
    aside.begin();
    score_segments(
        w, cell, [&](std::int32_t segment, float* s) __attribute__((always_inline)) {
          for (std::int32_t t = 0; t < kPair; t += kBlock) {
            if (cell.panels() == 2)
              score_block<2>(w, *cell.block, segment, cell.t + t, cell.panel, s + t * kPanel, kPair * kPanel, aside);
            else
              score_block<1>(w, *cell.block, segment, cell.t + t, cell.panel, s + t * kPanel, kPair * kPanel, aside);
            aside.step();
          }
        });
  }
  static void finish() {}

  template <std::int32_t rows, std::int32_t columns, class Aside>
  HWY_INLINE static void accumulate_block(const Work& w, const Block& block, std::int32_t row, std::int32_t column,
                                          const std::uint16_t* p, const Aside& aside) {
    const std::int32_t panel = row / kPanel;
    float* o = w.s.o + w.o_panel(panel, column) + row % kPanel * kPanel;
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    __m512 acc[rows][columns];
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) acc[r][c] = _mm512_loadu_ps(o + (c * kPanel + r) * kPanel);
    const std::int32_t end = block.extent[row / (2 * kPanel)];
    for (std::int32_t t = 0; t < end; t += kPair, p += kPanel * kPair) {
      for (std::int32_t pair = 0; pair < kPair; pair += 2) {
        __m512i value[columns];
        for (std::int32_t c = 0; c < columns; ++c)
          value[c] = _mm512_loadu_si512(v + c * w.s.v_panel + (t + pair) * kPanel);
        HWY_UNROLL(8)
        for (std::int32_t r = 0; r < rows; ++r) {
          const __m512i weight = broadcast_pair(p + r * kPair + pair);
          for (std::int32_t c = 0; c < columns; ++c) acc[r][c] = dot_pairs(acc[r][c], value[c], weight);
        }
      }
      aside();
    }
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) _mm512_storeu_ps(o + (c * kPanel + r) * kPanel, acc[r][c]);
  }

  // Fewer rows than a block get wider blocks, so that there are accumulators enough to hide the latency.
  template <std::int32_t rows, class Aside>
  HWY_INLINE static void accumulate_rows(const Work& w, const Block& block, std::int32_t row, std::int32_t left,
                                         std::int32_t column, std::int32_t end, const std::uint16_t* p,
                                         const Aside& aside) {
    if constexpr (rows > 0) {
      if (left < rows) return accumulate_rows<rows - 1>(w, block, row, left, column, end, p, aside);
      constexpr std::int32_t columns = rows > 3 ? 2 : 4;
      for (; column + columns <= end; column += columns)
        accumulate_block<rows, columns>(w, block, row, column, p, aside);
      for (; column < end; ++column) accumulate_block<rows, 1>(w, block, row, column, p, aside);
    }
  }

  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t row = 0; row < w.rows; row += kBlock) {
      const std::int64_t panel = row / kPanel;
      accumulate_rows<kBlock>(w, block, row, w.rows - row, 0, w.column_panels,
                              w.s.p + panel * kPanel * w.step + row % kPanel * kPair, aside);
    }
  }

  // Prefill's products, eight rows x two panels of columns at a time.
  HWY_INLINE static void multiply_block(const Product& product, std::int32_t row, std::int32_t column) {
    constexpr std::int32_t columns = 2;
    const std::uint16_t* a = product.a + row * kPair;
    const std::uint16_t* b = product.b + column * product.b_panel;
    float* c = product.c + row / kPanel * product.c_row_panel + column * product.c_column_panel + row % kPanel * kPanel;
    __m512 acc[kBlock][columns];
    for (std::int32_t r = 0; r < kBlock; ++r)
      for (std::int32_t n = 0; n < columns; ++n)
        acc[r][n] = product.add ? _mm512_loadu_ps(c + n * product.c_column_panel + r * kPanel) : _mm512_setzero_ps();
    for (std::int32_t t = 0; t < product.depth; t += kPair, a += kStrip * kPair)
      for (std::int32_t pair = 0; pair < kPair; pair += 2, b += 2 * kPanel) {
        __m512i right[columns];
        for (std::int32_t n = 0; n < columns; ++n) right[n] = _mm512_loadu_si512(b + n * product.b_panel);
        HWY_UNROLL(8)
        for (std::int32_t r = 0; r < kBlock; ++r) {
          const __m512i left = broadcast_pair(a + r * kPair + pair);
          for (std::int32_t n = 0; n < columns; ++n) acc[r][n] = dot_pairs(acc[r][n], right[n], left);
        }
      }
    for (std::int32_t r = 0; r < kBlock; ++r)
      for (std::int32_t n = 0; n < columns; ++n)
        _mm512_storeu_ps(c + n * product.c_column_panel + r * kPanel, acc[r][n]);
  }
  template <class Aside>
  HWY_INLINE static void multiply(const Product& product, const Aside& aside) {
    for (std::int32_t column = 0; column < product.column_panels; column += 2)
      for (std::int32_t row = 0; row < product.rows; row += kBlock) {
        multiply_block(product, row, column);
        aside();
      }
  }
  static std::int32_t turns(const Product& product) {
    return product.column_panels / 2 * static_cast<std::int32_t>(ceil_div(product.rows, kBlock));
  }

  HWY_INLINE static void gather_row(const Work& w, std::int32_t r, float* row) { gather_panels(w, r, row); }
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
