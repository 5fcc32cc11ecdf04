// Making error values: field, expected, got. Nothing here is called unless something is wrong.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>

#include "latte/status.hpp"
#include "latte/tensor.hpp"

// Hands a Status that is not ok to the caller.
#define LATTE_RETURN_IF_ERROR(expression)                                  \
  do {                                                                     \
    if (::latte::Status latte_status = (expression); !latte_status.ok()) { \
      return latte_status;                                                 \
    }                                                                      \
  } while (false)

namespace latte::backend {

Status invalid(std::string field, std::string expected, std::string got);
Status missing(std::string field, std::string expected, std::string got = "nothing");
Status unsupported(std::string field, std::string expected, std::string got);

template <std::integral Integer>
std::string text(Integer value) {
  return std::to_string(value);
}
std::string text(float value);
// "[4, 16, 576]"; a negative extent reads "any", and `at_least_first` puts ">= " before the first one.
std::string shape_text(std::span<const std::int64_t> shape, bool at_least_first = false);
// "bf16, f16, f32"
std::string dtype_set_text(std::uint32_t dtype_bits);

constexpr std::uint32_t dtype_bit(Dtype dtype) { return 1u << static_cast<unsigned>(dtype); }
inline constexpr std::uint32_t kFloatDtypes = dtype_bit(Dtype::bf16) | dtype_bit(Dtype::f16) | dtype_bit(Dtype::f32);
// A dtype that came as a bare number through a cast can be anything, also too large to shift by.
constexpr bool contains(std::uint32_t dtype_bits, Dtype dtype) {
  return dtype <= Dtype::u8 && (dtype_bits & dtype_bit(dtype)) != 0;
}

}  // namespace latte::backend
