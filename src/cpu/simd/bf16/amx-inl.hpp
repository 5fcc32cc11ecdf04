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
class Amx {
 public:
  static constexpr Queries kQueries = Queries::paired;
  static constexpr bool kPairsValues = true;
  static constexpr Probabilities kProbabilities = Probabilities::paired;
  static constexpr std::int32_t kTile = kPanel * kPair;      // elements of a tile of p or v
  static constexpr std::int32_t kOutTile = kPanel * kPanel;  // elements of a tile of sums

  // Without the first of each segment.
  static std::int32_t score_turns(const Work& w) { return std::max(w.scored_width() / kPair - w.segments, 1); }
  static std::int32_t fetch_turns(const Work& w) { return score_turns(w); }
  static std::int32_t accumulate_turns(const Work& w) { return w.strips() * (w.column_panels / 2) * (w.step / kPair); }

  // The scores are stored behind the next cell's first loads, or by finish(): storing tiles whose products are under
  // way would keep the next ones waiting.
  template <class Aside>
  HWY_INLINE void score(const Work& w, const Cell& cell, Aside& aside) {
    score_segments(
        w, cell, [&](std::int32_t segment, float* s) __attribute__((always_inline)) {
          score_segment(w, cell, segment, s, aside);
          if (w.segments > 1) finish();  // its scores are wanted now
        });
  }

  template <class Aside>
  HWY_INLINE void score_segment(const Work& w, const Cell& cell, std::int32_t segment, float* s, Aside& aside) {
    const KeyTile* keys = cell.block->keys + cell.t / kPanel;
    const std::int64_t q_panel = static_cast<std::int64_t>(w.width) * kPanel;
    const std::uint16_t* q = w.s.q + cell.panel * q_panel;
    const std::int32_t first = w.segment_begin(segment), end = w.segment_end(segment);
    if (cell.panels() == 2) {
      const auto turn = [&](std::int32_t c, const auto& begin) __attribute__((always_inline)) {
        Tiles::template load<4>(keys[0].data + c, keys[0].stride * 2);
        Tiles::template load<5>(keys[1].data + c, keys[1].stride * 2);
        multiply_2x2(q + c * kPanel, q + q_panel + c * kPanel, begin);
      };
      turn(
          first, [&]<int tile>() __attribute__((always_inline)) {
            store_late<tile>();
            Tiles::template zero<tile>();
          });
      if (segment == 0) aside.begin();
      for (std::int32_t c = first + kPair; c < end; c += kPair) {
        turn(c, nothing);
        aside.step();
        aside.fetch();
      }
      late(s, s + kPair * kPanel, s + kOutTile, s + kPair * kPanel + kOutTile);
    } else {
      finish();
      if (segment == 0) aside.begin();
      score_panel(keys, first, end, aside,
                  [&](std::int32_t c) { Tiles::template load_passing<6>(q + c * kPanel, 64); });
      Tiles::template store<0>(s);
      Tiles::template store<1>(s + kOutTile);
    }
  }

  // 32 tokens x 16 rows, in tiles 0 and 1. `load_query` has those of 32 of the width come into tile 6.
  template <class Aside, class LoadQuery>
  HWY_INLINE static void score_panel(const KeyTile* keys, std::int32_t first, std::int32_t end, Aside& aside,
                                     const LoadQuery& load_query) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    for (std::int32_t c = first; c < end; c += kPair) {
      load_query(c);
      Tiles::template load<4>(keys[0].data + c, keys[0].stride * 2);
      Tiles::template multiply<0, 4, 6>();
      Tiles::template load<4>(keys[1].data + c, keys[1].stride * 2);
      Tiles::template multiply<1, 4, 6>();
      aside.step();
      aside.fetch();
    }
  }

  // By 32 rows, whose probabilities stay in L1 while values pass by.
  template <class Aside>
  HWY_INLINE void accumulate(const Work& w, const Block& block, const Aside& aside) {
    for (std::int32_t panel = 0; panel < w.panels; panel += 2)
      for (std::int32_t column = 0; column < w.column_panels; column += 2)
        accumulate_strip(w, block, panel, column, aside);
    finish();
  }

  // Stores what is not stored yet.
  HWY_INLINE void finish() {
    store_late<0>();
    store_late<1>();
    store_late<2>();
    store_late<3>();
    late_[0] = nullptr;
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
          Tiles::template multiply<0, 4, 6>();
          Tiles::template load<4>(a + kTile, 64);
          Tiles::template multiply<1, 4, 6>();
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
          Tiles::template multiply<0, 4, 6>();
          Tiles::template load<6>(b + product.b_panel, 64);
          Tiles::template multiply<1, 4, 6>();
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

 private:
  static constexpr auto nothing = []<int tile>() {};

  // Tiles 4 and 5 times two more, one after the other. `begin` makes a tile of sums ready.
  template <class Begin>
  HWY_INLINE static void multiply_2x2(const std::uint16_t* b0, const std::uint16_t* b1, const Begin& begin) {
    Tiles::template load_passing<6>(b0, 64);
    begin.template operator()<0>();
    Tiles::template multiply<0, 4, 6>();
    begin.template operator()<2>();
    Tiles::template multiply<2, 5, 6>();
    Tiles::template load_passing<6>(b1, 64);
    begin.template operator()<1>();
    Tiles::template multiply<1, 4, 6>();
    begin.template operator()<3>();
    Tiles::template multiply<3, 5, 6>();
  }

  template <int number>
  HWY_INLINE static void begin(const Product& product, const float* c) {
    if (product.add)
      Tiles::template load<number>(c, 64);
    else
      Tiles::template zero<number>();
  }

  // Two panels of rows, or the last one, and two column panels.
  template <class Aside>
  HWY_INLINE void accumulate_strip(const Work& w, const Block& block, std::int32_t panel, std::int32_t column,
                                   const Aside& aside) {
    const std::int32_t end = block.extent[panel / 2];
    if (end == 0) return;
    const std::int64_t p_panel = static_cast<std::int64_t>(kPanel) * w.step;
    const std::uint16_t *p = w.s.p + panel * p_panel, *v = block.v + column * w.s.v_panel;
    float* o = w.s.o + w.o_panel(panel, column);
    if (panel + 2 <= w.panels) {
      const std::int32_t lines = 2 * kPanel * kPair / end;  // of two tiles, at every turn
      float* const sums[4] = {o, o + kOutTile, o + w.o_panel(1, 0), o + w.o_panel(1, 0) + kOutTile};
      const auto turn = [&](std::int32_t t, const auto& begin) __attribute__((always_inline)) {
        Tiles::template load<4>(p + t * kPanel, 64);
        Tiles::template load<5>(p + p_panel + t * kPanel, 64);
        multiply_2x2(v + t * kPanel, v + w.s.v_panel + t * kPanel, begin);
        // The sums of the next columns, which would come from L2 just when they are needed.
        const float* next = o + (2 * kOutTile + t / kPair * lines * kPanel);
        for (std::int32_t i = 0; i < lines; ++i) {
          _mm_prefetch(reinterpret_cast<const char*>(next + i * kPanel), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(next + w.o_panel(1, 0) + i * kPanel), _MM_HINT_T0);
        }
        aside();
      };
      turn(
          0, [&]<int tile>() __attribute__((always_inline)) {
            store_late<tile>();
            Tiles::template load<tile>(sums[tile], 64);
          });
      for (std::int32_t t = kPair; t < end; t += kPair) turn(t, nothing);
      late(sums[0], sums[1], sums[2], sums[3]);
    } else {
      finish();
      Tiles::template load<0>(o, 64);
      Tiles::template load<1>(o + kOutTile, 64);
      for (std::int32_t t = 0; t < end; t += kPair) {
        Tiles::template load<4>(p + t * kPanel, 64);
        Tiles::template load_passing<6>(v + t * kPanel, 64);
        Tiles::template multiply<0, 4, 6>();
        Tiles::template load_passing<6>(v + w.s.v_panel + t * kPanel, 64);
        Tiles::template multiply<1, 4, 6>();
        aside();
      }
      Tiles::template store<0>(o);
      Tiles::template store<1>(o + kOutTile);
    }
  }

  // Where the sums in tiles 0 to 3 will go.
  void late(float* s0, float* s1, float* s2, float* s3) { late_[0] = s0, late_[1] = s1, late_[2] = s2, late_[3] = s3; }
  template <int tile>
  HWY_INLINE void store_late() {
    if (late_[0] != nullptr) Tiles::template store<tile>(late_[tile]);
  }
  float* late_[4] = {};
};

// One panel of rows, values read where they lie.
template <class Tiles>
struct AmxNarrow {
  using Wide = Amx<Tiles>;
  static constexpr Queries kQueries = Queries::paired;
  static constexpr bool kPairsValues = false;
  static constexpr Probabilities kProbabilities = Probabilities::spread;

  static std::int32_t score_turns(const Work& w) { return w.scored_width() / kPair; }
  static std::int32_t fetch_turns(const Work& w) { return score_turns(w); }
  static std::int32_t accumulate_turns(const Work& w) { return w.column_panels / 2 * (w.step / kPanel); }
  static void finish() {}

  template <class Aside>
  HWY_INLINE static void score(const Work& w, const Cell& cell, Aside& aside) {
    aside.begin();
    score_segments(
        w, cell, [&](std::int32_t segment, float* s) __attribute__((always_inline)) {
          // All of the queries fit L1.
          Wide::score_panel(cell.block->keys + cell.t / kPanel, w.segment_begin(segment), w.segment_end(segment), aside,
                            [&](std::int32_t c) { Tiles::template load<6>(w.s.q + c * kPanel, 64); });
          Tiles::template store<0>(s);
          Tiles::template store<1>(s + Wide::kOutTile);
        });
  }

  template <class Aside>
  HWY_INLINE static void accumulate(const Work& w, const Block& block, const Aside& aside) {
    const std::int32_t end = std::min(block.tokens, block.extent[0]);
    for (std::int32_t column = 0; column < w.column_panels; column += 2) {
      const std::uint16_t* p = w.s.p;
      float* o = w.s.o + w.o_panel(0, column);
      Tiles::template load<0>(o, 64);
      Tiles::template load<1>(o + Wide::kOutTile, 64);
      for (std::int32_t t = 0; t < end; t += kPanel, p += 2 * Wide::kTile) {
        const auto [values, stride] = block.keys[t / kPanel];
        Tiles::template load<6>(values + column * kPanel, stride * 2);
        Tiles::template load<4>(p, 64);
        Tiles::template multiply<0, 4, 6>();
        Tiles::template load<4>(p + Wide::kTile, 64);
        Tiles::template multiply<1, 4, 6>();
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
