// Joining the partials of split tiles, in the same launch. Everyone who computed a piece of a tile waits until all of
// its pieces are there and joins an equal slice of its values, partials in the plan's order.
//   arrived[2 * tile + half of the pair]: pieces stored and slices joined, each counts one. With the last of them it is
//   back at zero.
// Run by the two warpgroups that own value columns.
#pragma once

#include "cuda/sm90/decode/math.cuh"

namespace latte::cuda::sm90 {

inline constexpr int kMergeThreads = 2 * kWarpgroup;
inline constexpr int kBarrierMerge = 1;  // named barrier of the merging threads

__device__ __forceinline__ void merge_sync() { prim::named_sync<kBarrierMerge, kMergeThreads>(); }

// The same through shared memory's own barrier, for threads that hand values to each other there: compute-sanitizer
// takes what a named barrier of some of a block's threads separates for a race. Used for nothing else in a launch.
struct Meeting {
  prim::Barrier& barrier;
  std::uint32_t count = 0;
  __device__ void operator()() {
    barrier.arrive();
    barrier.wait(count++ % 2);
  }
};

// Weighted sums of kCount vectors of partials, exp(lse - reference) each. Empty = (-inf, 0, 0).
template <int kCount>
struct Joined {
  float reference = minus_infinity(), sum = 0;
  float4 value[kCount]{};

  // Several at once; each has a reference and a sum of its own.
  template <int kMore>
  __device__ void add(const float (&references)[kMore], const float (&sums)[kMore],
                      const float4 (&values)[kMore][kCount]) {
    float highest = reference;
#pragma unroll
    for (const float more : references) highest = fmaxf(highest, more);
    const float base = usable(highest);
    scale(__expf(reference - base));
    reference = highest;
#pragma unroll
    for (int m = 0; m < kMore; ++m) {
      const float weight = __expf(references[m] - base);
      sum += sums[m] * weight;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        value[i].x += values[m][i].x * weight;
        value[i].y += values[m][i].y * weight;
        value[i].z += values[m][i].z * weight;
        value[i].w += values[m][i].w * weight;
      }
    }
  }

 private:
  __device__ void scale(float factor) {
    sum *= factor;
#pragma unroll
    for (float4& v : value) v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
  }
};

// Vector v is columns 4v .. 4v + 3, stored whole.
struct ColumnsInOrder {};

// This thread block's part of a partial is stored, and its merging threads have met since.
__device__ __forceinline__ void announce(const KernelCall& call, const Piece& piece, const Share& share) {
  if (threadIdx.x == kWarpgroup) prim::add_release(call.workspace.arrived + 2 * piece.record.tile + share.rank());
}

// A tile's partials, as far as this thread block is concerned: its rows, and which slice of them it joins.
// Columns::column(v, e) is the column of value e of vector v of a partial's row, unless they are in order.
template <class Config, class Columns>
class TileMerge {
 public:
  __device__ TileMerge(const KernelCall& call, const Piece& piece, const Share& share)
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

  // `scratch`: shared memory, a Joined<1> a thread.
  __device__ void run(std::byte* scratch, Meeting& meet) {
    if (pieces_ * kMergeWarps <= piece_.rows)
      join_rows();
    else
      join_part(reinterpret_cast<Joined<1>*>(scratch), meet);
    merge_sync();
    if (thread_ == 0) prim::add_wrapping(arrived_, static_cast<std::uint32_t>(2 * pieces_ - 1));
  }

 private:
  static constexpr int kVectors = Config::kLatent / 4;  // of a row
  static constexpr int kLaneVectors = kVectors / 32;
  static constexpr int kMergeWarps = kMergeThreads / 32;

  __device__ void wait_for_all() const {
    if (thread_ == 0)
      while (prim::load_acquire(arrived_) < static_cast<std::uint32_t>(pieces_)) {
      }
    merge_sync();
  }

  // Few partials of many rows: whole rows, a warp each.
  __device__ void join_rows() {
    const int begin = piece_.rows * mine_ / pieces_, end = piece_.rows * (mine_ + 1) / pieces_;
    wait_for_all();
    for (int r = begin + thread_ / 32; r < end; r += kMergeWarps) {
      Joined<kLaneVectors> joined;
      join(joined, r, thread_ % 32, 32, 0, pieces_);
      store(joined, r, thread_ % 32, 32);
    }
  }

  // Else a slice is so many vectors, a thread each; or several threads, each a run of the vector's partials.
  __device__ void join_part(Joined<1>* scratch, Meeting& meet) {
    const int total = piece_.rows * kVectors;  // times the most pieces still a 32-bit number
    const int begin = total * mine_ / pieces_, end = total * (mine_ + 1) / pieces_;
    const int longest = (total + pieces_ - 1) / pieces_;  // of the tile's slices: all of them are joined the same way
    int log2 = 0;                                         // of the runs
    while (longest << (log2 + 1) <= kMergeThreads && 2 << log2 <= pieces_) ++log2;
    const int vectors = kMergeThreads >> log2, run = thread_ / vectors;
    const int run_begin = pieces_ * run >> log2, run_end = pieces_ * (run + 1) >> log2;
    wait_for_all();
    for (int first = begin; first < end; first += vectors) {  // once, if there are several runs
      const int v = first + thread_ % vectors, at = min(v, end - 1);
      Joined<1> joined;
      join(joined, at / kVectors, at % kVectors, 0, run_begin, run_end);
      for (int half = 1 << log2 >> 1; half > 0; half /= 2) {  // the earlier half of the runs takes the later one
        scratch[thread_] = joined;
        meet();
        if (run < half) {
          const Joined<1>& more = scratch[thread_ + half * vectors];
          joined.add({more.reference}, {more.sum}, {{more.value[0]}});
        }
        meet();
      }
      if (run == 0 && v < end) store(joined, v / kVectors, v % kVectors, 0);
    }
  }

  // Partials [begin, end) of row r: vectors `first`, `first + step`, ...
  template <int kCount>
  __device__ void join(Joined<kCount>& joined, int r, int first, int step, int begin, int end) const {
    constexpr int kAtOnce = kCount == 1 ? 12 : 4;  // enough loads on their way to hide how long they take
    const float* lse = call_.workspace.partial_lse + first_row_ + r;
    const float4* values =
        reinterpret_cast<const float4*>(call_.workspace.partial_out) + (first_row_ + r) * kVectors + first;
    for (int k = begin; k < end; k += kAtOnce) {
      float references[kAtOnce], sums[kAtOnce];
      float4 more[kAtOnce][kCount];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        const std::int64_t row = std::int64_t{min(k + m, end - 1)} * row_step_;
        references[m] = k + m < end ? __ldcg(lse + row) : minus_infinity();
        sums[m] = 1;
#pragma unroll
        for (int i = 0; i < kCount; ++i) more[m][i] = __ldcg(values + row * kVectors + i * step);
      }
      joined.add(references, sums, more);
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
      if constexpr (!std::is_same_v<Element, PartialValue>) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          store_vector(reinterpret_cast<Element*>(row), first + i * step, joined.value[i], inverse);
      }
    });
  }

  template <class Element>
  __device__ static void store_vector(Element* row, int v, const float4& value, float scale) {
    const float values[4] = {value.x * scale, value.y * scale, value.z * scale, value.w * scale};
    if constexpr (std::is_same_v<Columns, ColumnsInOrder>) {
      Element* to = row + 4 * v;
      if constexpr (sizeof(Element) == 4)
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
      else
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack<Element>(values[0], values[1]), pack<Element>(values[2], values[3]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) convert(values[e], row[Columns::column(v, e)]);
    }
  }

  const KernelCall& call_;
  const Piece& piece_;
  const int thread_;
  std::uint32_t* arrived_;
  std::int32_t pieces_, mine_, row_step_;
  std::int64_t first_row_;
};

// Joins this thread block's slices of all tiles it has a piece of.
template <class Config, class Columns>
__device__ void merge_all(const KernelCall& call, const Share& share, std::byte* scratch, prim::Barrier& met) {
  Meeting meet{met};
  for (std::int32_t i = share.begin; i < share.end; ++i) {
    const Piece piece = share.piece(i);
    if (piece.rows > 0 && piece.split()) TileMerge<Config, Columns>(call, piece, share).run(scratch, meet);
  }
}

}  // namespace latte::cuda::sm90
