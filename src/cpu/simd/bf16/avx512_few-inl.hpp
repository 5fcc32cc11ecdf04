// The two matrix products with AVX-512 BF16 dot products, of few rows; kernel-inl.hpp has their definition.
//
// Lanes are 32 columns of a key, not rows that each take a broadcast of two of its values: no row is made up to fill a
// panel, and a product takes half a load instead of one. What it costs is adding up lanes, 45 instructions for 16
// scores. Values are paired on their way into registers, by every eight rows again, and never stored.
//
//   score:       s[panel][token][16]   = lanes of (q[row][32 columns] . keys[token][32 columns]), added up
//   accumulate:  o[panel][column][16][16] += p[panel][token / 32][16][32] . (keys[2 tokens][32 columns], interleaved)
#pragma once

#include <cstring>

#include "cpu/simd/bf16/avx512-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Row tiles up to this. With 24 rows whole panels, a third more products, are 8 % slower; with 32 they are 11 % faster.
inline constexpr std::int32_t kFewRows = 24;
static_assert(kFewRows <= kStrip);

// Sixteen vectors to the vector of their sums. Each is added up in the same order, wherever it stands.
HWY_INLINE __m512 add_lanes(const __m512 (&v)[16]) {
  __m512 x[8], y[4], z[2];
  for (int i = 0; i < 8; ++i)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)
    y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    z[i] = _mm512_add_ps(_mm512_unpacklo_ps(y[i], y[i + 2]), _mm512_unpackhi_ps(y[i], y[i + 2]));
  return _mm512_add_ps(_mm512_shuffle_ps(z[0], z[1], 0x44), _mm512_shuffle_ps(z[0], z[1], 0xee));
}
// Which of its vectors becomes lane n.
constexpr int vector_of_lane(int n) { return (n & 8) / 2 + (n & 4) * 2 + (n & 2) / 2 + (n & 1) * 2; }

struct Avx512Few {
  static constexpr Queries kQueries = Queries::plain;
  static constexpr Probabilities kProbabilities = Probabilities::paired;
  static constexpr bool kPairsValues = false;

  static std::int32_t score_turns(const Work& w) {
    const std::int32_t tail = w.rows % kGroup;
    return kPair * (w.rows / kGroup) / tokens_of(kGroup) + (tail > 0 ? kPair / tokens_of(group_of(tail)) : 0);
  }
  static std::int32_t fetch_turns(const Work& w) { return score_turns(w) * Avx512::turns_a_key(w); }
  static std::int32_t accumulate_turns(const Work& w) {
    const std::int32_t tail = w.rows % kBlock, columns = w.column_panels;
    const std::int32_t blocks = w.rows / kBlock * columns / 2 + (tail > 0 ? columns / columns_of(tail) : 0);
    return w.step / kPanel * std::max(blocks, 1);
  }
  static void finish() {}

  template <class Aside>
  HWY_INLINE static void score(const Work& w, const Cell& cell, Aside& aside) {
    aside.begin();
    for (std::int32_t t = 0; t < kPair; t += kPanel) {
      for (std::int32_t row = 0; row < cell.rows; row += kGroup) {
        const std::uint16_t* q = w.s.q + static_cast<std::int64_t>(cell.row() + row) * w.width;
        float* s = cell.s + (row / kPanel * kPair + t) * kPanel + row % kPanel;
        switch (group_of(cell.rows - row)) {
          case 1: score_group<1>(w, *cell.block, cell.t + t, q, s, aside); break;
          case 2: score_group<2>(w, *cell.block, cell.t + t, q, s, aside); break;
          default: score_group<kGroup>(w, *cell.block, cell.t + t, q, s, aside);
        }
      }
    }
  }

  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    // All rows before the next columns, which are in L1 then.
    for (std::int32_t column = 0; column < w.column_panels; column += kColumns)
      for (std::int32_t row = 0; row < w.rows; row += kBlock)
        accumulate_rows<kBlock>(w, block, row, w.rows - row, column, std::min(column + kColumns, w.column_panels),
                                aside);
  }

  HWY_INLINE static void gather_row(const Work& w, std::int32_t r, float* row) { gather_panels(w, r, row); }

 private:
  static constexpr std::int32_t kSums = 16;  // in registers: 4 rows x 4 tokens, 2 x 8 or 1 x 16; 8 rows x 2 panels
  static constexpr std::int32_t kGroup = 4;  // rows of scores
  // Of those left: three take a row of zeros along.
  static constexpr std::int32_t group_of(std::int32_t left) { return left > 2 ? kGroup : left; }
  static constexpr std::int32_t tokens_of(std::int32_t rows) { return kSums / rows; }
  static constexpr std::int32_t kBlock = 8;    // rows of sums
  static constexpr std::int32_t kColumns = 8;  // the most panels of them, for one or two rows
  static constexpr std::int32_t columns_of(std::int32_t rows) { return rows > 4 ? 2 : rows > 2 ? 4 : kColumns; }

  // Scores of `rows` rows for a tile of keys, the first of which is the t-th of the block.
  template <std::int32_t rows, class Aside>
  HWY_INLINE static void score_group(const Work& w, const Block& block, std::int32_t t, const std::uint16_t* q,
                                     float* s, Aside& aside) {
    constexpr std::int32_t tokens = tokens_of(rows);
    const KeyTile& tile = block.keys[t / kPanel];
    for (std::int32_t i = 0; i < kPanel; i += tokens) {
      score_block<rows>(w, tile.data + i * tile.stride, tile.stride, w.s.scales + (t + i) * kDsMlaGroups, q,
                        s + i * kPanel, aside);
      aside.step();
    }
  }

  template <std::int32_t rows, class Aside>
  HWY_INLINE static void score_block(const Work& w, const std::uint16_t* k, std::int64_t stride, const float* scales,
                                     const std::uint16_t* q, float* s, Aside& aside) {
    constexpr std::int32_t tokens = tokens_of(rows);
    __m512 acc[kSums];
    for (__m512& a : acc) a = _mm512_setzero_ps();
    add_products<rows>(w, 0, k, stride, q, acc, aside);
    for (std::int32_t segment = 1; segment < w.segments; ++segment) {
      __m512 part[kSums];
      for (__m512& a : part) a = _mm512_setzero_ps();
      add_products<rows>(w, segment, k, stride, q, part, aside);
      for (std::int32_t t = 0; t < tokens; ++t) {
        const __m512 scale = _mm512_set1_ps(scales[t * kDsMlaGroups + segment - 1]);
        for (std::int32_t r = 0; r < rows; ++r) {
          const int i = vector_of_lane(t * rows + r);
          acc[i] = _mm512_fmadd_ps(part[i], scale, acc[i]);
        }
      }
    }
    alignas(64) float sums[kSums];
    _mm512_store_ps(sums, add_lanes(acc));
    for (std::int32_t t = 0; t < tokens; ++t) std::memcpy(s + t * kPanel, sums + t * rows, rows * sizeof(float));
  }

  // A segment's products, 32 columns in the lanes of each sum.
  template <std::int32_t rows, class Aside>
  HWY_INLINE static void add_products(const Work& w, std::int32_t segment, const std::uint16_t* k, std::int64_t stride,
                                      const std::uint16_t* q, __m512 (&acc)[kSums], Aside& aside) {
    constexpr std::int32_t tokens = tokens_of(rows);
    const std::int32_t last = w.segment_end(segment);
    for (std::int32_t c = w.segment_begin(segment); c < last;) {
      for (const std::int32_t end = std::min(c + Avx512::kTurnColumns, last); c < end; c += kPair) {
        __m512i query[rows];
        for (std::int32_t r = 0; r < rows; ++r) query[r] = _mm512_loadu_si512(q + r * w.width + c);
        HWY_UNROLL(16)
        for (std::int32_t t = 0; t < tokens; ++t) {
          const __m512i key = _mm512_loadu_si512(k + t * stride + c);
          for (std::int32_t r = 0; r < rows; ++r) {
            __m512& sum = acc[vector_of_lane(t * rows + r)];
            sum = dot_pairs(sum, query[r], key);
          }
        }
      }
      aside.fetch();
    }
  }

  // Fewer rows than a block get wider blocks, so that there are accumulators enough to hide the latency.
  template <std::int32_t rows, class Aside>
  HWY_INLINE static void accumulate_rows(const Work& w, const Block& block, std::int32_t row, std::int32_t left,
                                         std::int32_t column, std::int32_t end, const Aside& aside) {
    if constexpr (rows > 0) {
      if (left < rows) return accumulate_rows<rows - 1>(w, block, row, left, column, end, aside);
      constexpr std::int32_t columns = columns_of(rows);
      for (; column + columns <= end; column += columns) accumulate_block<rows, columns>(w, block, row, column, aside);
      for (; column < end; column += 2) accumulate_block<rows, 2>(w, block, row, column, aside);
    }
  }

  template <std::int32_t rows, std::int32_t columns, class Aside>
  HWY_INLINE static void accumulate_block(const Work& w, const Block& block, std::int32_t row, std::int32_t column,
                                          const Aside& aside) {
    const std::int32_t panel = row / kPanel, end = block.extent[panel / 2];
    float* o = w.s.o + w.o_panel(panel, column) + row % kPanel * kPanel;
    const std::uint16_t* p = w.s.p + static_cast<std::int64_t>(panel) * kPanel * w.step + row % kPanel * kPair;
    __m512 acc[rows][columns];
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) acc[r][c] = _mm512_loadu_ps(o + (c * kPanel + r) * kPanel);
    for (std::int32_t t = 0; t < end; t += kPanel) {
      const auto [data, stride] = block.keys[t / kPanel];
      const std::uint16_t* v = data + column * kPanel;
      const std::uint16_t* weights = p + t / kPair * kPanel * kPair + t % kPair;
      for (std::int32_t pair = 0; pair < kPanel; pair += 2, v += 2 * stride) {
        __m512i value[columns];
        for (std::int32_t c = 0; c < columns; c += 2) {
          // When latent is an odd multiple of 16 the last half is from the rope part, and never looked at.
          const __m512i even = _mm512_loadu_si512(v + c * kPanel), odd = _mm512_loadu_si512(v + stride + c * kPanel);
          value[c] = _mm512_unpacklo_epi16(even, odd);
          value[c + 1] = _mm512_unpackhi_epi16(even, odd);
        }
        HWY_UNROLL(8)
        for (std::int32_t r = 0; r < rows; ++r) {
          const __m512i weight = broadcast_pair(weights + r * kPair + pair);
          for (std::int32_t c = 0; c < columns; ++c) acc[r][c] = dot_pairs(acc[r][c], value[c], weight);
        }
      }
      aside();
    }
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) _mm512_storeu_ps(o + (c * kPanel + r) * kPanel, acc[r][c]);
  }
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
