// Joining the partials of split tiles, in the same launch. Run by the two warpgroups that own value columns.
//   Slices: everyone who computed a piece of a tile waits until all of its pieces are there and joins an equal slice of
//     its values, partials in the plan's order.
//   Seams, in the plain kernel: where a tile's first piece ends one share and its second, the last, begins the next,
//     the second was stored long before the first is done. So whoever has the first joins both, alone (plain_seam.cuh).
//   Twins, there too: where both end a share, each keeps the rows that it joins and stores the others.
//   arrived[2 * tile + half of the pair]: pieces stored, and workers that have seen them all, each counts one. With the
//   last of them it is back at zero. At a seam only the second piece counts, and whoever waits for it takes it back.
#pragma once

#include "cuda/sm90/decode/math.cuh"

namespace latte::cuda::sm90 {

inline constexpr int kMergeThreadsLog2 = 8, kMergeThreads = 1 << kMergeThreadsLog2;
static_assert(kMergeThreads == 2 * kWarpgroup);
inline constexpr int kBarrierMerge = 1;  // named barrier of the merging threads

__device__ __forceinline__ void merge_sync() { prim::named_sync<kBarrierMerge, kMergeThreads>(); }

// The same through shared memory's own barrier, for threads that hand values to each other there: compute-sanitizer
// takes what a named barrier of some of a block's threads separates for a race.
struct Meeting {
  static constexpr int kArrivals = kMergeThreads;

  prim::Barrier& barrier;  // used for nothing else in a launch
  std::uint32_t count = 0;
  __device__ void operator()() {
    barrier.arrive();
    barrier.wait(count++ % 2);
  }
};

// A partial's row: values in half precision, which are half as many bytes to write and to read back. Each side's
// columns (those of one of the two warpgroups) are divided by their largest, so that nothing overflows; rounding then
// costs 2^-11 of a value at most, or 2^-25 of the largest.
//
//   row:  vectors of side 0 | vectors of side 1        and, elsewhere, its Tail
//
// Order says which columns a vector has (kVector of them), and how a part of one is written to the caller's row.
struct alignas(16) Tail {
  float scale[2];  // what the sides' values are to be multiplied by
  float lse_log2, unused;
};
static_assert(sizeof(Tail) == DecodeWorkspace::kTailBytes);

// So many values of 16 bits: 8, 4 or 2.
template <int kValues>
using Words = std::conditional_t<kValues == 8, uint4, std::conditional_t<kValues == 4, uint2, std::uint32_t>>;

template <class Half, int kVector>
__device__ Words<kVector> packed(const float (&values)[kVector], float factor) {
  std::uint32_t words[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) words[i] = pack<Half>(values[2 * i] * factor, values[2 * i + 1] * factor);
  return reinterpret_cast<const Words<kVector>&>(words);
}

template <class Order, int kLatent>
struct PartialRow {
  static constexpr int kVector = Order::kVector;
  static constexpr int kVectors = kLatent / kVector;

  Words<kVector>* values;
  Tail* tail;

  __device__ PartialRow(std::byte* all_values, std::byte* tails, std::int64_t row)
      : values(reinterpret_cast<Words<kVector>*>(all_values) + row * kVectors),
        tail(reinterpret_cast<Tail*>(tails) + row) {}
  __device__ PartialRow(const DecodeWorkspace& workspace, std::int64_t row)
      : PartialRow(workspace.values, workspace.tails, row) {}
  __device__ PartialRow operator+(int rows) const {
    PartialRow further = *this;
    further.values += rows * kVectors;
    further.tail += rows;
    return further;
  }
};
// What values up to `largest` are divided by, also where all are zero or one is infinite.
__device__ __forceinline__ float divisor(float largest) { return fminf(fmaxf(largest, 0x1p-126f), 0x1p126f); }

// Weighted sums of so many values of partials, 2^(lse_log2 - reference) each. Empty = (-inf, 0, 0).
template <int kValues>
struct Joined {
  float reference = minus_infinity(), sum = 0;
  float value[kValues]{};

  // Brings the sums to the highest reference; returns what weights are to be taken against.
  template <int kMore>
  __device__ float raise(const float (&references)[kMore]) {
    float highest = reference;
#pragma unroll
    for (const float more : references) highest = fmaxf(highest, more);
    const float base = usable(highest), factor = exp2_fast(reference - base);
    reference = highest;
    sum *= factor;
#pragma unroll
    for (float& v : value) v *= factor;
    return base;
  }
  __device__ void add(const Words<kValues>& words, float weight) {
    const auto* pairs = reinterpret_cast<const __half2*>(&words);
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float2 pair = __half22float2(pairs[i]);
      value[2 * i] = __fmaf_rn(pair.x, weight, value[2 * i]);
      value[2 * i + 1] = __fmaf_rn(pair.y, weight, value[2 * i + 1]);
    }
  }
};

__device__ __forceinline__ std::uint32_t* arrived(const KernelCall& call, const Piece& piece, const Share& share) {
  return call.workspace.arrived + 2 * piece.record.tile + share.rank();
}

// This thread block's part of a partial is stored, and its merging threads have met since.
__device__ __forceinline__ void announce(const KernelCall& call, const Piece& piece, const Share& share) {
  if (threadIdx.x == kWarpgroup) prim::add_release(arrived(call, piece, share));
}

// What a thread block joins of a tile: one of as many equal parts of its own rows as there are pieces.
struct Slice {
  std::int32_t pieces;     // partials of the tile
  std::int32_t mine;       // which of them is this thread block's
  std::int32_t row_step;   // rows from one partial to the next
  std::int64_t first_row;  // of the first partial

  __device__ Slice(const KernelCall& call, const Piece& piece)
      : row_step(piece.record.row_end - piece.record.row_begin) {
    const std::int32_t* partials = call.plan.reduce_indptr + piece.record.tile;
    const std::int32_t first = partials[0];
    pieces = partials[1] - first;
    const std::int32_t tile_row = call.plan.reduce_partial_map[first];
    mine = (piece.record.partial_row - tile_row) / row_step;
    first_row = std::int64_t{tile_row} + piece.row_begin;
  }
  // Of `total` items. Their product with the most pieces (choice.cpp) still is a 32-bit number.
  __device__ std::int32_t begin(std::int32_t total) const { return total * mine / pieces; }
  __device__ std::int32_t end(std::int32_t total) const { return total * (mine + 1) / pieces; }
};

// A tile's partials, as far as this thread block is concerned: its rows, and which slice of them it joins. In which
// order numbers are added follows from the kernel's rows and how many partials there are, and from nothing else.
template <class Config, class Order>
class TileMerge {
 public:
  using Row = PartialRow<Order, Config::kLatent>;
  // Where a slice is short, a thread takes half a vector of more than four partials: no more code than need be, as it
  // runs once and is not in any cache by then.
  static constexpr int kShort = Config::kRows <= 16 ? Row::kVector / 2 : Row::kVector;
  static constexpr int kNumbers = sizeof(Joined<kShort>) / sizeof(float);  // the reference first
  static constexpr int kScratchBytes = 2 * kNumbers * 2 * kMergeThreads * sizeof(float);

  __device__ TileMerge(const KernelCall& call, const Piece& piece, const Share& share)
      : call_(call),
        piece_(piece),
        slice_(call, piece),
        thread_(static_cast<int>(threadIdx.x) - kWarpgroup),
        arrived_(arrived(call, piece, share)) {}

  // `scratch`: shared memory, kScratchBytes.
  __device__ void run(std::byte* scratch, Meeting& meet) {
    auto* sums = reinterpret_cast<float*>(scratch);
    // Enough loads on their way at once to hide how long they take.
    if (slice_.pieces <= 2)
      join<Row::kVector, 3, 2>(sums, meet);
    else if (slice_.pieces <= 4)
      join<Row::kVector, 2, 4>(sums, meet);
    else if (slice_.pieces <= 8)
      join<kShort, 1, 8>(sums, meet);
    else
      join<kShort, 1, 9, true>(sums, meet);
  }

 private:
  // Not by the thread that announces: a slice is far, and this one looks it up while that one waits for its stores.
  __device__ void wait_for_all() const {
    if (thread_ == kMergeThreads - 1) {
      while (prim::load_acquire(arrived_) < static_cast<std::uint32_t>(slice_.pieces)) {
      }
      // Before the partials are read: nobody writes them again before a launch that has waited for the end of this one.
      prim::add_wrapping(arrived_, static_cast<std::uint32_t>(2 * slice_.pieces - 1));
    }
    merge_sync();
  }

  // Few partials: a thread takes several parts of kPart values at once. Many: 2^runs_log2 threads take one, each a run
  // of its partials. There are as many runs as there are threads for, in a tile that has all of its rows.
  template <int kPart, int kAtOnce, int kMore, bool kRuns = false>
  __device__ void join(float* scratch, Meeting& meet) {
    constexpr int kParts = Config::kLatent / kPart;  // of a row
    int runs_log2 = 0;
    if constexpr (kRuns)
      while (runs_log2 < 5 && slice_.pieces << (kMergeThreadsLog2 - 1 - runs_log2) >= Config::kRows * kParts)
        ++runs_log2;
    const int threads = kMergeThreads >> runs_log2, run = thread_ >> (kMergeThreadsLog2 - runs_log2);
    const int run_begin = slice_.pieces * run >> runs_log2, run_end = slice_.pieces * (run + 1) >> runs_log2;
    const int total = piece_.rows * kParts, begin = slice_.begin(total), end = slice_.end(total);
    if (begin == end) wait_for_all();
    for (int turn = begin; turn < end; turn += kAtOnce * threads) {
      const int first = turn + (thread_ & (threads - 1));
      // Where sums go is known before there are any.
      Target targets[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) targets[i] = target<kPart>(turn + (thread_ >> runs_log2) + i * threads, end);
      if (kRuns && (thread_ & ((1 << runs_log2) - 1))) targets[0] = {};
      if (turn == begin) wait_for_all();
      Joined<kPart> sums[kAtOnce];
      add_partials<kMore>(sums, first, threads, end - 1, run_begin, run_end);
      if constexpr (kRuns)
        if (runs_log2 > 0) add_runs(sums[0], scratch, meet, runs_log2);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store(sums[i], targets[i]);
    }
  }

  // Partials [begin, end) of the parts `first`, `first + step`, ... up to `last`, so many of each at once.
  template <int kMore, int kPart, int kAtOnce>
  __device__ void add_partials(Joined<kPart> (&sums)[kAtOnce], int first, int step, int last, int begin,
                               int end) const {
    constexpr int kParts = Config::kLatent / kPart;
    for (int k = begin; k < end; k += kMore) {
      float references[kAtOnce][kMore], scales[kAtOnce][kMore];
      Words<kPart> words[kAtOnce][kMore];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto at = static_cast<unsigned>(min(first + i * step, last)), part = at % kParts;
        const std::int64_t row = slice_.first_row + at / kParts + std::int64_t{k} * slice_.row_step;
        const Row from(call_.workspace, row);
        const auto* values = reinterpret_cast<const Words<kPart>*>(from.values) + part;
        const auto* tails = reinterpret_cast<const float4*>(from.tail);
#pragma unroll
        for (int m = 0; m < kMore; ++m) {
          const bool there = k + m < end;
          const float4 tail = there ? __ldcg(tails) : make_float4(0, 0, minus_infinity(), 0);
          words[i][m] = there ? __ldcg(values) : Words<kPart>{};
          scales[i][m] = part < kParts / 2 ? tail.x : tail.y;
          references[i][m] = tail.z;
          values += slice_.row_step * kParts;
          tails += slice_.row_step;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float base = sums[i].raise(references[i]);
#pragma unroll
        for (int m = 0; m < kMore; ++m) {
          const float weight = exp2_fast(references[i][m] - base);
          sums[i].sum += weight;
          sums[i].add(words[i][m], weight * scales[i][m]);
        }
      }
    }
  }

  // The runs of a part, 2^runs_log2 of them, are brought to neighbouring lanes and added up there; all of these get the
  // sum.
  //   scratch[turn % 2][number of the sum][part][run], parts a word further apart than need be: threads of a warp write
  //   a run's parts, and read the runs of one, mostly in different banks.
  __device__ void add_runs(Joined<kShort>& sum, float* scratch, Meeting& meet, int runs_log2) const {
    const int runs = 1 << runs_log2, threads = kMergeThreads >> runs_log2;
    auto* numbers = reinterpret_cast<float*>(&sum);
    scratch += meet.count % 2 * (kNumbers * 2 * kMergeThreads);
    float* mine = scratch + (thread_ & (threads - 1)) * (runs + 1) + (thread_ >> (kMergeThreadsLog2 - runs_log2));
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) mine[i * 2 * kMergeThreads] = numbers[i];
    meet();
    const float* theirs = scratch + (thread_ >> runs_log2) * (runs + 1) + (thread_ & (runs - 1));
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i] = theirs[i * 2 * kMergeThreads];
    float highest = sum.reference;
    for (int step = runs / 2; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    sum.raise({highest});
    for (int step = runs / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 1; i < kNumbers; ++i) numbers[i] += __shfl_xor_sync(~0u, numbers[i], step);
  }

  // Where a part goes; nowhere if it is another thread's, or not there.
  struct Target {
    std::byte* row = nullptr;
    unsigned column = 0;
    float* lse = nullptr;
  };
  template <int kPart>
  __device__ Target target(int at, int end) const {
    constexpr unsigned kParts = Config::kLatent / kPart;
    if (at >= end) return {};
    Piece whole = piece_;
    whole.record.partial_row = -1;
    const Sink sink(call_, whole);
    const unsigned r = static_cast<unsigned>(at) / kParts, part = static_cast<unsigned>(at) % kParts;
    return {sink.row(r), Order::template column<kPart>(part), part == 0 ? sink.lse(r) : nullptr};
  }
  template <int kPart>
  __device__ void store(const Joined<kPart>& sum, const Target& to) const {
    const RowResult result(sum.reference, sum.sum);
    if (to.lse != nullptr) *to.lse = result.lse();
    if (to.row == nullptr) return;
    Sink(call_, piece_).with_type([&](auto element) {
      Order::put(reinterpret_cast<decltype(element)*>(to.row) + to.column, sum.value, result.inverse);
    });
  }

  const KernelCall& call_;
  const Piece& piece_;
  const Slice slice_;
  const int thread_;
  std::uint32_t* arrived_;
};

// Joins this thread block's slices of the tiles that its records [begin, end) are pieces of. The stages are free by
// then.
template <class Config, class Order, int kStages>
__device__ void merge_slices(const KernelCall& call, const Share& share, std::int32_t begin, std::int32_t end,
                             std::byte (&stages)[kStages][Config::kStageBytes], Meeting& meet) {
  static_assert(TileMerge<Config, Order>::kScratchBytes <= sizeof(stages));
  for (std::int32_t i = begin; i < end; ++i) {
    const Piece piece = share.piece(i);
    if (piece.rows > 0 && piece.split()) TileMerge<Config, Order>(call, piece, share).run(stages[0], meet);
  }
}

}  // namespace latte::cuda::sm90
