// Random numbers that are the same on every machine and library: SplitMix64 and a cheap normal distribution.
#pragma once

#include <cstdint>
#include <iterator>

namespace latte::testkit {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // Uniform in [low, high], both included.
  std::int32_t between(std::int32_t low, std::int32_t high) {
    const auto width = static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - low + 1);
    return static_cast<std::int32_t>(low + static_cast<std::int64_t>(next() % width));
  }
  bool chance(std::int32_t one_in) { return between(1, one_in) == 1; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  // Mean 0, variance 1: the sum of four 16-bit uniforms (each of variance 1/12), so never beyond 3.5.
  double normal() {
    const std::uint64_t bits = next();
    const auto sum = (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
    return (static_cast<double>(sum) / 65535.0 - 2.0) * 1.7320508075688772;
  }

  template <class List>
  const auto& pick(const List& list) {
    return *(std::begin(list) + between(0, static_cast<std::int32_t>(std::size(list)) - 1));
  }

 private:
  std::uint64_t state_;
};

}  // namespace latte::testkit
