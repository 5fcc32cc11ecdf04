// The two matrix products of the bf16 kernels: once with AVX-512 BF16 dot products, once with AMX tiles. Both compute
//   scores:      s[panel][token][16]          = k[token][width] . q[panel][width / 2][16][2]
//   accumulate:  o[panel][column][16][16]    += p[panel][token / 32][16][32] . v[column][token / 2][16][2]
// in the same order along the inner dimension, so a row's bits do not depend on the rows beside it.
// AmxNarrow, for row tiles of 16, leaves V unpaired:
//   accumulate:  o[column / 2][even, odd][16][16] += p[token / 16][even, odd][16][16][2] . keys[token][2 columns]
// Compiled for one target only, so once.
#pragma once

#include "cpu/simd/bf16-inl.hpp"
#include "cpu/simd/tiles-inl.hpp"

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16,amx-tile,amx-bf16")
namespace latte::cpu::HWY_NAMESPACE::bf16 {

HWY_INLINE __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Row r of o[panel][column panel][16][16].
HWY_INLINE void gather_panels(const Work& w, std::int32_t r, float* row) {
  for (std::int32_t c = 0; c < w.column_panels; ++c)
    std::copy_n(w.s.o + w.o_panel(r / kPanel, c) + r % kPanel * kPanel, kPanel, row + c * kPanel);
}

HWY_INLINE __m512i broadcast_pair(const std::uint16_t* pair) {
  std::int32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Register blocks of 8 tokens (or rows) x 2 panels: 16 accumulators, 2 operands and a broadcast of 32 registers.
struct Avx512 {
  static constexpr Probabilities kProbabilities = Probabilities::paired;
  static constexpr std::int32_t kBlock = 8;

  template <std::int32_t panels>
  HWY_INLINE static void score_block(const Work& w, const Block& block, std::int32_t t, std::int32_t panel) {
    const KeyTile& tile = block.keys[t / kPanel];
    const std::uint16_t* k = tile.data + t % kPanel * tile.stride;
    const std::uint16_t* q = w.s.q + static_cast<std::int64_t>(panel) * w.width * kPanel;
    const std::int64_t q_panel = static_cast<std::int64_t>(w.width) * kPanel;
    float* s = block.s + (static_cast<std::int64_t>(panel) * kStep + t) * kPanel;
    __m512 acc[kBlock][panels];
    for (auto& token : acc)
      for (__m512& a : token) a = _mm512_setzero_ps();
    for (std::int32_t c = 0; c < w.width; c += 2) {
      __m512i query[panels];
      for (std::int32_t p = 0; p < panels; ++p) query[p] = _mm512_loadu_si512(q + p * q_panel + c * kPanel);
      HWY_UNROLL(8)
      for (std::int32_t i = 0; i < kBlock; ++i) {
        const __m512i key = broadcast_pair(k + i * tile.stride + c);
        for (std::int32_t p = 0; p < panels; ++p) acc[i][p] = dot_pairs(acc[i][p], query[p], key);
      }
    }
    for (std::int32_t i = 0; i < kBlock; ++i)
      for (std::int32_t p = 0; p < panels; ++p) _mm512_storeu_ps(s + (p * kStep + i) * kPanel, acc[i][p]);
  }

  static std::int32_t score_turns(const Work& w) {
    return kStep / kBlock * static_cast<std::int32_t>(ceil_div(w.panels, 2));
  }
  static std::int32_t accumulate_turns(const Work& w) { return static_cast<std::int32_t>(ceil_div(w.rows, kBlock)); }

  template <class Aside>
  HWY_INLINE static void scores(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t t = 0; t < block.tokens; t += kBlock)
      for (std::int32_t panel = 0; panel < w.panels; panel += 2) {
        if (panel + 2 <= w.panels)
          score_block<2>(w, block, t, panel);
        else
          score_block<1>(w, block, t, panel);
        aside();
      }
  }

  template <std::int32_t rows, std::int32_t columns>
  HWY_INLINE static void accumulate_block(const Work& w, const Block& block, std::int32_t row, std::int32_t column) {
    const std::int32_t panel = row / kPanel;
    float* o = w.s.o + w.o_panel(panel, column) + row % kPanel * kPanel;
    const std::uint16_t* p = w.s.p + static_cast<std::int64_t>(panel) * kPanel * kStep + row % kPanel * kPair;
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    __m512 acc[rows][columns];
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) acc[r][c] = _mm512_loadu_ps(o + (c * kPanel + r) * kPanel);
    for (std::int32_t t = 0; t < block.tokens; t += kPair, p += kPanel * kPair)
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
    for (std::int32_t r = 0; r < rows; ++r)
      for (std::int32_t c = 0; c < columns; ++c) _mm512_storeu_ps(o + (c * kPanel + r) * kPanel, acc[r][c]);
  }

  // Fewer rows than a block get wider blocks, so that there are accumulators enough to hide the latency.
  template <std::int32_t rows>
  HWY_INLINE static void accumulate_rows(const Work& w, const Block& block, std::int32_t row, std::int32_t left) {
    if constexpr (rows > 0) {
      if (left < rows) return accumulate_rows<rows - 1>(w, block, row, left);
      constexpr std::int32_t columns = rows > 3 ? 2 : 4;
      std::int32_t column = 0;
      for (; column + columns <= w.column_panels; column += columns)
        accumulate_block<rows, columns>(w, block, row, column);
      for (; column < w.column_panels; ++column) accumulate_block<rows, 1>(w, block, row, column);
    }
  }

  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t row = 0; row < w.rows; row += kBlock) {
      accumulate_rows<kBlock>(w, block, row, w.rows - row);
      aside();
    }
  }

  HWY_INLINE static void gather_row(const Work& w, std::int32_t r, float* row) { gather_panels(w, r, row); }
};

// Tiles 0-3 accumulate a 2 x 2 block, 4 and 5 hold the row operand, 6 one column operand after the other: four loads
// for four products, the fewest that eight tiles allow, and one tile left alone on purpose. The processor renames
// tiles, but beside a busy sibling hardware thread it has few to rename to; a product took 28 ns there with all eight
// in use, 20 with seven and 14 with four, and 7 in every case when the sibling was idle (docs/kernels/amx.md).
template <class Tiles>
struct Amx {
  static constexpr Probabilities kProbabilities = Probabilities::paired;

  // 32 tokens x 32 rows.
  template <class Aside>
  HWY_INLINE static void score_2x2(const Work& w, const Block& block, std::int32_t t, std::int32_t panel,
                                   const Aside& aside) {
    const std::int64_t q_panel = static_cast<std::int64_t>(w.width) * kPanel;
    const auto [k0, stride0] = block.keys[t / kPanel];
    const auto [k1, stride1] = block.keys[t / kPanel + 1];
    const std::uint16_t* q = w.s.q + panel * q_panel;
    float* s = block.s + (static_cast<std::int64_t>(panel) * kStep + t) * kPanel;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (std::int32_t c = 0; c < w.width; c += kPair) {
      Tiles::template load<4>(k0 + c, stride0 * 2);
      Tiles::template load<5>(k1 + c, stride1 * 2);
      Tiles::template load<6>(q + c * kPanel, 64);
      Tiles::template multiply<0, 4>();
      Tiles::template multiply<2, 5>();
      Tiles::template load<6>(q + q_panel + c * kPanel, 64);
      Tiles::template multiply<1, 4>();
      Tiles::template multiply<3, 5>();
      aside();
    }
    Tiles::template store<0>(s);
    Tiles::template store<1>(s + kStep * kPanel);
    Tiles::template store<2>(s + kPanel * kPanel);
    Tiles::template store<3>(s + (kStep + kPanel) * kPanel);
  }

  // 32 tokens x 16 rows, for the last panel of an odd number.
  template <class Aside>
  HWY_INLINE static void score_2x1(const Work& w, const Block& block, std::int32_t t, std::int32_t panel,
                                   const Aside& aside) {
    const auto [k0, stride0] = block.keys[t / kPanel];
    const auto [k1, stride1] = block.keys[t / kPanel + 1];
    const std::uint16_t* q = w.s.q + static_cast<std::int64_t>(panel) * w.width * kPanel;
    float* s = block.s + (static_cast<std::int64_t>(panel) * kStep + t) * kPanel;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    for (std::int32_t c = 0; c < w.width; c += kPair) {
      Tiles::template load<6>(q + c * kPanel, 64);
      Tiles::template load<4>(k0 + c, stride0 * 2);
      Tiles::template multiply<0, 4>();
      Tiles::template load<4>(k1 + c, stride1 * 2);
      Tiles::template multiply<1, 4>();
      aside();
    }
    Tiles::template store<0>(s);
    Tiles::template store<1>(s + kPanel * kPanel);
  }

  static std::int32_t score_turns(const Work& w) {
    return static_cast<std::int32_t>(ceil_div(w.panels, 2)) * (kStep / 32) * (w.width / kPair);
  }
  static std::int32_t accumulate_turns(const Work& w) {
    return static_cast<std::int32_t>(ceil_div(w.panels, 2)) * (w.column_panels / 2) * (kStep / kPair);
  }

  template <class Aside>
  HWY_INLINE static void scores(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t t = 0; t < block.tokens; t += 2 * kPanel) {
      std::int32_t panel = 0;
      for (; panel + 2 <= w.panels; panel += 2) score_2x2(w, block, t, panel, aside);
      if (panel < w.panels) score_2x1(w, block, t, panel, aside);
    }
  }

  static constexpr std::int32_t kTile = kPanel * kPair;      // elements of a tile of p or v
  static constexpr std::int32_t kOutTile = kPanel * kPanel;  // elements of a tile of o

  // 32 rows x 32 columns.
  template <class Aside>
  HWY_INLINE static void accumulate_2x2(const Work& w, const Block& block, std::int32_t panel, std::int32_t column,
                                        const Aside& aside) {
    const std::int64_t p_panel = static_cast<std::int64_t>(kPanel) * kStep, o_panel = w.o_panel(1, 0);
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    const std::uint16_t* p = w.s.p + panel * p_panel;
    float* o = w.s.o + w.o_panel(panel, column);
    Tiles::template load<0>(o, 64);
    Tiles::template load<1>(o + kOutTile, 64);
    Tiles::template load<2>(o + o_panel, 64);
    Tiles::template load<3>(o + o_panel + kOutTile, 64);
    for (std::int32_t t = 0; t < block.tokens; t += kPair, v += kTile, p += kTile) {
      Tiles::template load<4>(p, 64);
      Tiles::template load<5>(p + p_panel, 64);
      Tiles::template load<6>(v, 64);
      Tiles::template multiply<0, 4>();
      Tiles::template multiply<2, 5>();
      Tiles::template load<6>(v + w.s.v_panel, 64);
      Tiles::template multiply<1, 4>();
      Tiles::template multiply<3, 5>();
      aside();
    }
    Tiles::template store<0>(o);
    Tiles::template store<1>(o + kOutTile);
    Tiles::template store<2>(o + o_panel);
    Tiles::template store<3>(o + o_panel + kOutTile);
  }

  // 16 rows x 32 columns, for the last panel of an odd number. Column panels come in pairs, not always in fours.
  template <class Aside>
  HWY_INLINE static void accumulate_1x2(const Work& w, const Block& block, std::int32_t panel, std::int32_t column,
                                        const Aside& aside) {
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    const std::uint16_t* p = w.s.p + static_cast<std::int64_t>(panel) * kPanel * kStep;
    float* o = w.s.o + w.o_panel(panel, column);
    Tiles::template load<0>(o, 64);
    Tiles::template load<1>(o + kOutTile, 64);
    for (std::int32_t t = 0; t < block.tokens; t += kPair, v += kTile, p += kTile) {
      Tiles::template load<4>(p, 64);
      Tiles::template load<6>(v, 64);
      Tiles::template multiply<0, 4>();
      Tiles::template load<6>(v + w.s.v_panel, 64);
      Tiles::template multiply<1, 4>();
      aside();
    }
    Tiles::template store<0>(o);
    Tiles::template store<1>(o + kOutTile);
  }

  // Rows in groups of 64, so that a group's probabilities and two column panels of V stay in L1 together.
  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    constexpr std::int32_t kGroup = 4;
    for (std::int32_t group = 0; group < w.panels; group += kGroup) {
      const std::int32_t end = std::min(group + kGroup, w.panels), paired = end / 2 * 2;
      for (std::int32_t column = 0; column < w.column_panels; column += 2) {
        for (std::int32_t panel = group; panel < paired; panel += 2) accumulate_2x2(w, block, panel, column, aside);
        if (paired < end) accumulate_1x2(w, block, paired, column, aside);
      }
    }
  }

  HWY_INLINE static void gather_row(const Work& w, std::int32_t r, float* row) { gather_panels(w, r, row); }
};

// One panel of rows, values read where they lie.
template <class Tiles>
struct AmxNarrow {
  using Wide = Amx<Tiles>;
  static constexpr Probabilities kProbabilities = Probabilities::spread;

  static std::int32_t score_turns(const Work& w) { return Wide::score_turns(w); }
  static std::int32_t accumulate_turns(const Work& w) { return w.column_panels / 2 * (kStep / kPanel); }

  template <class Aside>
  HWY_INLINE static void scores(const Work& w, const Block& block, const Aside& aside) {
    Wide::scores(w, block, aside);
  }

  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t column = 0; column < w.column_panels; column += 2) {
      const std::uint16_t* p = w.s.p;
      float* o = w.s.o + w.o_panel(0, column);
      Tiles::template load<0>(o, 64);
      Tiles::template load<1>(o + Wide::kOutTile, 64);
      for (std::int32_t t = 0; t < block.tokens; t += kPanel, p += 2 * Wide::kTile) {
        const auto [values, stride] = block.keys[t / kPanel];
        Tiles::template load<6>(values + column * kPanel, stride * 2);
        Tiles::template load<4>(p, 64);
        Tiles::template multiply<0, 4>();
        Tiles::template load<4>(p + Wide::kTile, 64);
        Tiles::template multiply<1, 4>();
        aside();
      }
      Tiles::template store<0>(o);
      Tiles::template store<1>(o + Wide::kOutTile);
    }
  }

  HWY_INLINE static void gather_row(const Work& w, std::int32_t r, float* row) {
    for (std::int32_t column = 0; column < w.column_panels; column += 2) {
      const float* even = w.s.o + w.o_panel(0, column) + r * kPanel;
      for (std::int32_t i = 0; i < kPanel; ++i) {
        row[column * kPanel + 2 * i] = even[i];
        row[column * kPanel + 2 * i + 1] = even[Wide::kOutTile + i];
      }
    }
  }
};

HWY_NOINLINE void run_avx512(const Piece& piece) { run_with<Avx512>(piece); }

// Chosen by the plan's row tile, which follows from heads and limits, not by the rows of this piece.
template <class Tiles>
HWY_NOINLINE void run_amx(const Piece& piece) {
  if (piece.call.plan->work_meta_data[kMetaRowTile] <= kPanel)
    run_with<AmxNarrow<Tiles>>(piece);
  else
    run_with<Amx<Tiles>>(piece);
}

// Products on registers alone: the most the units can do.
HWY_NOINLINE double burn_avx512(double seconds) {
  constexpr int kChains = 12, kRounds = 4096;
  __m512 acc[kChains];
  for (__m512& a : acc) a = _mm512_setzero_ps();
  const __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3c23);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (int n = 0; n < kRounds; ++n) {
      HWY_UNROLL(12)
      for (int i = 0; i < kChains; ++i) acc[i] = dot_pairs(acc[i], a, b);
    }
    operations += 2.0 * 32 * kChains * kRounds;
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  keep(_mm512_cvtss_f32(acc[0]));
  return operations;
}

HWY_NOINLINE double burn_amx(double seconds) {
  constexpr int kRounds = 2048;
  alignas(64) std::uint16_t ones[kPanel * kPair];
  std::fill(std::begin(ones), std::end(ones), std::uint16_t{0x3c23});
  HardwareTiles::enter();
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (int n = 0; n < kRounds; ++n) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    operations += 2.0 * 4 * kRounds * kPanel * kPanel * kPair;
  }
  alignas(64) float out[kPanel * kPanel];
  _tile_stored(0, out, 64);
  keep(out[0]);
  HardwareTiles::leave();
  return operations;
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
