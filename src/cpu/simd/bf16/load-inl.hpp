// From the caller's tensors to the layouts of the bf16 kernels: queries packed, keys staged or found, values paired up.
#pragma once

#include <limits>

#include "core/softmax_state.hpp"
#include "cpu/simd/bf16/e4m3-inl.hpp"
#include "cpu/simd/bf16/layout-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// dst[column][row] = rows(row)[column], 16 x 16 words; stride in words.
template <class Rows>
HWY_INLINE void transpose_16x16(const Rows& rows, std::uint32_t* dst, std::int64_t dst_stride) {
  __m512i r[16], t[16];
  HWY_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = rows(i);
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

// The same from memory.
HWY_INLINE void transpose_16x16(const std::uint32_t* src, std::int64_t src_stride, std::uint32_t* dst,
                                std::int64_t dst_stride) {
  transpose_16x16([&](int i) { return _mm512_loadu_si512(src + i * src_stride); }, dst, dst_stride);
}

HWY_INLINE __m256i load_256(const void* src) { return _mm256_loadu_si256(static_cast<const __m256i*>(src)); }
HWY_INLINE __m128i load_128(const void* src) { return _mm_loadu_si128(static_cast<const __m128i*>(src)); }

// Copies or converts `count` values (a multiple of 16) to bf16, exactly: the source is bf16 or e4m3.
HWY_INLINE void copy_bf16(const std::byte* src, Dtype dtype, std::int32_t count, std::uint16_t* dst) {
  std::int32_t i = 0;
  if (dtype == Dtype::bf16) {
    const auto* p = reinterpret_cast<const std::uint16_t*>(src);
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(dst + i, _mm512_loadu_si512(p + i));
    if (i < count) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), load_256(p + i));
  } else {
    if (features().avx512_vbmi) {
      i = count / 64 * 64;
      look_up_e4m3(src, i, dst);
    }
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(dst + i, e4m3_to_bf16(load_256(src + i)));
    if (i < count)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i),
                          _mm512_castsi512_si256(e4m3_to_bf16(_mm256_castsi128_si256(load_128(src + i)))));
  }
}

// 32 bf16 values times a scale, rounded.
HWY_INLINE __m512i scale_bf16(__m512i values, __m512 scale) {
  const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), scale);
  const __m512i high = _mm512_and_si512(values, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(high), scale);
  alignas(64) static constexpr std::uint16_t kInterleave[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                              21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                              11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave),
                                  reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
}

HWY_INLINE void stage_ds_mla(const std::byte* token, std::uint16_t* dst, float* scales) {
  std::memcpy(scales, token + kDsMlaScaleOffset, kDsMlaGroups * sizeof(float));
  copy_bf16(token + kDsMlaRopeOffset, Dtype::bf16, kDsMlaRope, dst + kDsMlaLatent);
  std::uint16_t* bytes = dst + kDsMlaLatent + kDsMlaRope;
  copy_bf16(token, Dtype::fp8_e4m3, kDsMlaLatent, bytes);
  for (std::int32_t c = 0; c < kDsMlaLatent; c += kPair)
    _mm512_storeu_si512(dst + c, scale_bf16(_mm512_loadu_si512(bytes + c), _mm512_set1_ps(scales[c / kDsMlaGroup])));
}

// What each row sees, and nothing seen yet. Rows past the end see everything.
HWY_INLINE void reset_rows(Work& w, float reference) {
  for (std::int32_t r = 0; r < w.panels * kPanel; ++r) {
    w.s.bound[r] = r < w.rows ? w.piece.visible(r) : std::numeric_limits<std::int32_t>::max();
    w.s.max_log2[r] = reference;
    w.s.sum[r] = w.s.weight[r] = 0;
  }
}

HWY_INLINE const std::byte* query_nope(const Work& w, std::int32_t r) {
  const QueryView& q = w.piece.q;
  return q.nope + (w.piece.token(r) * q.nope_token_stride + w.piece.head(r) * q.nope_head_stride) *
                      static_cast<std::int64_t>(dtype_bytes(q.dtype));
}

// Fetches a row's query into L2. Rows may be pages apart, where the processor does not look ahead by itself.
HWY_INLINE void fetch_query(const Work& w, std::int32_t r) {
  if (r >= w.rows) return;
  const QueryView& q = w.piece.q;
  const std::byte* nope = query_nope(w, r);
  for (std::int64_t line = 0; line < q.nope_width * static_cast<std::int64_t>(dtype_bytes(q.dtype)); line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(nope + line), _MM_HINT_T1);
}

// A row's query as bf16, to a whole number of tile rows; zeros past the last row.
HWY_INLINE void stage_query(const Work& w, std::int32_t r, std::uint16_t* dst) {
  std::fill(dst, dst + w.width, std::uint16_t{0});
  if (r >= w.rows) return;
  const QueryView& q = w.piece.q;
  const std::int64_t token = w.piece.token(r), head = w.piece.head(r);
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  const std::byte* nope = query_nope(w, r);
  copy_bf16(nope, q.dtype, q.nope_width, dst);
  copy_bf16(q.rope + (token * q.rope_token_stride + head * q.rope_head_stride) * element, q.dtype, q.rope_width,
            dst + q.nope_width);
  if (has_groups(w.piece.shape)) copy_bf16(nope, q.dtype, q.nope_width, dst + w.piece.shape.width);
}

// How decode's queries lie.
enum class Queries {
  paired,  // q[panel][width / 2][16 rows][2]: the rows' value pairs, transposed
  plain,   // q[row][width]; the scores of rows past the end, which nobody computes, are zero
};

template <Queries layout>
HWY_INLINE void pack_query(Work& w) {
  reset_rows(w, kNegInf);
  if constexpr (layout == Queries::plain)
    for (float* scores : w.s.s) std::fill(scores, scores + kStrip * kPair, 0.0f);
  for (std::int32_t panel = 0; panel < w.panels; ++panel) {
    // Where pairs are to be made, keys are not in use yet: 16 rows side by side.
    std::uint16_t* rows =
        layout == Queries::plain ? w.s.q + static_cast<std::int64_t>(panel) * kPanel * w.width : w.s.k[0];
    for (std::int32_t i = 0; i < kPanel; ++i) {
      fetch_query(w, (panel + 1) * kPanel + i);
      stage_query(w, panel * kPanel + i, rows + static_cast<std::int64_t>(i) * w.width);
    }
    if constexpr (layout == Queries::plain) continue;
    for (std::int32_t c = 0; c < w.width; c += kPair)
      transpose_16x16(
          reinterpret_cast<const std::uint32_t*>(rows + c), w.width / 2,
          reinterpret_cast<std::uint32_t*>(w.s.q + (static_cast<std::int64_t>(panel) * w.width + c) * kPanel), kPanel);
  }
  std::fill(w.s.o, w.s.o + w.o_panel(w.panels, 0), 0.0f);
}

// Token t of a block as a staged key; those past the end are zero.
HWY_INLINE void stage_key(const Work& w, const Block& block, std::int32_t t) {
  const Shape& shape = w.piece.shape;
  std::uint16_t* key = block.k + static_cast<std::int64_t>(t) * w.width;
  float* scales = w.s.scales + t * kDsMlaGroups;
  if (t >= block.tokens) {
    std::fill(key, key + w.width, std::uint16_t{0});
    if (has_groups(shape)) std::fill(scales, scales + kDsMlaGroups, 0.0f);
  } else if (has_groups(shape)) {
    stage_ds_mla(w.piece.keys.at(block.first + t), key, scales);
  } else {
    copy_bf16(w.piece.keys.at(block.first + t), kv_element_dtype(shape.format), shape.width, key);
    std::fill(key + shape.width, key + w.width, std::uint16_t{0});
  }
}

// Gives a block its tokens, and says how many of them each pair of panels has to look at.
HWY_INLINE void aim(const Work& w, Block& block, std::int32_t first) {
  block.first = first;
  block.tokens = std::min(w.step, w.piece.record.kv_end - first);
  for (std::int32_t panel = 0; panel < w.panels; panel += 2) {
    const std::int32_t* bound = w.s.bound + panel * kPanel;
    std::int32_t most = _mm512_reduce_max_epi32(_mm512_loadu_si512(bound));
    if (panel + 1 < w.panels) most = std::max(most, _mm512_reduce_max_epi32(_mm512_loadu_si512(bound + kPanel)));
    block.extent[panel / 2] =
        static_cast<std::int32_t>(round_up(std::clamp(most, first, first + block.tokens) - first, kPair));
    block.last[panel / 2] = std::min(most, w.piece.record.kv_end) <= first + block.tokens;
  }
}

// Aims a block and gives it its keys, up to a whole number of tiles, where they lie if that can be.
HWY_INLINE void open(Work& w, Block& block, std::int32_t first) {
  const Shape& shape = w.piece.shape;
  const TokenReader& keys = w.piece.keys;
  aim(w, block, first);
  // Whole tile rows, and element strides: what a tile can be loaded from directly.
  const bool direct = shape.format == KvFormat::bf16 && w.width == shape.width && keys.token_stride_bytes() % 2 == 0;
  for (std::int32_t t = 0; t < block.padded(); t += kPanel) {
    KeyTile& tile = block.keys[t / kPanel];
    if (direct && t + kPanel <= block.tokens && keys.run(first + t, kPanel) == kPanel) {
      tile = {reinterpret_cast<const std::uint16_t*>(keys.at(first + t)), keys.token_stride_bytes() / 2};
    } else {
      for (std::int32_t i = t; i < t + kPanel; ++i) stage_key(w, block, i);
      tile = {block.k + static_cast<std::int64_t>(t) * w.width, w.width};
    }
  }
}

// Columns of a token's key or values, of which 32 are taken at a time, as bf16; zeros past the last.
struct TokenRow {
  const std::byte* data;
  Dtype dtype;
  std::int32_t width;

  HWY_INLINE __m512i columns(std::int32_t column) const {
    const std::byte* src = data + (dtype == Dtype::bf16 ? 2 * column : column);
    const std::int32_t left = width - column;
    if (left <= 0) return _mm512_setzero_si512();
    if (dtype == Dtype::bf16) return left >= 32 ? _mm512_loadu_si512(src) : _mm512_zextsi256_si512(load_256(src));
    return e4m3_to_bf16(left >= 32 ? load_256(src) : _mm256_zextsi128_si256(load_128(src)));
  }
};

// Prefill's keys, k[token / 16][width / 32][16][16 tokens][2]: value pairs, transposed. A slice is 32 columns of 16
// tokens.
class TurnKeys {
 public:
  explicit TurnKeys(const Work& w) : w_(w) {}

  void aim(const Block& block) { block_ = &block, left_ = block.padded(), t_ = column_ = 0; }

  HWY_INLINE void step() {
    if (t_ >= left_) return;
    const Shape& shape = w_.piece.shape;
    const Dtype dtype = kv_element_dtype(shape.format);
    const auto columns = [&](std::int32_t i) {
      if (t_ + i >= block_->tokens) return _mm512_setzero_si512();
      return TokenRow{w_.piece.keys.at(block_->first + t_ + i), dtype, shape.width}.columns(column_);
    };
    std::uint16_t* tile = block_->k + static_cast<std::int64_t>(t_) * w_.width + column_ * kPanel;
    transpose_16x16(columns, reinterpret_cast<std::uint32_t*>(tile), kPanel);
    column_ += kPair;
    if (column_ >= w_.width) column_ = 0, t_ += kPanel;
  }
  bool done() const { return t_ >= left_; }
  static std::int64_t slices(const Work& w) { return w.step / kPanel * (w.width / kPair); }

 private:
  const Work& w_;
  const Block* block_ = nullptr;
  std::int32_t left_ = 0, t_ = 0, column_ = 0;
};

// Interleaves the values of two tokens, 32 columns, into their rows of two column panels. These get four words of each
// 128-bit lane: which columns that is, gather_panels knows.
HWY_INLINE void pair_up(__m512i even, __m512i odd, std::uint16_t* v, std::int64_t v_panel) {
  _mm512_store_si512(v, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(v + v_panel, _mm512_unpackhi_epi16(even, odd));
}

// Pairs up all values of 32 tokens of a block of decode, whose keys they are the front of. A step is eight column
// panels of two tokens.
class PairKeys {
 public:
  PairKeys(const Work& w, const Block& block)
      : keys_(block.keys), values_(block.v), v_panel_(w.s.v_panel), columns_(w.column_panels) {}

  void aim(std::int32_t t) { pair_ = t / 2, left_ = kPanel * steps_a_pair(columns_), column_ = columns_; }

  HWY_INLINE void step() {
    if (left_ == 0) return;
    --left_;
    if (column_ >= columns_) next_pair();
    if (column_ + kColumns <= columns_) {
      HWY_UNROLL(4)
      for (std::int32_t i = 0; i < kColumns; i += 2) pair(i);
    } else {
      for (std::int32_t i = 0; column_ + i < columns_; i += 2) pair(i);
    }
    even_ += kColumns * kPanel, v_ += kColumns * v_panel_, column_ += kColumns;
  }
  HWY_INLINE void finish() {
    while (left_ > 0) step();
  }
  static std::int32_t steps(const Work& w) { return kPanel * steps_a_pair(w.column_panels); }

 private:
  static constexpr std::int32_t kColumns = 8;
  static std::int32_t steps_a_pair(std::int32_t columns) {
    return static_cast<std::int32_t>(ceil_div(columns, kColumns));
  }

  HWY_INLINE void pair(std::int32_t i) const {
    // When latent is an odd multiple of 16 the last half is from the rope part, and never looked at.
    const std::uint16_t* even = even_ + i * kPanel;
    pair_up(_mm512_loadu_si512(even), _mm512_loadu_si512(even + stride_), v_ + i * v_panel_, v_panel_);
  }
  HWY_INLINE void next_pair() {
    const KeyTile& tile = keys_[pair_ / (kPanel / 2)];
    even_ = tile.data + pair_ % (kPanel / 2) * 2 * tile.stride;
    stride_ = tile.stride;
    v_ = values_ + static_cast<std::int64_t>(pair_) * 2 * kPanel;
    column_ = 0;
    ++pair_;
  }

  const KeyTile* keys_;
  std::uint16_t* values_;
  std::int64_t v_panel_;
  std::int32_t columns_;
  std::int32_t pair_ = 0, left_ = 0, column_ = 0;
  const std::uint16_t* even_ = nullptr;
  std::int64_t stride_ = 0;
  std::uint16_t* v_ = nullptr;
};

// The same for a block of prefill, whose values are a tensor of their own.
class PairUp {
 public:
  explicit PairUp(const Work& w) : w_(w) {}

  void aim(const Block& block) { block_ = &block, left_ = block.padded() / 2, pair_ = panel_ = 0; }

  HWY_INLINE void step() {
    if (pair_ >= left_) return;
    const TokenRow even = row(pair_ * 2), odd = row(pair_ * 2 + 1);
    std::uint16_t* v = block_->v + static_cast<std::int64_t>(pair_) * 2 * kPanel;
    const std::int32_t end = std::min(panel_ + kSlice, w_.column_panels);
    for (; panel_ < end; panel_ += 2)
      pair_up(even.columns(panel_ * kPanel), odd.columns(panel_ * kPanel), v + panel_ * w_.s.v_panel, w_.s.v_panel);
    if (panel_ >= w_.column_panels) panel_ = 0, ++pair_;
  }
  bool done() const { return pair_ >= left_; }
  static std::int64_t slices(const Work& w) { return w.step / 2 * ceil_div(w.column_panels, kSlice); }

 private:
  // None past the end of the block.
  HWY_INLINE TokenRow row(std::int32_t t) const {
    const Shape& shape = w_.piece.shape;
    const bool past = t >= block_->tokens;
    return {past ? nullptr : w_.piece.values.at(block_->first + t), kv_element_dtype(shape.format),
            past ? 0 : shape.v_width};
  }

  static constexpr std::int32_t kSlice = 8;
  const Work& w_;
  const Block* block_ = nullptr;
  std::int32_t left_ = 0, pair_ = 0, panel_ = 0;
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
