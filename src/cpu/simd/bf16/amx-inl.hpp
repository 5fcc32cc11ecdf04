// The two matrix products with AMX tiles; kernel-inl.hpp has their definition.
#pragma once

#include "cpu/simd/bf16/softmax-inl.hpp"
#include "cpu/simd/bf16/tiles-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Tiles 0-3 accumulate a 2 x 2 block, 4 and 5 hold the row operand, 6 one column operand after the other: four loads
// for four products, the fewest that eight tiles allow, and one tile left alone on purpose. The processor renames
// tiles, but beside a busy sibling hardware thread it has few to rename to; a product took 28 ns there with all eight
// in use, 20 with seven and 14 with four, and 7 in every case when the sibling was idle (docs/kernels/amx.md).
template <class Tiles>
struct Amx {
  static constexpr Probabilities kProbabilities = Probabilities::paired;

  // 32 tokens x 32 rows, to s and to s + s_panel.
  template <class Aside>
  HWY_INLINE static void score_2x2(const Work& w, const Block& block, std::int32_t t, std::int32_t panel, float* s,
                                   std::int64_t s_panel, const Aside& aside) {
    const std::int64_t q_panel = static_cast<std::int64_t>(w.width) * kPanel;
    const auto [k0, stride0] = block.keys[t / kPanel];
    const auto [k1, stride1] = block.keys[t / kPanel + 1];
    const std::uint16_t* q = w.s.q + panel * q_panel;
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
    Tiles::template store<1>(s + s_panel);
    Tiles::template store<2>(s + kPanel * kPanel);
    Tiles::template store<3>(s + s_panel + kPanel * kPanel);
  }

  // 32 tokens x 16 rows, for the last panel of an odd number.
  template <class Aside>
  HWY_INLINE static void score_2x1(const Work& w, const Block& block, std::int32_t t, std::int32_t panel, float* s,
                                   const Aside& aside) {
    const auto [k0, stride0] = block.keys[t / kPanel];
    const auto [k1, stride1] = block.keys[t / kPanel + 1];
    const std::uint16_t* q = w.s.q + static_cast<std::int64_t>(panel) * w.width * kPanel;
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
    // Narrow rows in groups of 64, so that a group's queries and 32 keys stay in L1 together.
    const std::int32_t rows = w.width <= kNarrow ? 4 : w.panels;
    for (std::int32_t group = 0; group < w.panels; group += rows)
      for (std::int32_t t = 0; t < block.tokens; t += 2 * kPanel)
        for (std::int32_t panel = group; panel < std::min(group + rows, w.panels); panel += 2) {
          if (t >= block.extent[panel / 2]) continue;
          float* s = block.s + (static_cast<std::int64_t>(panel) * kStep + t) * kPanel;
          score_cell(w, block, t, panel, s, kStep * kPanel, aside);
        }
  }

  // Two panels, or the last one.
  template <class Aside>
  HWY_INLINE static void score_cell(const Work& w, const Block& block, std::int32_t t, std::int32_t panel, float* s,
                                    std::int64_t s_panel, const Aside& aside) {
    if (panel + 2 <= w.panels)
      score_2x2(w, block, t, panel, s, s_panel, aside);
    else
      score_2x1(w, block, t, panel, s, aside);
  }

  static constexpr std::int32_t kNarrow = 192;               // elements of a key
  static constexpr std::int32_t kTile = kPanel * kPair;      // elements of a tile of p or v
  static constexpr std::int32_t kOutTile = kPanel * kPanel;  // elements of a tile of o

  // 32 rows x 32 columns.
  template <class Aside>
  HWY_INLINE static void accumulate_2x2(const Work& w, const Block& block, std::int32_t panel, std::int32_t column,
                                        const std::uint16_t* p, const Aside& aside) {
    const std::int64_t p_panel = static_cast<std::int64_t>(kPanel) * w.step, o_panel = w.o_panel(1, 0);
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    float* o = w.s.o + w.o_panel(panel, column);
    Tiles::template load<0>(o, 64);
    Tiles::template load<1>(o + kOutTile, 64);
    Tiles::template load<2>(o + o_panel, 64);
    Tiles::template load<3>(o + o_panel + kOutTile, 64);
    const std::int32_t end = block.extent[panel / 2];
    for (std::int32_t t = 0; t < end; t += kPair, v += kTile, p += kTile) {
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
                                        const std::uint16_t* p, const Aside& aside) {
    const std::uint16_t* v = block.v + column * w.s.v_panel;
    float* o = w.s.o + w.o_panel(panel, column);
    Tiles::template load<0>(o, 64);
    Tiles::template load<1>(o + kOutTile, 64);
    const std::int32_t end = block.extent[panel / 2];
    for (std::int32_t t = 0; t < end; t += kPair, v += kTile, p += kTile) {
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

  // Two panels, or the last one, and two column panels.
  template <class Aside>
  HWY_INLINE static void accumulate_strip(const Work& w, const Block& block, std::int32_t panel, std::int32_t column,
                                          const std::uint16_t* p, const Aside& aside) {
    if (panel + 2 <= w.panels)
      accumulate_2x2(w, block, panel, column, p, aside);
    else
      accumulate_1x2(w, block, panel, column, p, aside);
  }

  // Rows in groups of 64, so that a group's probabilities and two column panels of V stay in L1 together.
  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    constexpr std::int32_t kGroup = 4;
    for (std::int32_t group = 0; group < w.panels; group += kGroup) {
      const std::int32_t end = std::min(group + kGroup, w.panels);
      for (std::int32_t column = 0; column < w.column_panels; column += 2) {
        for (std::int32_t panel = group; panel < end; panel += 2)
          if (block.extent[panel / 2] > 0)
            accumulate_strip(w, block, panel, column, w.s.p + static_cast<std::int64_t>(panel) * kPanel * kStep, aside);
      }
    }
  }

  template <int number>
  HWY_INLINE static void begin(const Product& product, const float* c) {
    if (product.add)
      Tiles::template load<number>(c, 64);
    else
      Tiles::template zero<number>();
  }

  // Prefill's products, with four tiles. That is three loads for two products; beside a busy sibling a loop of them is
  // faster than one of 2 x 2, and the kernel not slower (docs/kernels/prefill_cpu.md).
  template <class Aside>
  HWY_INLINE static void multiply(const Product& product, const Aside& aside) {
    if (product.rows > kPanel) {
      for (std::int32_t column = 0; column < product.column_panels; ++column) {
        const std::uint16_t *a = product.a, *b = product.b + column * product.b_panel;
        float* c = product.c + column * product.c_column_panel;
        begin<0>(product, c);
        begin<1>(product, c + product.c_row_panel);
        for (std::int32_t t = 0; t < product.depth; t += kPair, a += 2 * kTile, b += kTile) {
          Tiles::template load<6>(b, 64);
          Tiles::template load<4>(a, 64);
          Tiles::template multiply<0, 4>();
          Tiles::template load<4>(a + kTile, 64);
          Tiles::template multiply<1, 4>();
          aside();
        }
        Tiles::template store<0>(c);
        Tiles::template store<1>(c + product.c_row_panel);
      }
    } else {
      for (std::int32_t column = 0; column < product.column_panels; column += 2) {
        const std::uint16_t *a = product.a, *b = product.b + column * product.b_panel;
        float* c = product.c + column * product.c_column_panel;
        begin<0>(product, c);
        begin<1>(product, c + product.c_column_panel);
        for (std::int32_t t = 0; t < product.depth; t += kPair, a += 2 * kTile, b += kTile) {
          Tiles::template load<4>(a, 64);
          Tiles::template load<6>(b, 64);
          Tiles::template multiply<0, 4>();
          Tiles::template load<6>(b + product.b_panel, 64);
          Tiles::template multiply<1, 4>();
          aside();
        }
        Tiles::template store<0>(c);
        Tiles::template store<1>(c + product.c_column_panel);
      }
    }
  }
  static std::int32_t turns(const Product& product) {
    return (product.rows > kPanel ? 2 : 1) * product.column_panels / 2 * (product.depth / kPair);
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
      for (std::int32_t t = 0; t < std::min(block.tokens, block.extent[0]); t += kPanel, p += 2 * Wide::kTile) {
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
      const float* even = w.sums() + w.o_panel(0, column) + r * kPanel;
      for (std::int32_t i = 0; i < kPanel; ++i) {
        row[column * kPanel + 2 * i] = even[i];
        row[column * kPanel + 2 * i + 1] = even[Wide::kOutTile + i];
      }
    }
  }
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
