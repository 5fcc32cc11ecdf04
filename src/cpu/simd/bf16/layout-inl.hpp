// What lies where in the bf16 kernels' scratch, and the blocks of tokens that go through it.
// Everything in this folder is compiled for one target only, so once.
#pragma once

#include <algorithm>
#include <immintrin.h>

#include "cpu/kernel.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/simd/convert-inl.hpp"

// Beyond what Highway enables for its AVX-512 target.
#define LATTE_BF16_TARGET HWY_TARGET_STR ",avx512bf16,amx-tile,amx-bf16"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

inline constexpr std::int32_t kPanel = 16;          // rows or columns a tile
inline constexpr std::int32_t kPair = 32;           // bf16 values in a tile row, and tokens in a tile of V
inline constexpr std::int32_t kStrip = 2 * kPanel;  // rows that one step of the products works on
inline constexpr std::int32_t kStep = 128;          // tokens of a block in decode
inline constexpr std::int32_t kPrefillStep = 256;   // and in prefill
inline constexpr std::int32_t kRowTile = 128;
inline constexpr std::int32_t kPrefillRowTile = 512;
inline constexpr std::int32_t kMaxRows = std::max(kRowTile, kPrefillRowTile);
static_assert(kLanes == kPanel);
inline constexpr std::int16_t kOneBf16 = 0x3f80;

HWY_INLINE __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

HWY_INLINE std::int32_t step_tokens(const Shape& shape) { return shape.values_in_keys ? kStep : kPrefillStep; }

// An fp8_ds_mla key is staged as its values, which are scaled and rounded, its rope part, and its bytes as they are.
// Scores take what is exact: the rope part, and each group of bytes by itself, to be multiplied with its scale.
HWY_INLINE bool has_groups(const Shape& shape) { return shape.format == KvFormat::fp8_ds_mla; }

// Elements of a staged key, to a whole number of tile rows.
HWY_INLINE std::int32_t key_width(const Shape& shape) {
  return static_cast<std::int32_t>(round_up(shape.width + (has_groups(shape) ? shape.v_width : 0), kPair));
}

struct Scratch {
  std::uint16_t *q, *k[2], *v[2], *p;
  std::uint32_t* pairs;  // P^T of a cell of decode before it is turned into tiles, one or two tokens a word
  float *s[2], *o, *total_o, *row;
  float *scales, *part;                 // of keys with groups: [step][group], and scores of one group
  float *max_log2, *sum, *total_sum;    // sums of probabilities, for the LSE
  float *weight, *total_weight;         // and of what they were rounded to, which divides outputs
  float *lag, *lane_sum, *lane_weight;  // prefill's
  std::int32_t* bound;
  std::int64_t v_panel;  // elements between column panels: one cache line more than they need, to spread over sets

  Scratch(Carver& carver, std::int32_t rows, const Shape& shape) {
    const std::int32_t width = key_width(shape), v_width = shape.v_width;
    const std::int64_t padded = round_up(rows, 2 * kPanel);
    // Prefill has probabilities of one strip at a time (prefill-inl.hpp), decode of all rows.
    const bool decode = shape.values_in_keys;
    const std::int64_t step = step_tokens(shape);
    v_panel = step * kPanel + 32;
    q = carver.take<std::uint16_t>(padded * width);
    // Decode has one block of tokens at a time, prefill stages the next one beside it.
    for (std::uint16_t*& block : k) block = carver.take<std::uint16_t>(&block == k || !decode ? step * width : 0);
    for (std::uint16_t*& block : v)
      block = carver.take<std::uint16_t>(&block == v || !decode ? round_up(v_width, 2 * kPanel) / kPanel * v_panel : 0);
    p = carver.take<std::uint16_t>((decode ? std::max<std::int64_t>(padded, 4 * kPanel) : kStrip) * step);
    pairs = carver.take<std::uint32_t>(decode ? 2 * kPanel * kPanel : 0);
    for (float*& block : s) block = carver.take<float>(kStrip * kPair);
    scales = carver.take<float>(has_groups(shape) ? step * kDsMlaGroups : 0);
    part = carver.take<float>(has_groups(shape) ? kStrip * kPair : 0);
    o = carver.take<float>(padded * round_up(v_width, 2 * kPanel));
    total_o = carver.take<float>(padded * round_up(v_width, 2 * kPanel));
    row = carver.take<float>(std::max(width, 2 * kPair) + v_width);
    max_log2 = carver.take<float>(padded);
    sum = carver.take<float>(padded);
    total_sum = carver.take<float>(decode ? padded : 0);
    weight = carver.take<float>(padded);
    total_weight = carver.take<float>(decode ? padded : 0);
    lag = carver.take<float>(decode ? 0 : padded);
    lane_sum = carver.take<float>(decode ? 0 : padded * kPanel);
    lane_weight = carver.take<float>(decode ? 0 : padded * kPanel);
    bound = carver.take<std::int32_t>(padded);
  }
};

// Sixteen keys, `stride` elements apart: staged, or where they lie in the cache.
struct KeyTile {
  const std::uint16_t* data;
  std::int64_t stride;
};

// Up to a step of tokens on their way through the kernel. Decode has one in flight, prefill three.
struct Block {
  std::uint16_t* k;  // keys that could not be used in place
  std::uint16_t* v;  // value pairs
  std::int32_t first = 0, tokens = 0;
  std::int32_t extent[kMaxRows / (2 * kPanel)];  // tokens, in whole pairs of panels, that some row of two panels sees
  bool last[kMaxRows / (2 * kPanel)];            // whether none of their rows sees anything behind this block
  KeyTile keys[kStep / kPanel];

  std::int32_t padded() const { return static_cast<std::int32_t>(round_up(tokens, kPair)); }
};

// 32 tokens of a block for up to 32 rows.
struct Cell {
  Block* block = nullptr;
  std::int32_t panel = 0, rows = 0, t = 0;
  float* s = nullptr;  // decode: s[panel][32 tokens][16]; prefill: s[token panel][32 rows][16]

  static constexpr std::int64_t kTile = kPanel * kPanel;

  std::int32_t row() const { return panel * kPanel; }
  std::int32_t panels() const { return static_cast<std::int32_t>(ceil_div(rows, kPanel)); }
  std::int32_t first() const { return block->first + t; }
  bool ends_strip() const { return t + kPair >= block->extent[panel / 2]; }
};

struct Work {
  const Piece& piece;
  Scratch s;
  std::int32_t rows, panels, width;
  std::int32_t segments;  // of a key that scores take by themselves
  std::int32_t step;      // tokens of a block
  std::int32_t
      column_panels;    // of V and O, an even number; 16 columns are unused when v_width is an odd multiple of 16
  bool folded = false;  // the totals hold something

  // The columns of a segment: all of them, or the rope part and then the groups.
  std::int32_t segment_begin(std::int32_t i) const {
    return segments == 1 ? 0 : i == 0 ? kDsMlaLatent : segment_end(i - 1);
  }
  std::int32_t segment_end(std::int32_t i) const {
    return segments == 1 ? width : kDsMlaLatent + kDsMlaRope + i * kDsMlaGroup;
  }
  std::int32_t scored_width() const { return segments == 1 ? width : kDsMlaLatent + kDsMlaRope; }

  std::int32_t strips() const { return static_cast<std::int32_t>(ceil_div(panels, 2)); }
  std::int64_t o_panel(std::int32_t panel, std::int32_t column_panel) const {
    return (static_cast<std::int64_t>(panel) * column_panels + column_panel) * kPanel * kPanel;
  }
  // The finished output: the totals of a long piece, the running sums of a short one.
  const float* sums() const { return folded ? s.total_o : s.o; }
};

// Both products of prefill, for up to 32 rows and an even number of panels of columns:
//
//   c[row panel][column panel][16][16] (+)= a[depth / 32][row panel][16][32] . b[column panel][depth / 32][16][16][2]
struct Product {
  const std::uint16_t *a, *b;
  float* c;
  std::int64_t b_panel, c_row_panel, c_column_panel;  // elements between panels
  std::int32_t rows, column_panels, depth;
  bool add;
};

HWY_INLINE Work open_work(const Piece& piece, Carver& carver) {
  return {.piece = piece,
          .s = Scratch(carver, piece.rows(), piece.shape),
          .rows = piece.rows(),
          .panels = static_cast<std::int32_t>(ceil_div(piece.rows(), kPanel)),
          .width = key_width(piece.shape),
          .segments = has_groups(piece.shape) ? 1 + kDsMlaGroups : 1,
          .step = step_tokens(piece.shape),
          .column_panels = static_cast<std::int32_t>(round_up(piece.shape.v_width, 2 * kPanel) / kPanel)};
}

// Scores a cell of decode, segment by segment: score(segment, where its scores go) gives those of 32 tokens.
template <class Score>
HWY_INLINE void score_segments(const Work& w, const Cell& cell, const Score& score) {
  score(0, cell.s);
  for (std::int32_t segment = 1; segment < w.segments; ++segment) {
    score(segment, w.s.part);
    const float* scales = w.s.scales + cell.t * kDsMlaGroups + segment - 1;
    for (std::int32_t panel = 0; panel < cell.panels(); ++panel)
      for (std::int32_t t = 0; t < kPair; ++t) {
        const std::int32_t at = (panel * kPair + t) * kPanel;
        const __m512 scale = _mm512_set1_ps(scales[t * kDsMlaGroups]);
        _mm512_storeu_ps(cell.s + at,
                         _mm512_fmadd_ps(_mm512_loadu_ps(w.s.part + at), scale, _mm512_loadu_ps(cell.s + at)));
      }
  }
}

// Row r of o[panel][column panel][16][16]. Of 32 columns the first panel has every other group of four, as pair_up
// leaves them.
HWY_INLINE void gather_panels(const Work& w, std::int32_t r, float* row) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (std::int32_t c = 0; c < w.column_panels; c += 2) {
    const float* o = w.sums() + w.o_panel(r / kPanel, c) + r % kPanel * kPanel;
    const __m512 even = _mm512_load_ps(o), odd = _mm512_load_ps(o + kPanel * kPanel);
    _mm512_storeu_ps(row + c * kPanel, _mm512_permutex2var_ps(even, first, odd));
    _mm512_storeu_ps(row + (c + 1) * kPanel, _mm512_permutex2var_ps(even, second, odd));
  }
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
