// What becomes of the plain kernel's output: the caller's rows, or a partial's.
#pragma once

#include "cuda/sm90/decode/merge.cuh"

namespace latte::cuda::sm90::plain {

// Columns of one product of the values: with 256 the compiler wants more registers than there are.
inline constexpr int kWide = 128;

// Fragments of a thread, in all of the plain kernel: rows 16 warp + lane / 4 and 8 further on; for each 8 columns j,
// columns 8j + 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ int fragment_row(const Lane& at, int h) { return 16 * at.warp + at.lane / 4 + 8 * h; }

// Vector v of a partial's row is what one thread has of 32 columns of it: pairs, 8 columns apart.
struct AsHeld {
  static constexpr int kVector = 8;

  // The first column of a vector, and where the others are from there. Vectors are not parted.
  template <int kPart>
  __device__ static unsigned column(unsigned v) {
    static_assert(kPart == kVector);
    return v / 4 * 32 + v % 4 * 2;
  }
  template <class Element>
  __device__ static void put(Element* to, const float (&values)[kVector], float factor) {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float low = values[2 * i] * factor, high = values[2 * i + 1] * factor;
      if constexpr (sizeof(Element) == 4)
        reinterpret_cast<float2*>(to)[4 * i] = make_float2(low, high);
      else
        reinterpret_cast<std::uint32_t*>(to)[4 * i] = pack<Element>(low, high);
    }
  }

  // The same by whole warps, from the first of the 32 columns that four neighbouring lanes have a vector of each.
  // 16-bit values are exchanged so that each lane stores 8 columns in a row; 32-bit pairs make whole sectors as they
  // are.
  template <class Element>
  __device__ static void put_exchanged(Element* row, unsigned column, int lane, const float (&values)[kVector],
                                       float factor) {
    if constexpr (sizeof(Element) == 4) {
      if (row != nullptr) put(row + column + lane % 4 * 2, values, factor);
    } else {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack<Element>(values[2 * i] * factor, values[2 * i + 1] * factor);
      transpose_in_fours(words, lane);
      if (row != nullptr)
        reinterpret_cast<uint4*>(row + column)[lane % 4] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// What a thread has of one of its two rows. A row that is not there is null: its lanes take part in exchanges, and
// store nothing.
template <class Config>
struct HeldRow {
  static constexpr int kParts = Config::kLatent / 2 / kWide;
  using Row = PartialRow<AsHeld, Config::kLatent>;

  const float (&o)[kParts][kWide / 2];
  const Lane& at;
  const int h;

  template <class Element>
  __device__ void store(Element* row, float scale) const {
    if (row != nullptr) row += at.side * (Config::kLatent / 2);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int j = 0; j < kWide / 8; j += 4) {
        float values[8];
        vector(part, j, values);
        AsHeld::put_exchanged(row, part * kWide + 8 * j, at.lane, values, scale);
      }
  }

  // `first`: where the first of so many rows goes.
  __device__ void store_partial(const Row& first, std::int32_t rows, const RowResult& result) const {
    const float largest = divisor(largest_of_side());
    const int r = fragment_row(at, h);
    if (r >= rows) return;
    const Row to = first + r;
    if (at.lane % 4 == 0) {
      to.tail->scale[at.side] = largest * result.inverse;
      if (at.side == 0) to.tail->lse_log2 = result.lse_log2, to.tail->unused = 0;
    }
    const float factor = reciprocal_fast(largest);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int j = 0; j < kWide / 8; j += 4) {
        float values[8];
        vector(part, j, values);
        to.values[((at.side * kParts + part) * (kWide / 32) + j / 4) * 4 + at.lane % 4] =
            packed<__half>(values, factor);
      }
  }

 private:
  // Of 32 columns, those from the j-th 8 on.
  __device__ void vector(int part, int j, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = o[part][4 * (j + i / 2) + 2 * h + i % 2];
  }

  __device__ float largest_of_side() const {
    float chains[4] = {};  // several, so that one need not wait for another
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < kWide / 4; ++i)
        chains[i % 4] = fmaxf(chains[i % 4], fabsf(o[part][i / 2 * 4 + 2 * h + i % 2]));
    float largest = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }
};

}  // namespace latte::cuda::sm90::plain
