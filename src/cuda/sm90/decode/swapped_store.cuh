// The end of a piece of the swapped kernel: what follows from its sums, and its output in partials or in the caller's
// rows.
#pragma once

#include "cuda/sm90/decode/merge.cuh"

namespace latte::cuda::sm90::swapped {

// A thread's fragments, of S^T and of each 64 rows of O^T: for each 8 rows j, rows 8j + 2 (lane % 4) + {0, 1} at
// positions 16 warp + lane / 4 and 8 further on. So its i-th row, and where that first stands:
__device__ __forceinline__ int held_row(const Lane& at, int i) { return i / 2 * 8 + at.lane % 4 * 2 + i % 2; }
__device__ constexpr int held_value(int i) { return i / 2 * 4 + i % 2; }

// Joins values of the same rows over the eight lanes that hold them, those of one lane % 4. Each hands the half that it
// gives away to the lane that keeps it, so that the work gets less with every step. Of kLeft values the lane then has
// some, the first of which is value `first` of all; lanes may have the same ones.
template <int kLeft, int kStep = 16, int kCount, class Join, class Put>
__device__ __forceinline__ void join_lanes(float (&values)[kCount], int lane, const Join& join, const Put& put,
                                           int first = 0) {
  if constexpr (kStep < 4) {
#pragma unroll
    for (int i = 0; i < kLeft; ++i) put(first + i, values[i]);
  } else if constexpr (kLeft % 2 == 0) {
    constexpr int kKept = kLeft / 2;
    const bool upper = (lane & kStep) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float given = upper ? values[i] : values[i + kKept], kept = upper ? values[i + kKept] : values[i];
      values[i] = join(kept, __shfl_xor_sync(~0u, given, kStep));
    }
    join_lanes<kKept, kStep / 2>(values, lane, join, put, first + (upper ? kKept : 0));
  } else {
#pragma unroll
    for (int i = 0; i < kLeft; ++i) values[i] = join(values[i], __shfl_xor_sync(~0u, values[i], kStep));
    join_lanes<kLeft, kStep / 2>(values, lane, join, put, first);
  }
}
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float added(float a, float b) { return a + b; }

// What a thread has of a row: value e of kVector is of column 64 (e / 2) + 16 warp + 8 (e % 2) + lane / 4 of its side.
// Vector 32 side + 8 warp + lane / 4 of a partial's row is just that.
template <class Config>
struct AsHeld {
  static constexpr int kVector = 2 * Config::kHalfGroups;

  __device__ static int vector(const Lane& at) { return 32 * at.side + 8 * at.warp + at.lane / 4; }

  // The first column of the part-th kPart values of a row, and where the others are from there.
  template <int kPart>
  __device__ static unsigned column(unsigned part) {
    static_assert(kVector % kPart == 0 && kPart % 2 == 0);
    const unsigned v = part * kPart / kVector, first = part * kPart % kVector;
    return v / 32 * (Config::kLatent / 2) + 16 * (v / 8 % 4) + v % 8 + 64 * (first / 2);
  }
  template <class Element, int kPart>
  __device__ static void put(Element* to, const float (&values)[kPart], float factor) {
#pragma unroll
    for (int e = 0; e < kPart; ++e) convert(values[e] * factor, to[64 * (e / 2) + 8 * (e % 2)]);
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

// What a consumer has at the end of a piece: its half of the value columns of all rows, sums of its own blocks.
// `Storage` is where both tell each other maxima, sums and factors.
template <class Config, class Storage>
struct HeldRows {
  static constexpr int kRows = Config::kRows;
  static constexpr int kMine = kRows / 4;  // rows a thread has values of
  using Order = AsHeld<Config>;
  using Row = PartialRow<Order, Config::kLatent>;

  Storage& s;
  const Lane& at;
  Meeting& meet;  // both sides
  const float (&o)[Config::kHalfGroups][kRows / 2];
  float (&sums)[2 * kMine];  // of probabilities, then of what they were rounded to

  __device__ void store(const Sink& sink) const {
    join_lanes<2 * kMine>(sums, at.lane, added, [&](int i, float sum) {
      auto& to = i < kMine ? s.exchange : s.weights;
      to[4 * at.side + at.warp][held_row(at, i % kMine)] = sum;
    });
    if (sink.partial()) give_largest();
    meet();
    if (const int r = static_cast<int>(threadIdx.x) - kWarpgroup; r < kRows) finish_row(sink, r);
    meet();
    if (sink.partial())
      for_each_row([&](int r, const auto& values, float factor) {
        if (const std::int64_t row = sink.partial_row(r); row >= 0)
          Row(sink.workspace(), row).values[Order::vector(at)] = packed<__half>(values, factor);
      });
    else
      sink.with_type([&](auto element) {
        for_each_row([&](int r, const auto& values, float factor) {
          auto* row = reinterpret_cast<decltype(element)*>(sink.row(r));
          if constexpr (sizeof(element) == 2)
            Order::put_exchanged(row, at, values, factor);
          else if (row != nullptr)
            Order::put(row + Order::template column<Order::kVector>(Order::vector(at)), values, factor);
        });
      });
  }

 private:
  __device__ void give_largest() const {
    float largest[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      largest[i] = 0;
#pragma unroll
      for (int block = 0; block < Config::kHalfGroups; ++block)
        largest[i] = fmaxf(largest[i], fmaxf(fabsf(o[block][held_value(i)]), fabsf(o[block][held_value(i) + 2])));
    }
    join_lanes<kMine>(largest, at.lane, larger,
                      [&](int i, float value) { s.largest[4 * at.side + at.warp][held_row(at, i)] = value; });
  }

  // By one thread a row: what follows from its sums.
  __device__ void finish_row(const Sink& sink, int r) const {
    float sum = 0, weight = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += s.exchange[w][r], weight += s.weights[w][r];
    const RowResult result(s.reference[r], sum, weight);
    if (!sink.partial()) {
      s.stored[0][r] = s.stored[1][r] = result.inverse;
      sink.put_lse(r, result.lse());
      return;
    }
    Tail tail{.lse_log2 = result.lse_log2, .unused = 0};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float largest = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = fmaxf(largest, s.largest[4 * side + w][r]);
      largest = divisor(largest);
      tail.scale[side] = largest * result.inverse;
      s.stored[side][r] = reciprocal_fast(largest);
    }
    if (const std::int64_t row = sink.partial_row(r); row >= 0) *Row(sink.workspace(), row).tail = tail;
  }

  // Calls put(row, values, factor) with what this thread has of each of its rows.
  template <class Put>
  __device__ void for_each_row(const Put& put) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float values[Row::kVector];
#pragma unroll
      for (int e = 0; e < Row::kVector; ++e) values[e] = o[e / 2][held_value(i) + e % 2 * 2];
      put(held_row(at, i), values, s.stored[at.side][held_row(at, i)]);
    }
  }
};

}  // namespace latte::cuda::sm90::swapped
