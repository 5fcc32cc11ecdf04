// The conversions that CPU and GPU share, against the testkit's own, which go through doubles.
#include "core/codec.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"

namespace latte {
namespace {

// Device code may call them because of this.
static_assert(f32_to_bf16(1.0f) == 0x3f80 && bf16_to_f32(0x3f80) == 1.0f);
static_assert(f32_to_f16(1.0f) == 0x3c00 && f16_to_f32(0x3c00) == 1.0f);
static_assert(f32_to_e4m3(1.0f) == 0x38 && e4m3_to_f32(0x38) == 1.0f);
static_assert(quotient_to_e4m3(3.0f, 3.0f) == 0x38);

TEST(Codec, EncodersRoundAsTheOracleDoes) {
  // Every exponent and sign, with mantissas at, next to and between the ties of each format.
  for (std::uint32_t high = 0; high < 1u << 9; ++high)
    for (std::uint32_t low = 0; low < 1u << 11; ++low)
      for (const std::uint32_t last : {0u, 1u, 0x800u, 0xfffu}) {
        const std::uint32_t bits = high << 23 | low << 12 | last;
        const auto value = std::bit_cast<float>(bits);
        if (std::isnan(value)) continue;
        ASSERT_EQ(f32_to_bf16(value), testkit::encode_bf16(value)) << std::hexfloat << value;
        ASSERT_EQ(f32_to_f16(value), testkit::encode_f16(value)) << std::hexfloat << value;
        ASSERT_EQ(f32_to_e4m3(value), testkit::encode_e4m3(value)) << std::hexfloat << value;
      }
}

TEST(Codec, QuotientsAreRoundedOnce) {
  testkit::Rng rng(7);
  for (int i = 0; i < 200000; ++i) {
    const auto value = static_cast<float>(rng.normal() * 40), scale = static_cast<float>(std::exp(rng.normal()));
    ASSERT_EQ(quotient_to_e4m3(value, scale), testkit::encode_e4m3(static_cast<double>(value) / scale))
        << std::hexfloat << value << " / " << scale;
  }
}

TEST(Codec, NansKeepTheirSignOnEveryMachine) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(quotient_to_e4m3(std::copysign(nan, 1.0f), 2.0f), 0x7f);
  EXPECT_EQ(quotient_to_e4m3(std::copysign(nan, -1.0f), 2.0f), 0xff);
  EXPECT_EQ(quotient_to_e4m3(infinity, infinity), 0x7f);
  EXPECT_EQ(quotient_to_e4m3(-infinity, infinity), 0xff);
  EXPECT_EQ(quotient_to_e4m3(infinity, 2.0f), 0x7e);
}

}  // namespace
}  // namespace latte
