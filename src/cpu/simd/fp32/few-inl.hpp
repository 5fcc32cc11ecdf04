// The two matrix products of few rows; kernel-inl.hpp has their definition.
//
// Lanes are columns, in `scores` as in `accumulate`: no row is made up to fill a vector. Tokens are widened on their
// way into registers, by every four rows again, and never stored (except from fp8). What it costs is adding up lanes,
// some three instructions for a score.
//
//   scores:      s[token][row]  = lanes of (q[row][columns] . tokens[token][columns]), added up
//   accumulate:  o[row][column] += p[token][row] * tokens[token][column]
#if defined(LATTE_CPU_FP32_FEW_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_FEW_INL_
#undef LATTE_CPU_FP32_FEW_INL_
#else
#define LATTE_CPU_FP32_FEW_INL_
#endif

#include "cpu/simd/fp32/layout-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

// Row tiles that these products are for: some vectors of rows would have empty lanes. Sixteen rows fill one of
// AVX-512's; they are 5 to 13 % faster this way on a Zen 4, but by a count of instructions not where widening shares
// the ports of multiply-adds. From fp8, which is widened only once in either way, AVX2 wins with 6 rows and fewer.
HWY_INLINE bool are_few(const Shape& shape) {
  const std::int32_t most = kLanes > 8 ? 24 : kLanes == 1 ? 0 : kLanes == 8 && widens_once(shape.format) ? 6 : 12;
  return shape.row_tile <= most && shape.row_tile % kLanes != 0;
}

#if HWY_TARGET != HWY_SCALAR

inline constexpr std::int32_t kSums = kLanes == 8 ? 8 : 16;  // registers are 16 or 32

// Sums of the lanes of each vector, in their order. Each is added up in the same order, wherever it stands.
HWY_INLINE void add_lanes(const VF32 (&v)[kSums], float* HWY_RESTRICT sums) {
  const F32 d;
  VF32 four[kSums / 4];  // in every 128 bits the sums of four vectors' 128 bits
  for (std::int32_t i = 0; i < kSums; i += 4) {
    const auto even = hn::Add(hn::InterleaveLower(d, v[i], v[i + 2]), hn::InterleaveUpper(d, v[i], v[i + 2]));
    const auto odd = hn::Add(hn::InterleaveLower(d, v[i + 1], v[i + 3]), hn::InterleaveUpper(d, v[i + 1], v[i + 3]));
    four[i / 4] = hn::Add(hn::InterleaveLower(d, even, odd), hn::InterleaveUpper(d, even, odd));
  }
  const auto halves = [d](VF32 a, VF32 b) {
    return hn::Add(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
  };
  if constexpr (kLanes == 4) {
    for (std::int32_t i = 0; i < kSums / 4; ++i) hn::StoreU(four[i], d, sums + i * 4);
  } else if constexpr (kLanes == 8) {
    hn::StoreU(halves(four[0], four[1]), d, sums);
  } else {
    const auto even = halves(four[0], four[2]), odd = halves(four[1], four[3]);
    const auto first = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd), even);
    const auto second = hn::OddEvenBlocks(odd, hn::SwapAdjacentBlocks(even));
    hn::StoreU(hn::Add(first, second), d, sums);
  }
}

template <Dtype dtype>
HWY_INLINE VF32 load_columns(const std::byte* token, std::int32_t column) {
  if constexpr (dtype == Dtype::f32) return hn::LoadU(F32(), reinterpret_cast<const float*>(token) + column);
  const auto* p16 = reinterpret_cast<const std::uint16_t*>(token) + column;
  if constexpr (dtype == Dtype::f16) return load_f16(p16);
  return load_bf16(p16);
}

struct Few {
  static std::int64_t score_turns(const Work& w) {
    return for_each_group(w, 0, [&]<std::int32_t rows>(std::int32_t) {
      return kStep / tokens_of(rows) * ceil_div(w.width, kTurnColumns);
    });
  }
  static std::int64_t accumulate_turns(const Work& w) {
    return for_each_group(w, 0, [&]<std::int32_t rows>(std::int32_t) {
      return kStep / kTurnTokens * ceil_div(w.v_width, vectors_of(rows) * kLanes);
    });
  }

  // q[row][width]; rows past the end are zero. Their scores are whatever is left in s, and reach no other row.
  HWY_INLINE static void pack_query(Work& w) {
    const auto padded = static_cast<std::int64_t>(w.panels) * kLanes;
    for (std::int32_t r = 0; r < w.rows; ++r) query_to_f32(w, r, w.s.q + static_cast<std::int64_t>(r) * w.width);
    std::fill(w.s.q + w.rows * static_cast<std::int64_t>(w.width), w.s.q + padded * w.width, 0.0f);
    std::fill(w.s.s, w.s.s + kScores * w.s.rows, 0.0f);
  }

  HWY_NOINLINE static void scores(Work& w, std::int32_t tokens) {
    with_dtype(w, [&]<Dtype dtype>() {
      for_each_group(w, w.panel_begin * kLanes, [&]<std::int32_t rows>(std::int32_t row) {
        for (std::int32_t t = 0; t < tokens; t += tokens_of(rows)) score_block<dtype, rows>(w, row, t);
        return 0;
      });
    });
  }

  HWY_NOINLINE static void accumulate(Work& w, std::int32_t tokens) {
    with_dtype(w, [&]<Dtype dtype>() {
      for_each_group(w, w.panel_begin * kLanes, [&]<std::int32_t rows>(std::int32_t row) {
        constexpr std::int32_t vectors = vectors_of(rows);
        float* o = w.s.o + static_cast<std::int64_t>(row) * w.v_width;
        std::int32_t c = 0;
        const auto value = [&](std::int32_t t, std::int32_t i) __attribute__((always_inline)) {
          return load_columns<dtype>(w.values[t], c + i * kLanes);
        };
        for (; c + vectors * kLanes <= w.v_width; c += vectors * kLanes)
          accumulate_block<rows, vectors>(w, row, o + c, tokens, value);
        for (; c < w.v_width; c += kLanes) accumulate_block<rows, 1>(w, row, o + c, tokens, value);
        return 0;
      });
    });
  }

 private:
  static constexpr std::int32_t tokens_of(std::int32_t rows) { return kSums / rows; }
  static constexpr std::int32_t vectors_of(std::int32_t rows) { return std::min(kSums / rows, 8); }
  static_assert(kStep % kSums == 0);

  // Rows by four, then two, then one; three take a row of zeros along. Returns the sum of what `work` returns.
  template <class Group>
  HWY_INLINE static std::int64_t for_each_group(const Work& w, std::int32_t row, const Group& work) {
    std::int64_t sum = 0;
    for (; row + 2 < w.rows; row += 4) sum += work.template operator()<4>(row);
    if (row + 2 == w.rows) sum += work.template operator()<2>(row);
    if (row + 1 == w.rows) sum += work.template operator()<1>(row);
    return sum;
  }

  template <class Typed>
  HWY_INLINE static void with_dtype(const Work& w, const Typed& work) {
    switch (w.s.k != nullptr ? Dtype::f32 : kv_element_dtype(w.piece.shape.format)) {
      case Dtype::bf16: return work.template operator()<Dtype::bf16>();
      case Dtype::f16: return work.template operator()<Dtype::f16>();
      default: return work.template operator()<Dtype::f32>();
    }
  }

  template <Dtype dtype, std::int32_t rows>
  HWY_INLINE static void score_block(Work& w, std::int32_t row, std::int32_t first) {
    constexpr std::int32_t tokens = tokens_of(rows);
    const F32 d;
    const float* q = w.s.q + static_cast<std::int64_t>(row) * w.width;
    const std::byte* const* keys = w.keys + first;
    VF32 acc[kSums];
    for (VF32& a : acc) a = hn::Zero(d);
    for (std::int32_t c = 0; c < w.width;) {
      for (const std::int32_t end = std::min(c + kTurnColumns, w.width); c < end; c += kLanes) {
        VF32 query[rows];
        for (std::int32_t r = 0; r < rows; ++r) query[r] = hn::LoadU(d, q + r * w.width + c);
        HWY_UNROLL(16)
        for (std::int32_t t = 0; t < tokens; ++t) {
          const auto key = load_columns<dtype>(keys[t], c);
          for (std::int32_t r = 0; r < rows; ++r) acc[t * rows + r] = hn::MulAdd(key, query[r], acc[t * rows + r]);
        }
      }
      w.ahead.lines(w.lines);
    }
    float sums[kSums];
    add_lanes(acc, sums);
    float* s = w.s.s + first * w.s.rows + row;
    for (std::int32_t t = 0; t < tokens; ++t, s += w.s.rows) std::memcpy(s, sums + t * rows, rows * sizeof(float));
  }
};

#endif

}  // namespace latte::cpu::HWY_NAMESPACE::fp32
HWY_AFTER_NAMESPACE();

#endif
