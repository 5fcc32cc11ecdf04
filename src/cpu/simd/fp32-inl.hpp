// O = softmax(scale * Q K^T) V with fp32 multiply-adds, for any format, any width that is a multiple of 16, any target.
//
//   tokens --load--> k[step][W] fp32 --scores--> s[panel][step][lanes] --absorb--> the same, now P^T --accumulate--> o
//                                         ^ q[panel][W / 2][2][lanes], packed once per piece                  v ^
//
// Rows are lanes in `scores` (S^T = K Q^T: rows times a broadcast of the key) and broadcasts in `accumulate` (O = P V:
// columns times a broadcast probability), so P is never transposed. V is the first columns of the same block in decode
// and staged beside it in prefill.
//
// A key is broadcast two values at a time: even lanes take one, odd lanes the other, and the two vectors that hold a
// panel's rows share the broadcast. That is 10 loads for 16 multiply-adds; one value at a time would be 18, and loads
// were what limited it. The lanes are added up once, at the end.
//
// Registers: `scores` holds kTokens x 2 accumulators, `accumulate` kRows x 2. AVX-512: 16 of 32; AVX2: 8 of 16, which
// is just what two FMA ports with a latency of 4 need. Staged block: 64 x 576 x 4 B = 147 KB, in L2; prefill: 64 x (192
// + 128) x 4 B = 82 KB, and 256 rows beside it: q 196, s 66, o 131 KB.
#if defined(LATTE_CPU_FP32_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_INL_
#undef LATTE_CPU_FP32_INL_
#else
#define LATTE_CPU_FP32_INL_
#endif

#include <algorithm>

#include "hwy/highway.h"

#include "cpu/simd/convert-inl.hpp"
#include "cpu/simd/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

inline constexpr std::int32_t kStep = kKvBlock;                // tokens staged at a time
inline constexpr std::int32_t kTokens = kLanes >= 16 ? 8 : 4;  // tokens a register block of `scores`
inline constexpr std::int32_t kRows = kLanes >= 16 ? 8 : 4;    // rows a register block of `accumulate`
inline constexpr std::int32_t kRowTile = 64;
inline constexpr std::int32_t kPrefillRowTile = 256;
inline constexpr std::int32_t kPair = kLanes > 1 ? 2 : 1;  // key values a broadcast, vectors a panel in `scores`
static_assert(kStep % kTokens == 0);

struct Scratch {
  float *q, *k, *v, *s, *o, *total_o;
  float *max_log2, *sum, *total_sum, *factor;
  std::int32_t* bound;
  // Elements between staged tokens: one cache line more than they need, so that columns spread over sets.
  std::int64_t key_stride, value_stride;

  Scratch(Carver& carver, std::int32_t rows, const Shape& shape) {
    const std::int64_t padded = round_up(rows, kLanes);
    key_stride = shape.width + 16;
    value_stride = shape.values_in_keys ? key_stride : shape.v_width + 16;
    q = carver.take<float>(padded * shape.width);
    k = carver.take<float>(kStep * key_stride);
    v = shape.values_in_keys ? k : carver.take<float>(kStep * value_stride);
    s = carver.take<float>(padded * kStep);
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
  std::int32_t panel_begin = 0;  // panels in front see nothing of the block, nor of those behind it
  bool folded = false;           // the totals hold something
};

// q[panel][W / 2][2][lanes]: the rows, transposed in pairs of values. Rows past the end are zero and see everything, so
// they need no care later.
HWY_INLINE void pack_query(Work& w) {
  const QueryView& q = w.piece.q;
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  float* row = w.s.k;  // not in use yet
  for (std::int32_t r = 0; r < w.panels * kLanes; ++r) {
    float* dst = w.s.q + (r / kLanes) * static_cast<std::int64_t>(w.width) * kLanes + r % kLanes * kPair;
    if (r < w.rows) {
      const std::int64_t token = w.piece.token(r), head = w.piece.head(r);
      to_f32(q.nope + (token * q.nope_token_stride + head * q.nope_head_stride) * element, q.dtype, q.nope_width, row);
      to_f32(q.rope + (token * q.rope_token_stride + head * q.rope_head_stride) * element, q.dtype, q.rope_width,
             row + q.nope_width);
    } else {
      std::fill(row, row + w.width, 0.0f);
    }
    for (std::int32_t c = 0; c < w.width; c += kPair)
      for (std::int32_t i = 0; i < kPair; ++i) dst[c * kLanes + i] = row[c + i];
    w.s.bound[r] = r < w.rows ? w.piece.visible(r) : std::numeric_limits<std::int32_t>::max();
    w.s.max_log2[r] = kNegInf;
    w.s.sum[r] = 0;
  }
  std::fill(w.s.o, w.s.o + static_cast<std::int64_t>(w.rows) * w.v_width, 0.0f);
}

// Stages `tokens` tokens from `first` on; zero tokens fill up the last register block.
HWY_INLINE void load(Work& w, std::int32_t first, std::int32_t tokens) {
  const Piece& piece = w.piece;
  for (std::int32_t t = 0; t < tokens; ++t)
    token_to_f32(piece.keys.at(first + t), piece.shape.format, w.width, w.s.k + t * w.s.key_stride);
  if (!piece.shape.values_in_keys)
    for (std::int32_t t = 0; t < tokens; ++t)
      token_to_f32(piece.values.at(first + t), piece.shape.format, w.v_width, w.s.v + t * w.s.value_stride);
  for (std::int32_t t = tokens; t % kTokens != 0; ++t)
    std::fill(w.s.k + t * w.s.key_stride, w.s.k + t * w.s.key_stride + w.width, 0.0f);
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

// The two values' products of each row, side by side in two vectors, added up into one vector of rows.
HWY_INLINE VF32 join_pairs(const VF32 (&acc)[kPair]) {
#if HWY_TARGET == HWY_SCALAR
  return acc[0];
#else
  const F32 d;
  return hn::Add(hn::ConcatEven(d, acc[1], acc[0]), hn::ConcatOdd(d, acc[1], acc[0]));
#endif
}

// kTokens x kLanes of S^T.
HWY_INLINE void score_block(const float* HWY_RESTRICT k, std::int64_t key_stride, const float* HWY_RESTRICT q,
                            std::int32_t width, float* HWY_RESTRICT s) {
  const F32 d;
  VF32 acc[kTokens][kPair];
  for (auto& token : acc)
    for (VF32& a : token) a = hn::Zero(d);
  for (std::int32_t c = 0; c < width; c += kPair) {
    VF32 query[kPair];
    for (std::int32_t i = 0; i < kPair; ++i) query[i] = hn::LoadU(d, q + (c + i) * kLanes);
    HWY_UNROLL(8)
    for (std::int32_t t = 0; t < kTokens; ++t) {
      const auto key = broadcast_key(k + t * key_stride + c);
      for (std::int32_t i = 0; i < kPair; ++i) acc[t][i] = hn::MulAdd(key, query[i], acc[t][i]);
    }
  }
  for (std::int32_t t = 0; t < kTokens; ++t) hn::StoreU(join_pairs(acc[t]), d, s + t * kLanes);
}

HWY_INLINE void scores(Work& w, std::int32_t tokens) {
  for (std::int32_t t = 0; t < tokens; t += kTokens)
    for (std::int32_t p = w.panel_begin; p < w.panels; ++p)
      score_block(w.s.k + t * w.s.key_stride, w.s.key_stride, w.s.q + static_cast<std::int64_t>(p) * w.width * kLanes,
                  w.width, w.s.s + (p * kStep + t) * kLanes);
}

template <bool masked>
HWY_INLINE void absorb_panel(float* s, std::int32_t first, std::int32_t tokens, float scale_log2,
                             const PanelState& state) {
  const F32 d;
  const auto reference = finite_reference(state), scale = hn::Set(d, scale_log2);
  const auto bound = hn::LoadU(I32(), state.bound);
  auto sum = hn::Zero(d);
  for (std::int32_t t = 0; t < tokens; ++t) {
    auto p = exp2_vector(exponent(hn::LoadU(d, s + t * kLanes), scale, reference));
    if constexpr (masked) p = masked_out(p, first + t, bound, 0.0f);
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, s + t * kLanes);
  }
  hn::StoreU(hn::Add(sum, hn::LoadU(d, state.sum)), d, state.sum);
}

HWY_INLINE void rescale(float* row, std::int32_t count, float factor) {
  const F32 d;
  for (std::int32_t c = 0; c < count; c += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::Set(d, factor)), d, row + c);
}

// S^T -> P^T in place; rescales the outputs of rows whose reference rose.
HWY_INLINE void absorb(Work& w, std::int32_t first, std::int32_t tokens) {
  const float scale_log2 = w.piece.score_scale * kLog2e;
  for (std::int32_t p = w.panel_begin; p < w.panels; ++p) {
    const std::int32_t row = p * kLanes;
    float* s = w.s.s + static_cast<std::int64_t>(p) * kStep * kLanes;
    const PanelState state{w.s.max_log2 + row, w.s.sum + row, w.s.bound + row};
    const bool masked = needs_mask(state.bound, first + tokens);
    const auto maxima = panel_maxima(s, first, tokens, masked, state.bound);
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
      absorb_panel<true>(s, first, tokens, scale_log2, state);
    else
      absorb_panel<false>(s, first, tokens, scale_log2, state);
  }
}

// rows x (vectors x lanes) of O += P V.
template <std::int32_t rows, std::int32_t vectors>
HWY_INLINE void accumulate_block(const Work& w, std::int32_t row, std::int32_t column, std::int32_t tokens) {
  const F32 d;
  const float* p[rows];
  for (std::int32_t r = 0; r < rows; ++r)
    p[r] = w.s.s + static_cast<std::int64_t>((row + r) / kLanes) * kStep * kLanes + (row + r) % kLanes;
  float* o = w.s.o + static_cast<std::int64_t>(row) * w.v_width + column;
  const float* v = w.s.v + column;

  VF32 acc[rows][vectors];
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::LoadU(d, o + r * w.v_width + i * kLanes);
  for (std::int32_t t = 0; t < tokens; ++t) {
    VF32 value[vectors];
    for (std::int32_t i = 0; i < vectors; ++i) value[i] = hn::LoadU(d, v + t * w.s.value_stride + i * kLanes);
    HWY_UNROLL(8)
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto weight = hn::Set(d, p[r][t * kLanes]);
      for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::MulAdd(weight, value[i], acc[r][i]);
    }
  }
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) hn::StoreU(acc[r][i], d, o + r * w.v_width + i * kLanes);
}

// The last, smaller group of rows gets wider blocks, so that there are still enough accumulators to hide latency.
template <std::int32_t rows>
HWY_INLINE void accumulate_rows(const Work& w, std::int32_t row, std::int32_t tokens) {
  constexpr std::int32_t vectors = rows * 2 >= kRows ? 2 : 4;
  std::int32_t c = 0;
  for (; c + vectors * kLanes <= w.v_width; c += vectors * kLanes) accumulate_block<rows, vectors>(w, row, c, tokens);
  for (; c < w.v_width; c += kLanes) accumulate_block<rows, 1>(w, row, c, tokens);
}

template <std::int32_t rows>
HWY_INLINE void accumulate_tail(const Work& w, std::int32_t row, std::int32_t left, std::int32_t tokens) {
  if constexpr (rows > 0) {
    if (left == rows)
      accumulate_rows<rows>(w, row, tokens);
    else
      accumulate_tail<rows - 1>(w, row, left, tokens);
  }
}

HWY_INLINE void accumulate(const Work& w, std::int32_t tokens) {
  std::int32_t row = w.panel_begin * kLanes;
  for (; row + kRows <= w.rows; row += kRows) accumulate_rows<kRows>(w, row, tokens);
  accumulate_tail<kRows - 1>(w, row, w.rows - row, tokens);
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
         .v_width = piece.shape.v_width};
  pack_query(w);
  for (std::int32_t t = piece.record.kv_begin; t < piece.record.kv_end; t += kStep) {
    const std::int32_t tokens = std::min(kStep, piece.record.kv_end - t), done = t - piece.record.kv_begin;
    if (done > 0 && done % kFoldTokens == 0) fold_sums(w);
    w.panel_begin = skip_blind(w.s.bound, w.panel_begin, w.panels, t);
    load(w, t, tokens);
    scores(w, tokens);
    absorb(w, t, tokens);
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
