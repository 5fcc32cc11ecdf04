// Scalar conversions between fp32 and the narrow formats. Encoders round to nearest, ties to even. All are constexpr,
// so that device code can call them: what a GPU writes into a cache are the bytes the CPU would write.
#pragma once

#include <bit>
#include <cstdint>

namespace latte {

constexpr float bf16_to_f32(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

constexpr std::uint16_t f32_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto nan = static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  const auto rounded = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

constexpr float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

constexpr std::uint16_t f32_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 2^16 or more
  if (magnitude < 0x38800000u)  // below 2^-14: subnormal. Adding 0.5 aligns the mantissa and lets the FPU round.
    return static_cast<std::uint16_t>(
        sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  const std::uint32_t rebased = magnitude - (112u << 23);
  return static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

// e4m3fn: 4 exponent bits (bias 7), 3 mantissa bits, no infinities, 0x7f and 0xff are NaN, largest value 448.
inline constexpr float kE4m3Max = 448.0f;

constexpr float e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8)
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-9f) | sign);
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// Saturates: anything beyond 448, infinities included, becomes 448.
constexpr std::uint8_t f32_to_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  const float absolute = std::bit_cast<float>(magnitude);
  if (absolute >= kE4m3Max) return static_cast<std::uint8_t>(sign | 0x7eu);
  if (absolute < 0x1p-6f)  // subnormal: a multiple of 2^-9, which is the last bit of numbers from 2^14 on
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(absolute + 0x1p14f) - 0x46800000u));
  const std::uint32_t rebased = magnitude - (120u << 23);
  return static_cast<std::uint8_t>(sign | ((rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20));
}

// value / scale, rounded once. The quotient of two floats in double is never mistaken for a tie of e4m3, which in float
// it can be; what is cut off on the way to float is kept as an odd last bit, so that the encoder sees on which side it
// lies.
constexpr std::uint8_t quotient_to_e4m3(float value, float scale) {
  const double quotient = static_cast<double>(value) / scale;
  if (quotient != quotient)  // with the value's sign, whatever sign the machine gives its NaNs
    return static_cast<std::uint8_t>(((std::bit_cast<std::uint32_t>(value) >> 24) & 0x80u) | 0x7fu);
  const auto nearest = static_cast<float>(quotient);
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool infinite = (bits & 0x7fffffffu) == 0x7f800000u;
  const double kept = nearest;
  if (infinite || kept == quotient) return f32_to_e4m3(nearest);
  if (quotient > 0 ? kept > quotient : kept < quotient) --bits;
  return f32_to_e4m3(std::bit_cast<float>(bits | 1u));
}

// The 656-byte token of fp8_ds_mla.
inline constexpr std::int32_t kDsMlaLatent = 512, kDsMlaRope = 64, kDsMlaGroup = 128, kDsMlaGroups = 4;
inline constexpr std::int32_t kDsMlaScaleOffset = 512, kDsMlaRopeOffset = 528, kDsMlaBytes = 656;

}  // namespace latte
