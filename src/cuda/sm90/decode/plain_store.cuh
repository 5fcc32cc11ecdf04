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
    const bool there = row != nullptr;
    row += at.side * (Config::kLatent / 2);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int j = 0; j < kWide / 8; j += 4) store_32_columns(row + part * kWide + 8 * j, part, j, scale, there);
  }

  __device__ void store_partial(const Sink& sink, const RowResult& result) const {
    const float largest = divisor(largest_of_side());
    const std::int64_t row = sink.partial_row(fragment_row(at, h));
    if (row < 0) return;
    const Row to(sink.workspace(), row);
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
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = value(part, j + i / 2, i % 2);
        to.values[((at.side * kParts + part) * (kWide / 32) + j / 4) * 4 + at.lane % 4] =
            packed<__half>(values, factor);
      }
  }

 private:
  __device__ float value(int part, int j, int c) const { return o[part][4 * j + 2 * h + c]; }

  __device__ float largest_of_side() const {
    float chains[4] = {};  // several, so that one need not wait for another
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < kWide / 4; ++i) chains[i % 4] = fmaxf(chains[i % 4], fabsf(value(part, i / 2, i % 2)));
    float largest = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // Four lanes hold 8 columns of each of 4 neighbours j. 16-bit values are exchanged so that each lane stores 8 columns
  // in a row; 32-bit pairs make whole sectors as they are.
  template <class Element>
  __device__ void store_32_columns(Element* to, int part, int j, float scale, bool there) const {
    if constexpr (sizeof(Element) == 4) {
      if (!there) return;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        reinterpret_cast<float2*>(to + 8 * i)[at.lane % 4] =
            make_float2(value(part, j + i, 0) * scale, value(part, j + i, 1) * scale);
    } else {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack<Element>(value(part, j + i, 0) * scale, value(part, j + i, 1) * scale);
      transpose_in_fours(words, at.lane);
      if (there) reinterpret_cast<uint4*>(to)[at.lane % 4] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

}  // namespace latte::cuda::sm90::plain
