// How the swapped kernel's output lies in partials, and how it is stored to the caller's rows.
#pragma once

#include "cuda/sm90/decode/merge.cuh"

namespace latte::cuda::sm90::swapped {

// What a thread has of a row: value e of kVector is of column 64 (e / 2) + 16 warp + 8 (e % 2) + lane / 4 of its side.
// Vector 32 side + 8 warp + lane / 4 of a partial's row is just that.
template <class Config>
struct AsHeld {
  static constexpr int kVector = 2 * Config::kHalfGroups;

  __device__ static int vector(const Lane& at) { return 32 * at.side + 8 * at.warp + at.lane / 4; }

  template <class Element>
  __device__ static void put(Element* row, int v, const float (&values)[kVector], float factor) {
    row += v / 32 * (Config::kLatent / 2) + 16 * (v / 8 % 4) + v % 8;
#pragma unroll
    for (int e = 0; e < kVector; ++e) convert(values[e] * factor, row[64 * (e / 2) + 8 * (e % 2)]);
  }

  // The same with 16-bit values, by whole warps: eight lanes have columns side by side, and exchange them so that each
  // has kVector in a row. Single values would be half sectors. A row that is not there is null.
  template <class Half>
  __device__ static void put_exchanged(Half* row, const Lane& at, const float (&values)[kVector], float factor) {
    static_assert(kVector == 8 || kVector == 4);
    Words<kVector> vector = packed<Half>(values, factor);
    auto& words = reinterpret_cast<std::uint32_t(&)[kVector / 2]>(vector);
    // The lowest bit of e for that of lane / 4: halves of two words at a time.
    const bool upper = (at.lane & 4) != 0;
#pragma unroll
    for (int i = 0; i < kVector / 2; i += 2) {
      const std::uint32_t given = __byte_perm(words[i], words[i + 1], upper ? 0x5410 : 0x7632);
      const std::uint32_t taken = __shfl_xor_sync(~0u, given, 4);
      words[i] = __byte_perm(words[i], taken, upper ? 0x3254 : 0x5410);
      words[i + 1] = __byte_perm(words[i + 1], taken, upper ? 0x3276 : 0x7610);
    }
    // The higher bits: whole words.
#pragma unroll
    for (int apart = 1; apart < kVector / 2; apart *= 2)
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i)
        if ((i & apart) == 0) exchange(words[i], words[i + apart], at.lane, 8 * apart);
    if (row == nullptr) return;
    const int lane = at.lane / 4, e = lane % kVector;
    row += at.side * (Config::kLatent / 2) + 64 * (e / 2) + 16 * at.warp + 8 * (e % 2) + lane / kVector * kVector;
    *reinterpret_cast<Words<kVector>*>(row) = vector;
  }
};

}  // namespace latte::cuda::sm90::swapped
