// Number formats written out from their definitions, apart from the library's own codecs, so that tests do not check
// the library against itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "latte/tensor.hpp"

namespace latte::testkit {

double decode_bf16(std::uint16_t bits);
double decode_f16(std::uint16_t bits);
double decode_e4m3(std::uint8_t bits);  // e4m3fn: no infinity, NaN = 0x7f and 0xff

// Round to nearest, ties to even. Above the largest finite number: bf16 and f16 give infinity, e4m3 saturates at 448.
std::uint16_t encode_bf16(double value);
std::uint16_t encode_f16(double value);
std::uint8_t encode_e4m3(double value);

// One element in memory, at any alignment. u8 is a plain byte.
double load(Dtype dtype, const std::byte* from);
void store(Dtype dtype, double value, std::byte* to);

// `count` elements one behind the other.
void load_row(Dtype dtype, const std::byte* from, std::int64_t count, double* to);

}  // namespace latte::testkit
