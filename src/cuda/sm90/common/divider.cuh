// Division by a number that the host knows.
#pragma once

#include <bit>
#include <cstdint>
#include <cuda_runtime.h>

namespace latte::cuda::sm90 {

// Division of non-negative 31-bit numbers by one that the host knows: a multiplication and a shift.
class Divider {
 public:
  Divider() = default;
  explicit Divider(std::int32_t divisor);
  __device__ std::int32_t divide(std::int32_t number) const {
    return multiplier_ == 0
               ? number
               : static_cast<std::int32_t>(__umulhi(static_cast<std::uint32_t>(number), multiplier_) >> shift_);
  }

 private:
  std::uint32_t multiplier_ = 0;  // 0: by one
  std::uint32_t shift_ = 0;
};

// With l = ceil(log2 d) and m = ceil(2^(31 + l) / d) < 2^32:  n / d = n * m >> (31 + l)  for all 0 <= n < 2^31, since
// the error n * (m * d - 2^(31 + l)) / (d * 2^(31 + l)) < n / 2^(31 + l) < 1 / d.
inline Divider::Divider(std::int32_t divisor) {
  if (divisor == 1) return;
  const auto d = static_cast<std::uint64_t>(divisor);
  const auto log2 = static_cast<std::uint32_t>(std::bit_width(d - 1));
  multiplier_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + log2)) + d - 1) / d);
  shift_ = log2 - 1;
}

}  // namespace latte::cuda::sm90
