// O = softmax(scale * Q K^T) V with bf16 products and fp32 sums, by AMX tiles or AVX-512 BF16 dot products. The two
// share layouts and everything but the matrix product, because a tile instruction does to 16 rows what the dot product
// does to one: c[16 lanes] += a-pair (broadcast) . b-pairs[16 lanes].
//
//   pages --open--> keys[step][width], or in place --scores--> s[panel][step][16 rows] --Absorb--> p --accumulate--> o
//              `--PairUp--> v[column panel][step/2][16][2] --------------------------------------------------^
//
// S^T = K Q^T: keys are the row operand as they lie in the cache (bf16 tokens of one page are read where they are),
// only Q needs its values in pairs, once per piece. O = P V: V's tokens are paired up once per block for all heads. A
// panel is 16 rows (or 16 columns of V); everything is stored panel by panel so that a 16 x 64-byte tile is one
// kilobyte without gaps.
//
// Tile products run beside the vector units, so the vector work is done in slices inside the products' loops:
//
//   scores(j + 1)  with  Absorb(j)      and half of the fetches of block j + 2
//   accumulate(j)  with  PairUp(j + 1)  and the other half
//
// With 16 rows or fewer, pairing V up would cost more than the products themselves. Then V too is read where it lies: a
// tile takes two columns of a token for a pair, and each token's probability goes in beside a zero, once for the even
// columns and once for the odd ones. Half of the products are with zero; there are few.
//
// Budget for 128 rows and 128 tokens a step: q 147 KB, s 2 x 66, p 33, v 2 x 131, o 262, two blocks of keys 295
// = 1.13 MB of 2 MB of L2.
//
// fp8_e4m3 values are exact in bf16. An fp8_ds_mla value (e4m3 times fp32) is not: its key is staged as two bf16
// numbers, hi and lo, side by side, and the query repeats its latent part to meet both, which keeps scores exact to
// 2^-17. Compiled for one target only, so once.
#pragma once

#include <algorithm>
#include <immintrin.h>

#include "cpu/simd/softmax-inl.hpp"

// Beyond what Highway enables for its AVX-512 target.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16,amx-tile,amx-bf16")
namespace latte::cpu::HWY_NAMESPACE::bf16 {

inline constexpr std::int32_t kPanel = 16;  // rows or columns a tile
inline constexpr std::int32_t kPair = 32;   // bf16 values in a tile row, and tokens in a tile of V
inline constexpr std::int32_t kStep = 128;  // tokens staged at a time
inline constexpr std::int32_t kRowTile = 128;
static_assert(kLanes == kPanel);

struct Scratch {
  std::uint16_t *q, *k[2], *v[2], *p;
  std::uint32_t* pairs;  // P^T of one panel, two tokens a word, before it is turned into tiles
  float *s[2], *o, *row;
  float *max_log2, *sum, *factor;
  std::int32_t* bound;
  std::int64_t v_panel;  // elements between column panels: one cache line more than they need, to spread over sets

  Scratch(Carver& carver, std::int32_t rows, std::int32_t latent, std::int32_t key_width) {
    const std::int64_t padded = round_up(rows, 2 * kPanel);
    v_panel = kStep * kPanel + 32;
    q = carver.take<std::uint16_t>(padded * key_width);
    for (std::uint16_t*& block : k) block = carver.take<std::uint16_t>(kStep * static_cast<std::int64_t>(key_width));
    for (std::uint16_t*& block : v) block = carver.take<std::uint16_t>(round_up(latent, 2 * kPanel) / kPanel * v_panel);
    p = carver.take<std::uint16_t>(std::max<std::int64_t>(padded, 4 * kPanel) * kStep);
    pairs = carver.take<std::uint32_t>(kStep / 2 * kPanel);
    for (float*& block : s) block = carver.take<float>(padded * kStep);
    o = carver.take<float>(padded * round_up(latent, 2 * kPanel));
    row = carver.take<float>(std::max(key_width, 2 * kPair) + latent);
    max_log2 = carver.take<float>(padded);
    sum = carver.take<float>(padded);
    factor = carver.take<float>(padded);
    bound = carver.take<std::int32_t>(padded);
  }
};

// Elements of a staged key: latent and rope, and the low halves of an fp8_ds_mla latent, to a whole number of tile
// rows.
HWY_INLINE std::int32_t key_width(std::int32_t latent, std::int32_t rope, KvFormat format) {
  const std::int32_t low = format == KvFormat::fp8_ds_mla ? latent : 0;
  return static_cast<std::int32_t>(round_up(latent + rope + low, kPair));
}

// Sixteen keys, `stride` elements apart: staged, or where they lie in the cache.
struct KeyTile {
  const std::uint16_t* data;
  std::int64_t stride;
};

// Fetches tokens into L2, a few lines at every turn of an inner loop.
class Prefetch {
 public:
  Prefetch(const TokenReader& reader, std::int32_t token_bytes) : reader_(reader), token_bytes_(token_bytes) {}

  void aim(std::int32_t first, std::int32_t end) { next_ = first, end_ = end, offset_ = token_bytes_; }
  // Lines to fetch at each of `turns` turns to have fetched half a block.
  std::int32_t share(std::int32_t turns) const {
    return static_cast<std::int32_t>(ceil_div(std::int64_t{kStep} * ceil_div(token_bytes_, 64), 2 * turns));
  }
  HWY_INLINE void lines(std::int32_t count) {
    for (; count > 0; --count) {
      if (offset_ >= token_bytes_) {
        if (next_ >= end_) return;
        token_ = reinterpret_cast<const char*>(reader_.at(next_++));
        offset_ = 0;
      }
      _mm_prefetch(token_ + offset_, _MM_HINT_T1);
      offset_ += 64;
    }
  }

 private:
  const TokenReader& reader_;
  const std::int32_t token_bytes_;
  std::int32_t next_ = 0, end_ = 0, offset_ = 0;
  const char* token_ = nullptr;
};

// Up to kStep tokens on their way through the kernel. Two are in flight: one is scored while the other is absorbed.
struct Block {
  float* s;          // scores
  std::uint16_t* k;  // keys that could not be used in place
  std::uint16_t* v;  // value pairs
  std::int32_t first = 0, tokens = 0;
  KeyTile keys[kStep / kPanel];

  std::int32_t padded() const { return static_cast<std::int32_t>(round_up(tokens, kPair)); }
};

struct Work {
  const Piece& piece;
  Scratch s;
  const TokenReader& reader;
  Prefetch ahead;
  std::int32_t rows, panels, latent, rope, width;
  std::int32_t column_panels;  // of V and O; the last may be half used when latent is an odd multiple of 16

  std::int64_t o_panel(std::int32_t panel, std::int32_t column_panel) const {
    return (static_cast<std::int64_t>(panel) * column_panels + column_panel) * kPanel * kPanel;
  }
};

// dst[column][row] = src[row][column], 16 x 16 words; strides in words.
HWY_INLINE void transpose_16x16(const std::uint32_t* src, std::int64_t src_stride, std::uint32_t* dst,
                                std::int64_t dst_stride) {
  __m512i r[16], t[16];
  HWY_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * src_stride);
  HWY_UNROLL(8)
  for (int i = 0; i < 8; ++i) {  // pairs of rows
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  HWY_UNROLL(4)
  for (int i = 0; i < 4; ++i) {  // groups of four rows: 128-bit lane j of r[4i + c] is column 4j + c
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  HWY_UNROLL(4)
  for (int c = 0; c < 4; ++c) {  // gather the four groups' lanes
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i e = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), f = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_storeu_si512(dst + c * dst_stride, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(dst + (8 + c) * dst_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(dst + (4 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0x88));
    _mm512_storeu_si512(dst + (12 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0xdd));
  }
}

HWY_INLINE __m256i round_bf16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

// 32 e4m3 bytes to bf16, exactly.
HWY_INLINE __m512i e4m3_to_bf16(__m256i bytes) {
  const __m512i x = _mm512_cvtepu8_epi16(bytes);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  // 0, 1, ... 7 times 2^-9 as bf16, looked up by the low bits.
  const __m512i small = _mm512_permutexvar_epi16(
      x, _mm512_broadcast_i32x4(_mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60)));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  __m512i value = _mm512_mask_mov_epi16(normal, is_small, small);
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
}

// Copies or converts `count` values (a multiple of 16) to bf16, exactly: the source is bf16 or e4m3.
HWY_INLINE void copy_bf16(const std::byte* src, Dtype dtype, std::int32_t count, std::uint16_t* dst) {
  std::int32_t i = 0;
  if (dtype == Dtype::bf16) {
    const auto* p = reinterpret_cast<const std::uint16_t*>(src);
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(dst + i, _mm512_loadu_si512(p + i));
    if (i < count)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)));
  } else {
    for (; i + 32 <= count; i += 32)
      _mm512_storeu_si512(dst + i, e4m3_to_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
    if (i < count)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i),
                          _mm512_castsi512_si256(e4m3_to_bf16(
                              _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))))));
  }
}

HWY_INLINE void ds_mla_to_bf16(const std::byte* token, float* row, std::uint16_t* dst) {
  ds_mla_latent_to_f32(token, row);
  copy_bf16(token + kDsMlaRopeOffset, Dtype::bf16, kDsMlaRope, dst + kDsMlaLatent);
  std::uint16_t* low = dst + kDsMlaLatent + kDsMlaRope;
  for (std::int32_t c = 0; c < kDsMlaLatent; c += 16) {
    const __m512 x = _mm512_loadu_ps(row + c);
    const __m256i high = round_bf16(x);
    const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + c), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + c), round_bf16(_mm512_sub_ps(x, rounded)));
  }
}

// q[panel][width / 2][16 rows][2]: the rows' value pairs, transposed. Rows past the end are zero and see everything.
HWY_INLINE void pack_query(Work& w) {
  const QueryView& q = w.piece.call.q;
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  std::uint16_t* rows = w.s.k[0];  // not in use yet: 16 rows side by side
  for (std::int32_t panel = 0; panel < w.panels; ++panel) {
    for (std::int32_t i = 0; i < kPanel; ++i) {
      const std::int32_t r = panel * kPanel + i;
      std::uint16_t* dst = rows + static_cast<std::int64_t>(i) * w.width;
      std::fill(dst, dst + w.width, std::uint16_t{0});
      w.s.bound[r] = r < w.rows ? w.piece.visible(r) : std::numeric_limits<std::int32_t>::max();
      w.s.max_log2[r] = kNegInf;
      w.s.sum[r] = 0;
      if (r >= w.rows) continue;
      const std::int64_t token = w.piece.token(r), head = w.piece.head(r);
      const std::byte* nope = q.nope + (token * q.nope_token_stride + head * q.nope_head_stride) * element;
      copy_bf16(nope, q.dtype, w.latent, dst);
      copy_bf16(q.rope + (token * q.rope_token_stride + head * q.rope_head_stride) * element, q.dtype, w.rope,
                dst + w.latent);
      if (w.piece.call.kv.format == KvFormat::fp8_ds_mla) copy_bf16(nope, q.dtype, w.latent, dst + w.latent + w.rope);
    }
    for (std::int32_t c = 0; c < w.width; c += kPair)
      transpose_16x16(
          reinterpret_cast<const std::uint32_t*>(rows + c), w.width / 2,
          reinterpret_cast<std::uint32_t*>(w.s.q + (static_cast<std::int64_t>(panel) * w.width + c) * kPanel), kPanel);
  }
  std::fill(w.s.o, w.s.o + w.o_panel(w.panels, 0), 0.0f);
}

// Sixteen tokens as staged keys; those past the end are zero.
HWY_INLINE void stage_keys(const Work& w, std::int32_t first, std::int32_t tokens, std::uint16_t* keys) {
  const KvFormat format = w.piece.call.kv.format;
  for (std::int32_t t = 0; t < kPanel; ++t) {
    std::uint16_t* key = keys + static_cast<std::int64_t>(t) * w.width;
    if (t >= tokens) {
      std::fill(key, key + w.width, std::uint16_t{0});
    } else if (format == KvFormat::fp8_ds_mla) {
      ds_mla_to_bf16(w.reader.at(first + t), w.s.row, key);
    } else {
      copy_bf16(w.reader.at(first + t), kv_element_dtype(format), w.latent + w.rope, key);
      std::fill(key + w.latent + w.rope, key + w.width, std::uint16_t{0});
    }
  }
}

// Gives a block its tokens and their keys, up to a whole number of tiles.
HWY_INLINE void open(Work& w, Block& block, std::int32_t first) {
  const CacheView& kv = w.piece.call.kv;
  block.first = first;
  block.tokens = std::min(kStep, w.piece.record.kv_end - first);
  // Whole tile rows, and element strides: what a tile can be loaded from directly.
  const bool direct = kv.format == KvFormat::bf16 && w.width == w.latent + w.rope && kv.token_stride_bytes % 2 == 0;
  for (std::int32_t t = 0; t < block.padded(); t += kPanel) {
    KeyTile& tile = block.keys[t / kPanel];
    if (direct && t + kPanel <= block.tokens && w.reader.run(first + t, kPanel) == kPanel) {
      tile = {reinterpret_cast<const std::uint16_t*>(w.reader.at(first + t)), kv.token_stride_bytes / 2};
    } else {
      std::uint16_t* staged = block.k + static_cast<std::int64_t>(t) * w.width;
      stage_keys(w, first + t, block.tokens - t, staged);
      tile = {staged, w.width};
    }
  }
}

// Interleaves the latent parts of a block's tokens, two by two, into their rows of every column panel. A slice is a
// quarter of a pair.
class PairUp {
 public:
  PairUp(const Work& w, const Block& block) : w_(w), block_(block), left_(block.padded() / 2) {}

  HWY_INLINE void step() {
    if (pair_ >= left_) return;
    // Word i of the low result is (even[i], odd[i]) for columns 0..15, of the high one for columns 16..31.
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const KeyTile& tile = block_.keys[pair_ * 2 / kPanel];
    const std::uint16_t* even = tile.data + pair_ * 2 % kPanel * tile.stride;
    const std::uint16_t* odd = even + tile.stride;
    std::uint16_t* v = block_.v + static_cast<std::int64_t>(pair_) * 2 * kPanel;
    const std::int32_t end = std::min(panel_ + kSlice, w_.column_panels);
    // When latent is an odd multiple of 16 the last half reads into the rope part: finite, and never looked at.
    for (; panel_ < end; panel_ += 2) {
      const __m512i a = _mm512_loadu_si512(even + panel_ * kPanel), b = _mm512_loadu_si512(odd + panel_ * kPanel);
      _mm512_storeu_si512(v + panel_ * w_.s.v_panel, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(v + (panel_ + 1) * w_.s.v_panel, _mm512_permutex2var_epi16(a, high, b));
    }
    if (panel_ >= w_.column_panels) panel_ = 0, ++pair_;
  }
  HWY_INLINE void finish() {
    while (pair_ < left_) step();
  }

 private:
  static constexpr std::int32_t kSlice = 8;
  const Work& w_;
  const Block& block_;
  const std::int32_t left_;
  std::int32_t pair_ = 0, panel_ = 0;
};

// Two tokens' probabilities as bf16 pairs, one word a row.
HWY_INLINE __m512i pair_bf16(__m512 even, __m512 odd) {
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, both);
}

// 2^x by 2^floor(x) * p(x - floor(x)); p is minimax on [0, 1), relative error 8e-5, a 25th of what the rounding to
// bf16 that follows costs.
HWY_INLINE __m512 exp2_short(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0780245123f), f, _mm512_set1_ps(0.22606717f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833535f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925219f));
  return _mm512_scalef_ps(p, x);
}

// Raises every row's reference for a scored block and rescales the outputs of those that rose.
HWY_INLINE void raise(Work& w, const Block& block) {
  const float scale_log2 = w.piece.call.score_scale * kLog2e;
  for (std::int32_t panel = 0; panel < w.panels; ++panel) {
    const std::int32_t row = panel * kPanel;
    const PanelState state{w.s.max_log2 + row, w.s.sum + row, w.s.bound + row};
    const bool masked = needs_mask(state.bound, block.first + block.tokens);
    if (!raise_panel(block.s + static_cast<std::int64_t>(panel) * kStep * kPanel, block.first, block.tokens, scale_log2,
                     masked, state, w.s.factor + row))
      continue;
    for (std::int32_t c = 0; c < w.column_panels; ++c)
      for (std::int32_t r = 0; r < kPanel; ++r) {
        float* o = w.s.o + w.o_panel(panel, c) + r * kPanel;
        _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(w.s.factor[row + r])));
      }
  }
}

// How P lies in its tiles, each of 16 rows x 64 bytes.
enum class Probabilities {
  paired,  // p[panel][token / 32][16][32]: tokens side by side, to meet value pairs
  spread,  // p[token / 16][2][16][16][2]: each token beside a zero, first before it, then behind it
};

// S^T -> P of a scored and raised block. Tokens past the end of the block get probability 0. A slice is four tokens of
// a panel, or the transposition of a finished tile.
template <Probabilities layout>
class Absorb {
 public:
  Absorb(Work& w, const Block& block)
      : w_(w), block_(block), scale_(w.piece.call.score_scale * kLog2e), end_(block.padded()) {
    open_panel();
  }

  HWY_INLINE void step() {
    if (panel_ >= w_.panels) return;
    if (t_ == tile_ + kTokens) {
      finish_tile();
      tile_ = t_;
      if (t_ >= end_) ++panel_, open_panel();
      return;
    }
    if (masked_)
      four_tokens<true>();
    else
      four_tokens<false>();
    t_ += 4;
  }
  HWY_INLINE void finish() {
    while (panel_ < w_.panels) step();
  }

 private:
  static constexpr std::int32_t kTokens = layout == Probabilities::paired ? kPair : kPanel;  // of a tile

  HWY_INLINE void finish_tile() {
    auto* tiles = reinterpret_cast<std::uint32_t*>(w_.s.p + static_cast<std::int64_t>(panel_) * kPanel * kStep);
    if constexpr (layout == Probabilities::paired) {
      transpose_16x16(w_.s.pairs, kPanel, tiles + tile_ / kTokens * kPanel * kPanel, kPanel);
    } else {
      tiles += tile_ / kTokens * 2 * kPanel * kPanel;
      transpose_16x16(w_.s.pairs, kPanel, tiles, kPanel);
      for (std::int32_t r = 0; r < kPanel; ++r)
        _mm512_storeu_si512(tiles + (kPanel + r) * kPanel,
                            _mm512_slli_epi32(_mm512_loadu_si512(tiles + r * kPanel), 16));
    }
  }

  HWY_INLINE void open_panel() {
    t_ = tile_ = 0;
    if (panel_ >= w_.panels) return;
    const std::int32_t row = panel_ * kPanel, block_end = block_.first + block_.tokens;
    scores_ = block_.s + static_cast<std::int64_t>(panel_) * kStep * kPanel;
    sum_ = w_.s.sum + row;
    _mm512_storeu_ps(reference_, finite_reference({w_.s.max_log2 + row, sum_, w_.s.bound + row}).raw);
    const __m512i bound = _mm512_min_epi32(_mm512_loadu_si512(w_.s.bound + row), _mm512_set1_epi32(block_end));
    _mm512_storeu_si512(bound_, bound);
    masked_ = _mm512_cmplt_epi32_mask(bound, _mm512_set1_epi32(block_.first + end_)) != 0;
  }

  template <bool masked>
  HWY_INLINE __m512 probability(std::int32_t t, __m512 scale, __m512 reference, __m512i bound) const {
    const __m512 p = exp2_short(_mm512_fmsub_ps(_mm512_loadu_ps(scores_ + t * kPanel), scale, reference));
    if constexpr (!masked) return p;
    return _mm512_maskz_mov_ps(_mm512_cmpgt_epi32_mask(bound, _mm512_set1_epi32(block_.first + t)), p);
  }

  template <bool masked>
  HWY_INLINE void four_tokens() {
    const __m512 scale = _mm512_set1_ps(scale_), reference = _mm512_loadu_ps(reference_);
    const __m512i bound = _mm512_loadu_si512(bound_);
    const __m512 p0 = probability<masked>(t_, scale, reference, bound);
    const __m512 p1 = probability<masked>(t_ + 1, scale, reference, bound);
    const __m512 p2 = probability<masked>(t_ + 2, scale, reference, bound);
    const __m512 p3 = probability<masked>(t_ + 3, scale, reference, bound);
    std::uint32_t* words = w_.s.pairs + (t_ - tile_) * kPanel / (kTokens / kPanel);
    if constexpr (layout == Probabilities::paired) {
      _mm512_storeu_si512(words, pair_bf16(p0, p1));
      _mm512_storeu_si512(words + kPanel, pair_bf16(p2, p3));
    } else {
      _mm512_storeu_si512(words, _mm512_cvtepu16_epi32(round_bf16(p0)));
      _mm512_storeu_si512(words + kPanel, _mm512_cvtepu16_epi32(round_bf16(p1)));
      _mm512_storeu_si512(words + 2 * kPanel, _mm512_cvtepu16_epi32(round_bf16(p2)));
      _mm512_storeu_si512(words + 3 * kPanel, _mm512_cvtepu16_epi32(round_bf16(p3)));
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(p0, p1), _mm512_add_ps(p2, p3));
    _mm512_storeu_ps(sum_, _mm512_add_ps(_mm512_loadu_ps(sum_), sum));
  }

  Work& w_;
  const Block& block_;
  const float scale_;
  const std::int32_t end_;
  std::int32_t panel_ = 0, t_ = 0, tile_ = 0;
  bool masked_ = false;
  const float* scores_ = nullptr;
  float* sum_ = nullptr;
  alignas(64) float reference_[kPanel];
  alignas(64) std::int32_t bound_[kPanel];
};

// The frame both kernels share. Math supplies the two matrix products and calls what it is given once a turn of its
// inner loop; how many turns there are, it says beforehand.
template <class Math>
HWY_INLINE void run_with(const Piece& piece) {
  const DecodeCall& call = piece.call;
  const std::int32_t width = key_width(call.latent, call.rope, call.kv.format), end = piece.record.kv_end;
  const auto token_bytes =
      static_cast<std::int32_t>(kv_token_elements(call.kv.format, call.latent, call.rope) *
                                static_cast<std::int64_t>(dtype_bytes(kv_element_dtype(call.kv.format))));
  const TokenReader reader(call.kv, piece.record.request);
  Carver carver(piece.scratch);
  Work w{.piece = piece,
         .s = Scratch(carver, piece.rows(), call.latent, width),
         .reader = reader,
         .ahead = Prefetch(reader, token_bytes),
         .rows = piece.rows(),
         .panels = static_cast<std::int32_t>(ceil_div(piece.rows(), kPanel)),
         .latent = call.latent,
         .rope = call.rope,
         .width = width,
         .column_panels = static_cast<std::int32_t>(round_up(call.latent, 2 * kPanel) / kPanel)};
  pack_query(w);

  Block blocks[2] = {{.s = w.s.s[0], .k = w.s.k[0], .v = w.s.v[0]}, {.s = w.s.s[1], .k = w.s.k[1], .v = w.s.v[1]}};
  Block *now = &blocks[0], *next = &blocks[1];
  const std::int32_t score_lines = w.ahead.share(Math::score_turns(w));
  const std::int32_t accumulate_turns = Math::accumulate_turns(w);
  const std::int32_t accumulate_lines = w.ahead.share(accumulate_turns);
  // Four slices a pair of tokens, in as many turns as there are.
  const auto pair_steps = static_cast<std::int32_t>(ceil_div(4 * kStep / 2, accumulate_turns));

  constexpr bool kPairs = Math::kProbabilities == Probabilities::paired;

  if (piece.record.kv_begin < end) {
    open(w, *now, piece.record.kv_begin);
    w.ahead.aim(now->first + kStep, std::min(now->first + 2 * kStep, end));
    PairUp pairs(w, *now);
    Math::scores(w, *now, [&] {
      if constexpr (kPairs) pairs.step();
      w.ahead.lines(2 * score_lines);
    });
    if constexpr (kPairs) pairs.finish();
  }
  for (std::int32_t t = piece.record.kv_begin; t < end; t += kStep, std::swap(now, next)) {
    const bool more = t + kStep < end;
    raise(w, *now);
    Absorb<Math::kProbabilities> absorb(w, *now);
    w.ahead.aim(t + 2 * kStep, std::min(t + 3 * kStep, end));
    if (more) {
      open(w, *next, t + kStep);
      Math::scores(w, *next, [&] {
        absorb.step();
        w.ahead.lines(score_lines);
      });
    }
    absorb.finish();
    if (more) {
      PairUp pairs(w, *next);
      Math::accumulate(w, *now, [&] {
        if constexpr (kPairs)
          for (std::int32_t i = 0; i < pair_steps; ++i) pairs.step();
        w.ahead.lines(accumulate_lines);
      });
      if constexpr (kPairs) pairs.finish();
    } else {
      Math::accumulate(w, *now, [] {});
    }
  }
  finish_rows(piece, w.s.max_log2, w.s.sum, [&](std::int32_t r) {
    Math::gather_row(w, r, w.s.row);
    return w.s.row;
  });
}

std::size_t scratch_bytes(const Shape& shape) {
  Carver carver;
  Scratch(carver, shape.row_tile, shape.latent, key_width(shape.latent, shape.rope, shape.format));
  return carver.used();
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
