// A random number for a seed and a position, without state: the same on host and device, in any order.
#pragma once

#include <cstdint>

namespace latte {

// Mean 0, variance 1: the sum of four 16-bit uniforms (each of variance 1/12) of a SplitMix64 hash, so never
// beyond 3.5.
constexpr float hashed_normal(std::uint64_t seed, std::uint64_t position) {
  std::uint64_t z = (seed + 1) * 0xd1342543de82ef95u + (position + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  const std::uint64_t sum = (z & 0xffff) + ((z >> 16) & 0xffff) + ((z >> 32) & 0xffff) + (z >> 48);
  return (static_cast<float>(static_cast<std::uint32_t>(sum)) * (1.0f / 65535.0f) - 2.0f) * 1.7320508f;
}

}  // namespace latte
