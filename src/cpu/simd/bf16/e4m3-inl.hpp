// fp8 e4m3 to bf16, exactly: three bits of mantissa fit into seven, and the exponents of subnormal values are normal.
#pragma once

#include <array>

#include "cpu/features.hpp"
#include "cpu/simd/bf16/layout-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// 0, 1, ... 7 times 2^-9 as bf16.
inline constexpr std::array<std::uint16_t, 8> kSmallE4m3 = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                            0x3c00, 0x3c20, 0x3c40, 0x3c60};

// 32 values.
HWY_INLINE __m512i e4m3_to_bf16(__m256i bytes) {
  const __m512i x = _mm512_cvtepu8_epi16(bytes);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __m512i small = _mm512_permutexvar_epi16(
      x, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kSmallE4m3.data()))));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  __m512i value = _mm512_mask_mov_epi16(normal, is_small, small);
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
}

// What 128 magnitudes are as bf16, the high bytes and the low ones by themselves.
struct E4m3Tables {
  alignas(64) std::array<std::uint8_t, 128> high{}, low{};
};
inline constexpr E4m3Tables kE4m3Tables = [] {
  E4m3Tables tables;
  for (std::uint32_t m = 0; m < 128; ++m) {
    const std::uint32_t value = m < 8 ? kSmallE4m3[m] : m == 127 ? 0x7fc0u : (m << 4) + (120u << 7);
    tables.high[m] = static_cast<std::uint8_t>(value >> 8);
    tables.low[m] = static_cast<std::uint8_t>(value & 0xff);
  }
  return tables;
}();

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET ",avx512vbmi")
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Looked up, 64 at a time, in a quarter of the instructions. Only Cooper Lake has bf16 products and no such look-up.
HWY_NOINLINE void look_up_e4m3(const std::byte* src, std::int32_t count, std::uint16_t* dst) {
  const auto table = [](const std::uint8_t* half) { return _mm512_load_si512(half); };
  const __m512i high[] = {table(&kE4m3Tables.high[0]), table(&kE4m3Tables.high[64])};
  const __m512i low[] = {table(&kE4m3Tables.low[0]), table(&kE4m3Tables.low[64])};
  // Unpacking takes the lower, then the upper eight bytes of each 128-bit lane.
  const __m512i lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (std::int32_t i = 0; i < count; i += 64) {
    const __m512i x = _mm512_permutexvar_epi64(lanes, _mm512_loadu_si512(src + i));
    const __m512i lower = _mm512_permutex2var_epi8(low[0], x, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], x, high[1]);
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi8(-0x80), 0xf8);  // | (x & sign)
    _mm512_storeu_si512(dst + i, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(dst + i + 32, _mm512_unpackhi_epi8(lower, upper));
  }
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
