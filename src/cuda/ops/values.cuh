// Reading and writing values of any dtype, with the conversions of core/codec.hpp. The dtype is the same for a whole
// launch, so the branches cost next to nothing beside the memory accesses.
#pragma once

#include <cstdint>

#include "core/codec.hpp"
#include "latte/tensor.hpp"

namespace latte::cuda {

__device__ inline std::int64_t dtype_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// `Width` consecutive values as 32-bit words; Width > 1 wants 16-byte alignment.
template <std::int32_t Width>
__device__ void load_values(const void* from, Dtype dtype, float (&values)[Width]) {
  if constexpr (Width == 1) {
    if (dtype == Dtype::f32)
      values[0] = *static_cast<const float*>(from);
    else if (dtype == Dtype::bf16)
      values[0] = bf16_to_f32(*static_cast<const std::uint16_t*>(from));
    else
      values[0] = f16_to_f32(*static_cast<const std::uint16_t*>(from));
  } else {
    static_assert(Width == 8);
    const auto* quads = static_cast<const uint4*>(from);
    const uint4 first = quads[0];
    if (dtype == Dtype::f32) {
      const uint4 second = quads[1];
      const std::uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
      for (std::int32_t i = 0; i < 8; ++i) values[i] = std::bit_cast<float>(words[i]);
      return;
    }
    const std::uint32_t words[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
    for (std::int32_t i = 0; i < 8; ++i) {
      const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
      values[i] = dtype == Dtype::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
  }
}

template <std::int32_t Width>
__device__ void store_values(void* to, Dtype dtype, const float (&values)[Width]) {
  const auto narrow = [&](std::int32_t i) {
    return dtype == Dtype::bf16 ? f32_to_bf16(values[i]) : f32_to_f16(values[i]);
  };
  if constexpr (Width == 1) {
    if (dtype == Dtype::f32)
      *static_cast<float*>(to) = values[0];
    else
      *static_cast<std::uint16_t*>(to) = narrow(0);
  } else {
    static_assert(Width == 8);
    auto* quads = static_cast<uint4*>(to);
    const auto bits = [&](std::int32_t i) { return std::bit_cast<std::uint32_t>(values[i]); };
    const auto pair = [&](std::int32_t i) { return narrow(i) | static_cast<std::uint32_t>(narrow(i + 1)) << 16; };
    if (dtype == Dtype::f32) {
      quads[0] = {bits(0), bits(1), bits(2), bits(3)};
      quads[1] = {bits(4), bits(5), bits(6), bits(7)};
    } else {
      quads[0] = {pair(0), pair(2), pair(4), pair(6)};
    }
  }
}

}  // namespace latte::cuda
