// What lies where in the fp32 kernel's scratch, and the blocks of tokens that go through it.
#if defined(LATTE_CPU_FP32_LAYOUT_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_FP32_LAYOUT_INL_
#undef LATTE_CPU_FP32_LAYOUT_INL_
#else
#define LATTE_CPU_FP32_LAYOUT_INL_
#endif

#include <algorithm>

#include "hwy/highway.h"

#include "cpu/prefetch.hpp"
#include "cpu/simd/convert-inl.hpp"
#include "cpu/simd/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE::fp32 {

inline constexpr std::int32_t kStep = kKvBlock;  // tokens of a block
inline constexpr std::int32_t kRowTile = 64;
inline constexpr std::int32_t kPrefillRowTile = 256;

// Many rows: what one register block of `scores` and of `accumulate` takes.
inline constexpr std::int32_t kTokens = kLanes >= 16 ? 8 : 6;
inline constexpr std::int32_t kRows = kLanes >= 16 ? 8 : 6;
inline constexpr std::int32_t kPair = kLanes > 1 ? 2 : 1;  // key values a broadcast, vectors a panel in `scores`

// And what is widened at a time: a whole number of register blocks of keys, or the values of a whole block, whose sums
// are then loaded and stored once.
inline constexpr std::int32_t kKeys = 24, kKeyColumns = 192;
inline constexpr std::int32_t kValueColumns = 64;
static_assert(kKeys % kTokens == 0 && kKeyColumns % 16 == 0 && kValueColumns % 16 == 0);
inline constexpr std::int32_t kWide = std::max(kKeyColumns * kKeys, kValueColumns* kStep);

// Lines are fetched a few at a time, at every turn of so many columns of a register block of `scores`, or tokens of one
// of `accumulate`: of what is asked for faster than memory can give it, the processor drops a part.
inline constexpr std::int32_t kTurnColumns = 64, kTurnTokens = 16;
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

// A row's query in fp32.
HWY_INLINE void query_to_f32(const Work& w, std::int32_t r, float* row) {
  const QueryView& q = w.piece.q;
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  const std::int64_t token = w.piece.token(r), head = w.piece.head(r);
  to_f32(q.nope + (token * q.nope_token_stride + head * q.nope_head_stride) * element, q.dtype, q.nope_width, row);
  to_f32(q.rope + (token * q.rope_token_stride + head * q.rope_head_stride) * element, q.dtype, q.rope_width,
         row + q.nope_width);
}

// Finds the tokens of the block that starts with `first`, and widens them if that is done once. Behind the last token,
// where a register block may go on, it is the last one again: nobody reads those scores.
HWY_NOINLINE void open(Work& w, std::int32_t first, std::int32_t tokens) {
  const Shape& shape = w.piece.shape;
  for (std::int32_t t = 0; t < tokens; ++t) {
    w.keys[t] = w.piece.keys.at(first + t);
    w.values[t] = shape.values_in_keys ? w.keys[t] : w.piece.values.at(first + t);
  }
  if (w.s.k != nullptr) {
    const auto widen = [&](const std::byte*& token, std::int32_t width, float* row) {
      token_to_f32(token, shape.format, width, row);
      token = reinterpret_cast<const std::byte*>(row);
    };
    for (std::int32_t t = 0; t < tokens; ++t) {
      widen(w.keys[t], w.width, w.s.k + t * w.s.key_stride);
      if (shape.values_in_keys)
        w.values[t] = w.keys[t];
      else
        widen(w.values[t], w.v_width, w.s.v + t * w.s.value_stride);
    }
  }
  std::fill(w.keys + tokens, w.keys + kStep, w.keys[tokens - 1]);
}

// rows x (vectors x lanes) of O += P V. value(t, i) is vector i of the columns at hand of the block's token t.
template <std::int32_t rows, std::int32_t vectors, class Value>
HWY_INLINE void accumulate_block(Work& w, std::int32_t row, float* HWY_RESTRICT o, std::int32_t tokens,
                                 const Value& value) {
  const F32 d;
  const float* p = w.s.s + row;
  VF32 acc[rows][vectors];
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::LoadU(d, o + r * w.v_width + i * kLanes);
  for (std::int32_t t = 0; t < tokens;) {
    for (const std::int32_t end = std::min(t + kTurnTokens, tokens); t < end; ++t, p += w.s.rows) {
      VF32 values[vectors];
      for (std::int32_t i = 0; i < vectors; ++i) values[i] = value(t, i);
      HWY_UNROLL(8)
      for (std::int32_t r = 0; r < rows; ++r) {
        const auto weight = hn::Set(d, p[r]);
        for (std::int32_t i = 0; i < vectors; ++i) acc[r][i] = hn::MulAdd(weight, values[i], acc[r][i]);
      }
    }
    w.ahead.lines(w.lines);
  }
  for (std::int32_t r = 0; r < rows; ++r)
    for (std::int32_t i = 0; i < vectors; ++i) hn::StoreU(acc[r][i], d, o + r * w.v_width + i * kLanes);
}

}  // namespace latte::cpu::HWY_NAMESPACE::fp32
HWY_AFTER_NAMESPACE();

#endif
