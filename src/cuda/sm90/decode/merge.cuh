// Joining the partials of split tiles, in the same launch. Everyone who computed a piece of a tile waits until all of
// its pieces are there and joins an equal slice of its values, partials in the plan's order.
//   arrived[2 * tile + half of the pair]: pieces stored, in the low half; slices joined, in the high half; the last one
//   sets it back to zero.
// Run by the two warpgroups that own value columns.
#pragma once

#include "cuda/sm90/decode/math.cuh"

namespace latte::cuda::sm90 {

inline constexpr std::uint32_t kJoined = 1u << 16;
inline constexpr int kMergeThreads = 2 * kWarpgroup;
inline constexpr std::uint32_t kBarrierMerge = 1;  // named barrier of the merging threads

__device__ __forceinline__ void merge_sync() { prim::named_sync(kBarrierMerge, kMergeThreads); }

// Weighted sums of kCount vectors of partials, exp(lse - reference) each. Empty = (-inf, 0, 0).
template <int kCount>
struct Joined {
  float reference = minus_infinity(), sum = 0;
  float4 value[kCount]{};

  __device__ void add(float more_reference, float more_sum, const float4 (&more)[kCount]) {
    const float highest = fmaxf(reference, more_reference), base = usable(highest);
    const float mine = __expf(reference - base), other = __expf(more_reference - base);
    sum = sum * mine + more_sum * other;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i].x = value[i].x * mine + more[i].x * other;
      value[i].y = value[i].y * mine + more[i].y * other;
      value[i].z = value[i].z * mine + more[i].z * other;
      value[i].w = value[i].w * mine + more[i].w * other;
    }
    reference = highest;
  }
};

// A tile's partials, as far as this thread block is concerned: its rows, and which slice of them it joins.
template <class Config>
class TileMerge {
 public:
  __device__ TileMerge(const DecodeCall& call, const Piece& piece, const Share& share)
      : call_(call),
        piece_(piece),
        thread_(static_cast<int>(threadIdx.x) - kWarpgroup),
        arrived_(call.workspace.arrived + 2 * piece.record.tile + share.rank()) {
    const std::int32_t* partials = call.plan.reduce_indptr + piece.record.tile;
    const std::int32_t first = __ldg(partials);
    const std::int32_t first_row = __ldg(call.plan.reduce_partial_map + first);
    pieces_ = __ldg(partials + 1) - first;
    row_step_ = piece.record.row_end - piece.record.row_begin;
    mine_ = (piece.record.partial_row - first_row) / row_step_;
    first_row_ = std::int64_t{first_row} + piece.row_begin;
  }

  // After this thread block's stores of a partial.
  __device__ static void announce(const DecodeCall& call, const Piece& piece, const Share& share) {
    __threadfence();
    merge_sync();
    if (threadIdx.x == kWarpgroup) atomicAdd(call.workspace.arrived + 2 * piece.record.tile + share.rank(), 1u);
  }

  // `scratch`: shared memory, a Joined<1> a thread.
  __device__ void run(std::byte* scratch) {
    const auto pieces = static_cast<std::uint32_t>(pieces_);
    if (thread_ == 0)
      while ((prim::load_acquire(arrived_) & (kJoined - 1)) < pieces) {
      }
    merge_sync();
    join_slice(scratch);
    merge_sync();
    if (thread_ == 0 && atomicAdd(arrived_, kJoined) / kJoined + 1 == pieces) *arrived_ = 0;
  }

 private:
  static constexpr int kVectors = Config::kLatent / 4;  // of a row
  static constexpr int kLaneVectors = kVectors / 32;

  __device__ void join_slice(std::byte* scratch) {
    const int begin = piece_.rows * mine_ / pieces_, end = piece_.rows * (mine_ + 1) / pieces_;
    if (pieces_ <= piece_.rows) {
      // Whole rows, a warp each.
      for (int r = begin + thread_ / 32; r < end; r += kMergeThreads / 32) {
        Joined<kLaneVectors> joined;
        join(joined, r, thread_ % 32, 32, 0, pieces_);
        store(joined, r, thread_ % 32, 32);
      }
      return;
    }
    // More partials than rows: a slice is part of a row, and several threads share a vector, each a run of its
    // partials.
    join_part(scratch);
  }

  __device__ void join_part(std::byte* scratch) {
    const int total = piece_.rows * kVectors;
    const int begin = static_cast<int>(static_cast<std::int64_t>(total) * mine_ / pieces_);
    const int end = static_cast<int>(static_cast<std::int64_t>(total) * (mine_ + 1) / pieces_);
    if (begin == end) return;  // more partials than vectors
    int runs = 1;
    while (runs * 2 * (end - begin) <= kMergeThreads && runs * 2 <= pieces_) runs *= 2;
    const int vectors = kMergeThreads / runs, run = thread_ / vectors, v = begin + thread_ % vectors;
    const int at = min(v, end - 1);
    Joined<1> joined;
    join(joined, at / kVectors, at % kVectors, 0, pieces_ * run / runs, pieces_ * (run + 1) / runs);
    auto* shared = reinterpret_cast<Joined<1>*>(scratch);
    shared[thread_] = joined;
    merge_sync();
    if (run > 0 || v >= end) return;
    for (int i = 1; i < runs; ++i) {
      const Joined<1>& more = shared[thread_ + i * vectors];
      joined.add(more.reference, more.sum, more.value);
    }
    store(joined, v / kVectors, v % kVectors, 0);
  }

  // Partials [begin, end) of row r: vectors `first`, `first + step`, ...
  template <int kCount>
  __device__ void join(Joined<kCount>& joined, int r, int first, int step, int begin, int end) const {
    const std::int64_t row = first_row_ + r + static_cast<std::int64_t>(begin) * row_step_;
    const float* lse = call_.workspace.partial_lse + row;
    const float4* values = reinterpret_cast<const float4*>(call_.workspace.partial_out) + row * kVectors + first;
    constexpr int kUnroll = 8 / kCount;
#pragma unroll kUnroll
    for (int k = begin; k < end; ++k, lse += row_step_, values += static_cast<std::int64_t>(row_step_) * kVectors) {
      float4 more[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) more[i] = __ldcg(values + i * step);
      joined.add(__ldcg(lse), 1.0f, more);
    }
  }

  template <int kCount>
  __device__ void store(const Joined<kCount>& joined, int r, int first, int step) const {
    Piece whole = piece_;
    whole.record.partial_row = -1;
    const Sink sink(call_, whole);
    if (first == 0) sink.put_lse(r, joined.sum > 0 ? joined.reference + __logf(joined.sum) : minus_infinity());
    std::byte* row = sink.row(r, Config::kLatent);
    if (row == nullptr) return;
    const float inverse = joined.sum > 0 ? 1.0f / joined.sum : 0.0f;
    sink.with_type([&](auto element) {
      using Element = decltype(element);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float4& value = joined.value[i];
        Element* to = reinterpret_cast<Element*>(row) + (first + i * step) * 4;
        if constexpr (sizeof(Element) == 4)
          *reinterpret_cast<float4*>(to) =
              make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
        else
          *reinterpret_cast<uint2*>(to) = make_uint2(pack<Element>(value.x * inverse, value.y * inverse),
                                                     pack<Element>(value.z * inverse, value.w * inverse));
      }
    });
  }

  const DecodeCall& call_;
  const Piece& piece_;
  const int thread_;
  std::uint32_t* arrived_;
  std::int32_t pieces_, mine_, row_step_;
  std::int64_t first_row_;
};

// Joins this thread block's slices of all tiles it has a piece of.
template <class Config>
__device__ void merge_all(const DecodeCall& call, const Share& share, std::byte* scratch) {
  for (std::int32_t i = share.begin; i < share.end; ++i) {
    const Piece piece = share.piece(i);
    if (piece.rows > 0 && piece.split()) TileMerge<Config>(call, piece, share).run(scratch);
  }
}

}  // namespace latte::cuda::sm90
