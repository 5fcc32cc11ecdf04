// O = softmax(scale * Q K^T) V with fp32 multiply-adds, for any format, any width that is a multiple of 16, any target.
//
//   tokens --widen--> [24][192] fp32 --scores--> s[64 tokens][rows] --absorb--> the same, now P^T
//                      ^ q[panel][W / 2][2][lanes], packed once per piece                  v
//   tokens --widen--> [64][64] fp32 ----------------------------------------------> accumulate --> o
//
// Rows are lanes in `scores` (S^T = K Q^T: rows times a broadcast of the key) and broadcasts in `accumulate` (O = P V:
// columns times a broadcast probability), so P is never transposed. V is the first columns of the same tokens in decode
// and a tensor of its own in prefill.
//
// Tokens are widened to fp32 some columns at a time, just before all rows use them, and once more when they are V: what
// is in flight then stays in L1. A whole block in fp32 goes to L2 and back, which takes longer than widening it twice,
// except from fp8.
//
// A key is broadcast two values at a time: even lanes take one, odd lanes the other, and the two vectors that hold a
// panel's rows share the broadcast. That is 10 loads for 16 multiply-adds; one value at a time would be 18, and loads
// were what limited it. The lanes are added up once for all columns at hand.
//
// Registers: `scores` holds kTokens x 2 accumulators, `accumulate` kRows x 2. AVX-512: 16 of 32; AVX2: 12 of 16, two
// FMA ports with a latency of 4 need 8. L1: widened tokens 18 KB, their columns of a panel of q 12 KB. L2, beside the
// tokens themselves, for 64 rows: q 147, s 20, o 131 KB; prefill's 256 rows: 196, 70, 131 KB; from fp8 k 152 KB more.
#if defined(LATTE_CPU_FP32_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_INL_
#undef LATTE_CPU_FP32_INL_
#else
#define LATTE_CPU_FP32_INL_
#endif

#include <algorithm>

#include "hwy/highway.h"

#include "cpu/prefetch.hpp"
#include "cpu/simd/convert-inl.hpp"
#include "cpu/simd/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

inline constexpr std::int32_t kStep = kKvBlock;                // tokens of a block
inline constexpr std::int32_t kTokens = kLanes >= 16 ? 8 : 6;  // tokens a register block of `scores`
inline constexpr std::int32_t kRows = kLanes >= 16 ? 8 : 6;    // rows a register block of `accumulate`
inline constexpr std::int32_t kRowTile = 64;
inline constexpr std::int32_t kPrefillRowTile = 256;
inline constexpr std::int32_t kPair = kLanes > 1 ? 2 : 1;  // key values a broadcast, vectors a panel in `scores`

// What is widened at a time: a whole number of register blocks of keys, or the values of a whole block, whose sums are
// then loaded and stored once.
inline constexpr std::int32_t kKeys = 24, kKeyColumns = 192;
inline constexpr std::int32_t kValueColumns = 64;
static_assert(kKeys % kTokens == 0 && kKeyColumns % 16 == 0 && kValueColumns % 16 == 0);

// Lines are fetched a few at a time, at every turn of so many columns of a register block of `scores`, or tokens of one
// of `accumulate`: of what is asked for faster than memory can give it, the processor drops a part.
inline constexpr std::int32_t kTurnColumns = 64, kTurnTokens = 16;
inline constexpr std::int32_t kWide = std::max(kKeyColumns * kKeys, kValueColumns* kStep);
inline constexpr std::int32_t kScores = static_cast<std::int32_t>(round_up(kStep, kTokens));  // of a row

// Formats that take long to widen, and targets that hide little, do it once: a whole block, through L2.
HWY_INLINE bool widens_once(KvFormat format) {
  return HWY_TARGET == HWY_SCALAR || format == KvFormat::fp8_e4m3 || format == KvFormat::fp8_ds_mla;
}

struct Scratch {
  float *q, *wide, *k = nullptr, *v = nullptr, *s, *o, *total_o;
  float *max_log2, *sum, *total_sum, *factor;
  std::int32_t* bound;
  std::int64_t rows;                      // of s: a cache line more than there are, to spread over sets
  std::int64_t key_stride, value_stride;  // of k and v, likewise

  Scratch(Carver& carver, std::int32_t piece_rows, const Shape& shape) {
    const std::int64_t padded = round_up(piece_rows, kLanes);
    q = carver.take<float>(padded * shape.width);
    wide = carver.take<float>(std::max(kWide, shape.width));
    key_stride = shape.width + 16;
    value_stride = shape.values_in_keys ? key_stride : shape.v_width + 16;
    if (widens_once(shape.format)) {
      k = carver.take<float>(kScores * key_stride);
      v = shape.values_in_keys ? k : carver.take<float>(kStep * value_stride);
    }
    rows = padded + 16;
    s = carver.take<float>(kScores * rows);
    o = carver.take<float>(padded * shape.v_width);
    total_o = carver.take<float>(padded * shape.v_width);
    max_log2 = carver.take<float>(padded);
    sum = carver.take<float>(padded);
    total_sum = carver.take<float>(padded);
    factor = carver.take<float>(padded);
    bound = carver.take<std::int32_t>(padded);
  }
};

struct Work {
  const Piece& piece;
  Scratch s;
  std::int32_t rows, panels, width, v_width;
  Prefetch ahead;          // of the next block, half of it with the scores and half with the values
  std::int32_t lines = 0;  // at every turn of their loops
  const std::byte *keys[kStep], *values[kStep];  // the tokens of the block
  std::int32_t panel_begin = 0;                  // panels in front see nothing of the block, nor of those behind it
  bool folded = false;                           // the totals hold something
};

// q[panel][W / 2][2][lanes]: the rows, transposed in pairs of values; of a panel's two vectors one holds the even rows
// and one the odd ones. Rows past the end are zero and see everything, so they need no care later.
HWY_INLINE void pack_query(Work& w) {
  const QueryView& q = w.piece.q;
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  const std::int64_t panel = static_cast<std::int64_t>(w.width) * kLanes;
  float* row = w.s.wide;  // not in use yet
  std::fill(w.s.q + (w.panels - 1) * panel, w.s.q + w.panels * panel, 0.0f);
  for (std::int32_t r = 0; r < w.rows; ++r) {
    float* dst = w.s.q + r / kLanes * panel + r % kPair * kLanes + r % kLanes / kPair * kPair;
    const std::int64_t token = w.piece.token(r), head = w.piece.head(r);
    to_f32(q.nope + (token * q.nope_token_stride + head * q.nope_head_stride) * element, q.dtype, q.nope_width, row);
    to_f32(q.rope + (token * q.rope_token_stride + head * q.rope_head_stride) * element, q.dtype, q.rope_width,
           row + q.nope_width);
    for (std::int32_t c = 0; c < w.width; c += kPair)
      for (std::int32_t i = 0; i < kPair; ++i) dst[c * kLanes + i] = row[c + i];
  }
  for (std::int32_t r = 0; r < w.panels * kLanes; ++r) {
    w.s.bound[r] = r < w.rows ? w.piece.visible(r) : std::numeric_limits<std::int32_t>::max();
    w.s.max_log2[r] = kNegInf;
    w.s.sum[r] = 0;
  }
  std::fill(w.s.o, w.s.o + static_cast<std::int64_t>(w.rows) * w.v_width, 0.0f);
}

// Finds the tokens of the block that starts with `first`, and widens them if that is done once.
HWY_NOINLINE void open(Work& w, std::int32_t first, std::int32_t tokens) {
  const Shape& shape = w.piece.shape;
  for (std::int32_t t = 0; t < tokens; ++t) {
    w.keys[t] = w.piece.keys.at(first + t);
    w.values[t] = shape.values_in_keys ? w.keys[t] : w.piece.values.at(first + t);
  }
  if (w.s.k == nullptr) return;
  for (std::int32_t t = 0; t < tokens; ++t) token_to_f32(w.keys[t], shape.format, w.width, w.s.k + t * w.s.key_stride);
  if (!shape.values_in_keys)
    for (std::int32_t t = 0; t < tokens; ++t)
      token_to_f32(w.values[t], shape.format, w.v_width, w.s.v + t * w.s.value_stride);
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

// Tokens that fill up the last register block are whatever lies there: nobody reads their scores.
HWY_NOINLINE void scores(Work& w, std::int32_t tokens) {
  for (std::int32_t first = 0; first < tokens; first += kKeys) {
    const std::int32_t count = std::min(kKeys, tokens - first);
    for (std::int32_t c = 0; c < w.width; c += kKeyColumns) {
      const std::int32_t columns = std::min(kKeyColumns, w.width - c);
      const Wide k = wide_keys(w, first, count, c, columns);
      for (std::int32_t p = w.panel_begin; p < w.panels; ++p)
        for (std::int32_t t = 0; t < count; t += kTokens)
          score_block(w, k.data + t * k.stride, k.stride, w.s.q + (static_cast<std::int64_t>(p) * w.width + c) * kLanes,
                      columns, c > 0, w.s.s + (first + t) * w.s.rows + p * kLanes);
    }
  }
}

template <bool masked>
HWY_INLINE void absorb_panel(float* s, std::int64_t rows, std::int32_t first, std::int32_t tokens, float scale_log2,
                             const PanelState& state) {
  const F32 d;
  const auto reference = finite_reference(state), scale = hn::Set(d, scale_log2);
  const auto bound = hn::LoadU(I32(), state.bound);
  auto sum = hn::Zero(d);
  for (std::int32_t t = 0; t < tokens; ++t) {
    auto p = exp2_vector(exponent(hn::LoadU(d, s + t * rows), scale, reference));
    if constexpr (masked) p = masked_out(p, first + t, bound, 0.0f);
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, s + t * rows);
  }
  hn::StoreU(hn::Add(sum, hn::LoadU(d, state.sum)), d, state.sum);
}

HWY_INLINE void rescale(float* row, std::int32_t count, float factor) {
  const F32 d;
  for (std::int32_t c = 0; c < count; c += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::Set(d, factor)), d, row + c);
}

// S^T -> P^T in place; rescales the outputs of rows whose reference rose.
HWY_NOINLINE void absorb(Work& w, std::int32_t first, std::int32_t tokens) {
  const float scale_log2 = w.piece.score_scale * kLog2e;
  for (std::int32_t p = w.panel_begin; p < w.panels; ++p) {
    const std::int32_t row = p * kLanes;
    float* s = w.s.s + row;
    const PanelState state{w.s.max_log2 + row, w.s.sum + row, w.s.bound + row};
    const bool masked = needs_mask(state.bound, first + tokens);
    const auto maxima = panel_maxima(s, w.s.rows, first, tokens, masked, state.bound);
    if (raise_panel(maxima, scale_log2, state, w.s.factor + row))
      for (std::int32_t r = row; r < std::min(row + kLanes, w.rows); ++r) {
        const float factor = w.s.factor[r];
        if (factor == 1.0f) continue;
        rescale(w.s.o + static_cast<std::int64_t>(r) * w.v_width, w.v_width, factor);
        if (!w.folded) continue;
        rescale(w.s.total_o + static_cast<std::int64_t>(r) * w.v_width, w.v_width, factor);
        w.s.total_sum[r] *= factor;
      }
    if (masked)
      absorb_panel<true>(s, w.s.rows, first, tokens, scale_log2, state);
    else
      absorb_panel<false>(s, w.s.rows, first, tokens, scale_log2, state);
  }
}

// rows x (vectors x lanes) of O += P V.
template <std::int32_t rows, std::int32_t vectors>
HWY_INLINE void accumulate_block(Work& w, std::int32_t row, Wide from, float* HWY_RESTRICT o, std::int32_t tokens) {
  const F32 d;
  const float *p = w.s.s + row, *v = from.data;
  VF32 acc[rows][vectors];
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::LoadU(d, o + r * w.v_width + i * kLanes);
  for (std::int32_t t = 0; t < tokens;) {
    const std::int32_t end = std::min(t + kTurnTokens, tokens);
    for (; t < end; ++t, v += from.stride, p += w.s.rows) {
      VF32 value[vectors];
      for (std::int32_t i = 0; i < vectors; ++i) value[i] = hn::LoadU(d, v + i * kLanes);
      HWY_UNROLL(8)
      for (std::int32_t r = 0; r < rows; ++r) {
        const auto weight = hn::Set(d, p[r]);
        for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::MulAdd(weight, value[i], acc[r][i]);
      }
    }
    w.ahead.lines(w.lines);
  }
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) hn::StoreU(acc[r][i], d, o + r * w.v_width + i * kLanes);
}

// The last group of rows gets wider blocks if it is small, so that there are more accumulators to hide latency.
constexpr std::int32_t vectors_of(std::int32_t rows) { return rows * 2 >= kRows ? 2 : 4; }

template <std::int32_t rows>
HWY_INLINE void accumulate_rows(Work& w, std::int32_t row, Wide v, std::int32_t column, std::int32_t columns,
                                std::int32_t tokens) {
  constexpr std::int32_t vectors = vectors_of(rows);
  float* o = w.s.o + static_cast<std::int64_t>(row) * w.v_width + column;
  std::int32_t c = 0;
  for (; c + vectors * kLanes <= columns; c += vectors * kLanes)
    accumulate_block<rows, vectors>(w, row, {v.data + c, v.stride}, o + c, tokens);
  for (; c < columns; c += kLanes) accumulate_block<rows, 1>(w, row, {v.data + c, v.stride}, o + c, tokens);
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

HWY_NOINLINE void accumulate(Work& w, std::int32_t tokens) {
  for (std::int32_t c = 0; c < w.v_width; c += kValueColumns) {
    const std::int32_t columns = std::min(kValueColumns, w.v_width - c);
    const Wide v = wide_values(w, tokens, c, columns);
    std::int32_t row = w.panel_begin * kLanes;
    for (; row + kRows <= w.rows; row += kRows) accumulate_rows<kRows>(w, row, v, c, columns, tokens);
    accumulate_tail<kRows - 1>(w, row, w.rows - row, v, c, columns, tokens);
  }
}

HWY_INLINE void fold_sums(Work& w) {
  fold(w.s.total_o, w.s.o, static_cast<std::int64_t>(w.rows) * w.v_width, !w.folded);
  fold(w.s.total_sum, w.s.sum, w.panels * kLanes, !w.folded);
  w.folded = true;
}

HWY_NOINLINE void run(const Piece& piece) {
  Carver carver(piece.scratch);
  Work w{.piece = piece,
         .s = Scratch(carver, piece.rows(), piece.shape),
         .rows = piece.rows(),
         .panels = static_cast<std::int32_t>(ceil_div(piece.rows(), kLanes)),
         .width = piece.shape.width,
         .v_width = piece.shape.v_width,
         .ahead = {piece.keys, row_bytes(piece.shape.format, piece.shape.width)}};
  pack_query(w);
  const std::int32_t key_lines =
      w.ahead.share(kStep / 2, std::int64_t{w.panels} * (kScores / kTokens) * ceil_div(w.width, kTurnColumns));
  const auto blocks = [&](std::int32_t rows) { return ceil_div(w.v_width, vectors_of(rows) * kLanes); };
  const std::int32_t tail = w.rows % kRows;
  const std::int64_t value_blocks = w.rows / kRows * blocks(kRows) + (tail > 0 ? blocks(tail) : 0);
  const std::int32_t value_lines = w.ahead.share(kStep / 2, value_blocks * (kStep / kTurnTokens));
  for (std::int32_t t = piece.record.kv_begin; t < piece.record.kv_end; t += kStep) {
    const std::int32_t tokens = std::min(kStep, piece.record.kv_end - t), done = t - piece.record.kv_begin;
    if (done > 0 && done % kFoldTokens == 0) fold_sums(w);
    w.panel_begin = skip_blind(w.s.bound, w.panel_begin, w.panels, t);
    open(w, t, tokens);
    if (piece.shape.values_in_keys) w.ahead.aim(t + kStep, std::min(t + 2 * kStep, piece.record.kv_end));
    w.lines = key_lines;
    scores(w, tokens);
    absorb(w, t, tokens);
    w.lines = value_lines;
    accumulate(w, tokens);
  }
  if (w.folded) fold_sums(w);
  const float* sum = w.folded ? w.s.total_sum : w.s.sum;
  const float* o = w.folded ? w.s.total_o : w.s.o;
  finish_rows(piece, 0, piece.rows(), {w.s.max_log2, sum, sum},
              [&](std::int32_t r) { return o + static_cast<std::int64_t>(r) * w.v_width; });
}

std::size_t scratch_bytes(const Shape& shape) {
  Carver carver;
  Scratch(carver, shape.row_tile, shape);
  return carver.used();
}

// Independent multiply-adds on registers: the most this target's fp32 units can do.
HWY_NOINLINE double burn(double seconds) {
  const F32 d;
  constexpr std::int32_t kChains = 12, kRounds = 4096;
  VF32 acc[kChains];
  for (std::int32_t i = 0; i < kChains; ++i) acc[i] = hn::Set(d, 1.0f + static_cast<float>(i));
  const auto a = hn::Set(d, 0.999999f), b = hn::Set(d, 1e-6f);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (std::int32_t n = 0; n < kRounds; ++n) {
      HWY_UNROLL(12)
      for (std::int32_t i = 0; i < kChains; ++i) acc[i] = hn::MulAdd(acc[i], a, b);
    }
    operations += 2.0 * kChains * kRounds * kLanes;
  }
  auto sum = acc[0];
  for (std::int32_t i = 1; i < kChains; ++i) sum = hn::Add(sum, acc[i]);
  keep(hn::GetLane(sum));
  return operations;
}

}  // namespace latte::cpu::HWY_NAMESPACE::fp32
HWY_AFTER_NAMESPACE();

#endif
