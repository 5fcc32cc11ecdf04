#include "testkit/codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace latte::testkit {
namespace {

// A binary format of at most 16 bits: sign, exponent field, mantissa field. `min_exponent` is that of the smallest
// normal number; the exponent field 0 holds zero and the subnormals with the same exponent.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int min_exponent;
  double max_finite;
  bool has_infinity;  // IEEE style: an exponent field of all ones is infinity or NaN. Without: only all ones is NaN.

  std::uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  std::uint32_t quiet_nan() const { return has_infinity ? infinity() | (1u << (mantissa_bits - 1)) : sign_bit() - 1; }
};

constexpr SmallFloat kBf16{8, 7, -126, 0x1.fep127, true};
constexpr SmallFloat kF16{5, 10, -14, 65504.0, true};
constexpr SmallFloat kE4m3{4, 3, -6, 448.0, false};

double decode_small(const SmallFloat& format, std::uint32_t bits) {
  const double sign = (bits & format.sign_bit()) ? -1.0 : 1.0;
  const std::uint32_t magnitude = bits & (format.sign_bit() - 1);
  if (format.has_infinity && magnitude == format.infinity()) return sign * std::numeric_limits<double>::infinity();
  if (format.has_infinity ? magnitude > format.infinity() : magnitude == format.quiet_nan())
    return std::numeric_limits<double>::quiet_NaN();
  const std::uint32_t hidden_one = 1u << format.mantissa_bits;
  const std::uint32_t exponent_field = magnitude >> format.mantissa_bits;
  const std::uint32_t mantissa = magnitude & (hidden_one - 1);
  if (exponent_field == 0) return sign * std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  const int exponent = format.min_exponent + static_cast<int>(exponent_field) - 1;
  return sign * std::ldexp(hidden_one + mantissa, exponent - format.mantissa_bits);
}

std::uint32_t encode_small(const SmallFloat& format, double value) {
  const std::uint32_t sign = std::signbit(value) ? format.sign_bit() : 0;
  if (std::isnan(value)) return sign | format.quiet_nan();
  const double magnitude = std::fabs(value);
  // Between powers of two the representable numbers are `step` apart; nearbyint rounds halves to even.
  int exponent = 0;
  if (std::isfinite(magnitude)) std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, format.min_exponent);
  const double step = std::ldexp(1.0, exponent - format.mantissa_bits);
  double rounded = std::nearbyint(magnitude / step) * step;
  if (rounded > format.max_finite) {
    if (format.has_infinity) return sign | format.infinity();
    rounded = format.max_finite;
  }
  if (rounded < std::ldexp(1.0, format.min_exponent))
    return sign | static_cast<std::uint32_t>(std::ldexp(rounded, format.mantissa_bits - format.min_exponent));
  std::frexp(rounded, &exponent);  // rounding may have reached the next power of two
  exponent -= 1;
  const auto field = static_cast<std::uint32_t>(exponent - format.min_exponent + 1);
  const auto mantissa =
      static_cast<std::uint32_t>(std::ldexp(rounded, format.mantissa_bits - exponent)) - (1u << format.mantissa_bits);
  return sign | (field << format.mantissa_bits) | mantissa;
}

std::vector<double> decode_table(const SmallFloat& format) {
  std::vector<double> table(2 * format.sign_bit());
  for (std::uint32_t bits = 0; bits < table.size(); ++bits) table[bits] = decode_small(format, bits);
  return table;
}

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void write(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace

double decode_bf16(std::uint16_t bits) {
  static const std::vector<double> table = decode_table(kBf16);
  return table[bits];
}
double decode_f16(std::uint16_t bits) {
  static const std::vector<double> table = decode_table(kF16);
  return table[bits];
}
double decode_e4m3(std::uint8_t bits) {
  static const std::vector<double> table = decode_table(kE4m3);
  return table[bits];
}

std::uint16_t encode_bf16(double value) { return static_cast<std::uint16_t>(encode_small(kBf16, value)); }
std::uint16_t encode_f16(double value) { return static_cast<std::uint16_t>(encode_small(kF16, value)); }
std::uint8_t encode_e4m3(double value) { return static_cast<std::uint8_t>(encode_small(kE4m3, value)); }

double load(Dtype dtype, const std::byte* from) {
  switch (dtype) {
    case Dtype::f32: return read<float>(from);
    case Dtype::bf16: return decode_bf16(read<std::uint16_t>(from));
    case Dtype::f16: return decode_f16(read<std::uint16_t>(from));
    case Dtype::fp8_e4m3: return decode_e4m3(read<std::uint8_t>(from));
    case Dtype::u8: return read<std::uint8_t>(from);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void store(Dtype dtype, double value, std::byte* to) {
  switch (dtype) {
    case Dtype::f32: return write(static_cast<float>(value), to);
    case Dtype::bf16: return write(encode_bf16(value), to);
    case Dtype::f16: return write(encode_f16(value), to);
    case Dtype::fp8_e4m3: return write(encode_e4m3(value), to);
    case Dtype::u8: return write(static_cast<std::uint8_t>(value), to);
  }
}

void load_row(Dtype dtype, const std::byte* from, std::int64_t count, double* to) {
  const auto step = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int64_t i = 0; i < count; ++i) to[i] = load(dtype, from + i * step);
}

}  // namespace latte::testkit
