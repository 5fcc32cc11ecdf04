// The two matrix products of many rows; kernel-inl.hpp has their definition.
//
//   tokens --widen--> [24][192] fp32 --scores--> s[64 tokens][rows]
//                      ^ q[panel][W / 2][2][lanes]
//   tokens --widen--> [64][64] fp32 --accumulate--> o
//
// Rows are lanes in `scores` (S^T = K Q^T: rows times a broadcast of the key) and broadcasts in `accumulate` (O = P V:
// columns times a broadcast probability), so P is never transposed.
//
// Tokens are widened to fp32 some columns at a time, just before all rows use them, and once more when they are V: what
// is in flight then stays in L1. A whole block in fp32 goes to L2 and back, which takes longer than widening it twice,
// except from fp8.
//
// A key is broadcast two values at a time: even lanes take one, odd lanes the other, and the two vectors that hold a
// panel's rows share the broadcast. That is 10 loads for 16 multiply-adds; one value at a time would be 18, and loads
// were what limited it. The lanes are added up once for all columns at hand.
#if defined(LATTE_CPU_FP32_MANY_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_MANY_INL_
#undef LATTE_CPU_FP32_MANY_INL_
#else
#define LATTE_CPU_FP32_MANY_INL_
#endif

#include "cpu/simd/fp32/layout-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

// q[panel][W / 2][2][lanes]: the rows, transposed in pairs of values; of a panel's two vectors one holds the even rows
// and one the odd ones. Rows past the end are zero.
HWY_INLINE void pack_pairs(Work& w) {
  const std::int64_t panel = static_cast<std::int64_t>(w.width) * kLanes;
  float* row = w.s.wide;  // not in use yet
  std::fill(w.s.q + (w.panels - 1) * panel, w.s.q + w.panels * panel, 0.0f);
  for (std::int32_t r = 0; r < w.rows; ++r) {
    float* dst = w.s.q + r / kLanes * panel + r % kPair * kLanes + r % kLanes / kPair * kPair;
    query_to_f32(w, r, row);
    for (std::int32_t c = 0; c < w.width; c += kPair)
      for (std::int32_t i = 0; i < kPair; ++i) dst[c * kLanes + i] = row[c + i];
  }
}

// Some columns of some tokens in fp32.
struct Wide {
  const float* data;
  std::int64_t stride;
};

HWY_INLINE Wide widen(const Work& w, const std::byte* const* tokens, std::int32_t count, std::int32_t begin,
                      std::int32_t columns) {
  const Dtype dtype = kv_element_dtype(w.piece.shape.format);
  const auto offset = begin * static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int32_t t = 0; t < count; ++t) to_f32(tokens[t] + offset, dtype, columns, w.s.wide + t * columns);
  return {w.s.wide, columns};
}
HWY_INLINE Wide wide_keys(const Work& w, std::int32_t first, std::int32_t count, std::int32_t begin,
                          std::int32_t columns) {
  if (w.s.k != nullptr) return {w.s.k + first * w.s.key_stride + begin, w.s.key_stride};
  return widen(w, w.keys + first, count, begin, columns);
}
HWY_INLINE Wide wide_values(const Work& w, std::int32_t count, std::int32_t begin, std::int32_t columns) {
  if (w.s.v != nullptr) return {w.s.v + begin, w.s.value_stride};
  return widen(w, w.values, count, begin, columns);
}

// kPair consecutive values of a key in every pair of lanes.
HWY_INLINE VF32 broadcast_key(const float* key) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(F32(), *key);
#else
  std::uint64_t pair;
  std::memcpy(&pair, key, sizeof(pair));
  return hn::BitCast(F32(), hn::Set(hn::Repartition<std::uint64_t, F32>(), pair));
#endif
}

// The two values' products, added up: of the even rows and the odd ones one vector of all.
HWY_INLINE VF32 join_pairs(const VF32 (&acc)[kPair]) {
#if HWY_TARGET == HWY_SCALAR
  return acc[0];
#else
  return hn::Add(hn::OddEven(hn::DupEven(acc[1]), acc[0]), hn::OddEven(acc[1], hn::DupOdd(acc[0])));
#endif
}

// kTokens x kLanes of S^T (+)= some columns of K Q^T.
HWY_INLINE void score_block(Work& w, const float* HWY_RESTRICT k, std::int64_t stride, const float* HWY_RESTRICT q,
                            std::int32_t columns, bool add, float* HWY_RESTRICT s) {
  const F32 d;
  VF32 acc[kTokens][kPair];
  for (auto& token : acc)
    for (VF32& a : token) a = hn::Zero(d);
  for (std::int32_t c = 0; c < columns;) {
    const std::int32_t end = std::min(c + kTurnColumns, columns);
    for (; c < end; c += kPair) {
      VF32 query[kPair];
      for (std::int32_t i = 0; i < kPair; ++i) query[i] = hn::LoadU(d, q + (c + i) * kLanes);
      HWY_UNROLL(8)
      for (std::int32_t t = 0; t < kTokens; ++t) {
        const auto key = broadcast_key(k + t * stride + c);
        for (std::int32_t i = 0; i < kPair; ++i) acc[t][i] = hn::MulAdd(key, query[i], acc[t][i]);
      }
    }
    w.ahead.lines(w.lines);
  }
  for (std::int32_t t = 0; t < kTokens; ++t) {
    const auto sum = join_pairs(acc[t]);
    hn::StoreU(add ? hn::Add(hn::LoadU(d, s + t * w.s.rows), sum) : sum, d, s + t * w.s.rows);
  }
}

// The last group of rows gets wider blocks if it is small, so that there are more accumulators to hide latency.
constexpr std::int32_t vectors_of(std::int32_t rows) { return rows * 2 >= kRows ? 2 : 4; }

template <std::int32_t rows>
HWY_INLINE void accumulate_rows(Work& w, std::int32_t row, Wide v, std::int32_t column, std::int32_t columns,
                                std::int32_t tokens) {
  constexpr std::int32_t vectors = vectors_of(rows);
  float* o = w.s.o + static_cast<std::int64_t>(row) * w.v_width + column;
  std::int32_t c = 0;
  const auto value = [&](std::int32_t t, std::int32_t i) __attribute__((always_inline)) {
    return hn::LoadU(F32(), v.data + t * v.stride + c + i * kLanes);
  };
  for (; c + vectors * kLanes <= columns; c += vectors * kLanes)
    accumulate_block<rows, vectors>(w, row, o + c, tokens, value);
  for (; c < columns; c += kLanes) accumulate_block<rows, 1>(w, row, o + c, tokens, value);
}

template <std::int32_t rows>
HWY_INLINE void accumulate_tail(Work& w, std::int32_t row, std::int32_t left, Wide v, std::int32_t column,
                                std::int32_t columns, std::int32_t tokens) {
  if constexpr (rows > 0) {
    if (left == rows)
      accumulate_rows<rows>(w, row, v, column, columns, tokens);
    else
      accumulate_tail<rows - 1>(w, row, left, v, column, columns, tokens);
  }
}

struct Many {
  static std::int64_t score_turns(const Work& w) {
    return std::int64_t{w.panels} * (kScores / kTokens) * ceil_div(w.width, kTurnColumns);
  }
  static std::int64_t accumulate_turns(const Work& w) {
    const auto blocks = [&](std::int32_t rows) { return ceil_div(w.v_width, vectors_of(rows) * kLanes); };
    const std::int32_t tail = w.rows % kRows;
    return (w.rows / kRows * blocks(kRows) + (tail > 0 ? blocks(tail) : 0)) * (kStep / kTurnTokens);
  }

  HWY_INLINE static void pack_query(Work& w) { pack_pairs(w); }

  // Tokens that fill up the last register block are whatever lies there: nobody reads their scores.
  HWY_NOINLINE static void scores(Work& w, std::int32_t tokens) {
    for (std::int32_t first = 0; first < tokens; first += kKeys) {
      const std::int32_t count = std::min(kKeys, tokens - first);
      for (std::int32_t c = 0; c < w.width; c += kKeyColumns) {
        const std::int32_t columns = std::min(kKeyColumns, w.width - c);
        const Wide k = wide_keys(w, first, count, c, columns);
        for (std::int32_t p = w.panel_begin; p < w.panels; ++p)
          for (std::int32_t t = 0; t < count; t += kTokens)
            score_block(w, k.data + t * k.stride, k.stride,
                        w.s.q + (static_cast<std::int64_t>(p) * w.width + c) * kLanes, columns, c > 0,
                        w.s.s + (first + t) * w.s.rows + p * kLanes);
      }
    }
  }

  HWY_NOINLINE static void accumulate(Work& w, std::int32_t tokens) {
    for (std::int32_t c = 0; c < w.v_width; c += kValueColumns) {
      const std::int32_t columns = std::min(kValueColumns, w.v_width - c);
      const Wide v = wide_values(w, tokens, c, columns);
      std::int32_t row = w.panel_begin * kLanes;
      for (; row + kRows <= w.rows; row += kRows) accumulate_rows<kRows>(w, row, v, c, columns, tokens);
      accumulate_tail<kRows - 1>(w, row, w.rows - row, v, c, columns, tokens);
    }
  }
};

}  // namespace latte::cpu::HWY_NAMESPACE::fp32
HWY_AFTER_NAMESPACE();

#endif
