// Exact division by numbers that the host knows: a multiplication and a shift, where a GPU has no instruction to
// divide.
#pragma once

#include <bit>
#include <cstdint>

// The planner's steps are templates over the thread block they run on: the GPU's in device_plan.cu, one that a test
// runs on the host elsewhere.
#ifdef __CUDACC__
#define LATTE_DEVICE __device__
#define LATTE_ROLLED _Pragma("unroll 1")
#else
#define LATTE_DEVICE
#define LATTE_ROLLED
#endif

namespace latte::cuda::planner {

// Of 0 .. 2^31 - 1. With 2^(s-1) < d <= 2^s and m = floor(2^(31+s) / d) + 1, m * d passes 2^(31+s) by at most 2^s: too
// little to lift n / d over the next integer.
struct Divisor {
  std::uint32_t multiplier, shift;

  static constexpr Divisor of(std::int32_t divisor) {
    std::uint32_t s = 0;
    while ((std::uint64_t{1} << s) < static_cast<std::uint32_t>(divisor)) ++s;
    const std::uint64_t multiplier = (std::uint64_t{1} << (31 + s)) / static_cast<std::uint32_t>(divisor) + 1;
    return {static_cast<std::uint32_t>(multiplier), 31 + s};
  }
  LATTE_DEVICE std::int32_t floor(std::int32_t n) const {
    return static_cast<std::int32_t>(std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier >> shift);
  }
  LATTE_DEVICE std::int32_t ceil(std::int32_t n) const { return n > 0 ? floor(n - 1) + 1 : 0; }
};

// -1 for 0.
LATTE_DEVICE inline std::int32_t floor_log2(std::int32_t n) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(n);
#else
  return std::bit_width(static_cast<std::uint32_t>(n)) - 1;
#endif
}

struct Division {
  std::uint64_t quotient;
  std::uint32_t rest;
};

// Of 0 .. 2^63 - 1. The inverse is less than 1 too small, which costs the quotient at most 1.
struct LongDivisor {
  std::uint64_t inverse;
  std::uint32_t divisor;

  static constexpr LongDivisor of(std::int32_t divisor) {
    const auto d = static_cast<std::uint32_t>(divisor);
    return {~std::uint64_t{0} / d, d};
  }
  LATTE_DEVICE Division divide(std::uint64_t n) const {
    std::uint64_t quotient = high_half(n, inverse);
    std::uint64_t rest = n - quotient * divisor;
    if (rest >= divisor) ++quotient, rest -= divisor;
    return {quotient, static_cast<std::uint32_t>(rest)};
  }

 private:
  LATTE_DEVICE static std::uint64_t high_half(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    const std::uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
    const std::uint64_t middle = a1 * b0 + (a0 * b0 >> 32), low = a0 * b1 + (middle & 0xffffffffu);
    return a1 * b1 + (middle >> 32) + (low >> 32);
#endif
  }
};

}  // namespace latte::cuda::planner
