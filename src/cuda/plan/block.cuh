// The planner's thread block on a GPU. A plan is a chain of short dependent steps, and what counts is how long each
// takes from start to end. So there is one block, of no more threads than a usual step has items; warps without an item
// go straight to the barrier, as shuffles of all warps share one unit; steps that do not need each other are done by
// different warps; and steps of the usual size stay in shared memory.
#pragma once

#include <cstddef>

#include "cuda/plan/planner.hpp"

namespace latte::cuda::planner {

inline constexpr std::int32_t kThreads = 512, kLanes = 32, kWarps = kThreads / kLanes;
inline constexpr unsigned kAll = 0xffffffffu;
static_assert(kWarps <= kLanes && (kWarps & (kWarps - 1)) == 0, "the results of all warps are joined by one");
static_assert(kWarps >= plan::kMaxUniformCandidate && kWarps >= plan::kEvenCandidates, "a warp a candidate");

// Where warps meet. Sets of slots take turns, one a call: the three calls there may be before a barrier and the one
// behind it have different ones. `total` has a barrier on either side.
struct alignas(16) BlockStorage {
  static constexpr std::size_t kSlotBytes = 48;  // six 64-bit numbers, of cut_lines()
  static constexpr std::int32_t kSets = 4;

  std::byte slots[kSets][kWarps * kSlotBytes];
  alignas(8) std::byte total[kSlotBytes];
};

// Numbers of another lane.
struct FromBelow {
  std::int32_t step;
  template <class T>
  __device__ T operator()(T number) const {
    return __shfl_up_sync(kAll, number, static_cast<unsigned>(step));
  }
  __device__ std::int64_t operator()(std::int64_t number) const {
    return __shfl_up_sync(kAll, static_cast<long long>(number), static_cast<unsigned>(step));
  }
};
struct FromAbove {
  template <class T>
  __device__ T operator()(T number) const {
    return __shfl_down_sync(kAll, number, 1);
  }
  __device__ std::int64_t operator()(std::int64_t number) const {
    return __shfl_down_sync(kAll, static_cast<long long>(number), 1);
  }
};

// Sums over a warp. The hardware adds 32-bit numbers; longer ones go in three parts, whose sums do not overflow.
struct WarpSum {
  __device__ std::uint32_t operator()(std::uint32_t number) const { return __reduce_add_sync(kAll, number); }
  __device__ std::int32_t operator()(std::int32_t number) const { return __reduce_add_sync(kAll, number); }
  __device__ std::int64_t operator()(std::int64_t number) const {
    constexpr std::int32_t kPart = 22;
    constexpr std::uint32_t kMask = (1u << kPart) - 1;
    const std::uint32_t low = __reduce_add_sync(kAll, static_cast<std::uint32_t>(number) & kMask);
    const std::uint32_t middle = __reduce_add_sync(kAll, static_cast<std::uint32_t>(number >> kPart) & kMask);
    const std::uint32_t high = __reduce_add_sync(kAll, static_cast<std::uint32_t>(number >> 2 * kPart));
    return (std::int64_t{high} << 2 * kPart) + (std::int64_t{middle} << kPart) + low;
  }
};

struct Halves {
  std::uint32_t high, low;

  __device__ explicit Halves(std::int64_t number)
      : high(static_cast<std::uint32_t>(number >> 32)), low(static_cast<std::uint32_t>(number)) {}
};
__device__ inline std::int64_t join(std::uint32_t high, std::uint32_t low) {
  return static_cast<std::int64_t>(std::uint64_t{high} << 32 | low);
}

// Of numbers >= 0.
__device__ inline std::int64_t warp_max(std::int64_t number) {
  const Halves own(number);
  const std::uint32_t high = __reduce_max_sync(kAll, own.high);
  return join(high, __reduce_max_sync(kAll, own.high == high ? own.low : 0u));
}
__device__ inline std::int64_t warp_min(std::int64_t number) {
  const Halves own(number);
  const std::uint32_t high = __reduce_min_sync(kAll, own.high);
  return join(high, __reduce_min_sync(kAll, own.high == high ? own.low : ~0u));
}

// Sums of the lanes up to and with this one.
template <class T>
__device__ T warp_scan(T value, std::int32_t lane) {
#pragma unroll
  for (std::int32_t step = 1; step < kLanes; step *= 2) {
    const T below = value.map(FromBelow{step});
    if (lane >= step) value = value + below;
  }
  return value;
}

// Results of max_rows: each row was looked at by `each` warps.
struct RowMaxima {
  const std::int64_t* slots;
  std::int32_t each;

  __device__ std::int64_t operator()(std::int32_t row) const {
    std::int64_t result = 0;
#pragma unroll 4
    for (std::int32_t i = 0; i < each; ++i) result = std::max(result, slots[row * each + i]);
    return result;
  }
};

// Results that all warps left in their slots, one row behind another; joined by every warp for itself.
struct JoinedMaxima {
  const std::int64_t* slots;

  __device__ std::int64_t operator()(std::int32_t row = 0) const {
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
    return warp_max(lane < kWarps ? slots[row * kWarps + lane] : 0);
  }
};
struct JoinedSum {
  const std::int32_t* slots;

  __device__ std::int32_t operator()() const {
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
    return WarpSum{}(lane < kWarps ? slots[lane] : 0);
  }
};

struct Smallest {
  std::int32_t row;
  std::int64_t value;
};

class DeviceBlock {
 public:
  __device__ explicit DeviceBlock(BlockStorage& storage)
      : storage_(storage),
        thread_(static_cast<std::int32_t>(threadIdx.x)),
        lane_(thread_ % kLanes),
        warp_(thread_ / kLanes) {}

  template <class T, class Load, class Store>
  __device__ T scan(std::int32_t count, const Load& load, const Store& store) {
    if (count == 0) return {};
    T sum{};
    T& total = *reinterpret_cast<T*>(storage_.total);
#pragma unroll 1
    for (std::int32_t first = 0; first < count; first += kThreads) {
      const std::int32_t i = first + thread_;
      const bool busy = i - lane_ < count;  // the same for the whole warp
      T own{}, up_to{};
      if (busy) {
        if (i < count) own = load(i);
        __syncwarp();
        up_to = warp_scan(own, lane_);
      }
      T* totals = next_slots<T>();
      if (lane_ == kLanes - 1) totals[warp_] = up_to;
      __syncthreads();
      if (!busy) continue;
      T below{}, all{};
      if (lane_ < kWarps) all = totals[lane_];
      if (lane_ < warp_) below = all;
      const T before = sum + below.map(WarpSum{}) + (up_to - own);
      if (i < count) store(i, own, before);
      if (i + 1 == count) total = before + own;
      if (first + kThreads < count) sum = sum + all.map(WarpSum{});
    }
    __syncthreads();
    return total;
  }

  // A warp a row, a stretch of items a lane; an odd number, so that lanes meet different banks.
  template <class Load, class Store>
  __device__ void scan_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    if (warp_ < rows) {
      const std::int32_t each = (count + kLanes - 1) / kLanes | 1;
      const std::int32_t first = min(lane_ * each, count), end = min(first + each, count);
      TileCount own{};
#pragma unroll 4
      for (std::int32_t i = first; i < end; ++i) own.tiles += static_cast<std::uint32_t>(load(warp_, i));
      __syncwarp();
      const TileCount up_to = warp_scan(own, lane_);
      auto before = static_cast<std::int32_t>(up_to.tiles - own.tiles);
#pragma unroll 4
      for (std::int32_t i = first; i < end; ++i) {
        store(warp_, i, before);
        before += load(warp_, i);
      }
      if (lane_ == kLanes - 1) store(warp_, count, before);
    }
    __syncthreads();
  }

  // The warps are shared out among at most as many rows: each gets 2^shift.
  template <class Fn>
  __device__ RowMaxima max_rows(std::int32_t rows, std::int32_t count, const Fn& fn) {
    const std::int32_t shift = __clz(rows - 1) - __clz(kWarps - 1);
    const std::int32_t each = 1 << shift, row = warp_ >> shift;
    std::int64_t value = 0;
    if (row < rows)
#pragma unroll 1
      for (std::int32_t i = (warp_ - row * each) * kLanes + lane_; i < count; i += each * kLanes)
        value = std::max(value, fn(row, i));
    __syncwarp();
    value = warp_max(value);
    auto* slots = next_slots<std::int64_t>();
    if (lane_ == 0) slots[warp_] = value;
    __syncthreads();
    return {slots, each};
  }

  // The last lane only makes what the one before it needs.
  template <std::int32_t K, class Make, class Fn>
  __device__ JoinedMaxima max_between(std::int32_t count, const Make& make, const Fn& fn, std::int32_t rows = K) {
    static_assert(K * sizeof(std::int64_t) <= BlockStorage::kSlotBytes);
    constexpr std::int32_t kStep = kLanes - 1;
    std::int64_t values[K] = {};
#pragma unroll 1
    for (std::int32_t first = next_warps((count + kStep - 1) / kStep) * kStep; first < count; first += kWarps * kStep) {
      const std::int32_t i = first + lane_;
      decltype(make(0)) item{};
      if (i <= count) item = make(i);
      __syncwarp();
      const auto next = item.map(FromAbove{});
      if (lane_ < kStep && i < count)
#pragma unroll
        for (std::int32_t k = 0; k < K; ++k)
          if (k < rows) values[k] = std::max(values[k], fn(k, item, next));
    }
    __syncwarp();
    auto* slots = next_slots<std::int64_t>();
#pragma unroll
    for (std::int32_t k = 0; k < K; ++k) {
      if (k >= rows) break;
      const std::int64_t value = warp_max(values[k]);
      if (lane_ == 0) slots[k * kWarps + warp_] = value;
    }
    return {slots};
  }

  template <class Fn>
  __device__ JoinedMaxima max_of(std::int32_t count, const Fn& fn) {
    std::int64_t value = 0;
#pragma unroll 1
    for (std::int32_t i = next_warps((count + kLanes - 1) / kLanes) * kLanes + lane_; i < count; i += kThreads)
      value = std::max(value, fn(i));
    __syncwarp();
    value = warp_max(value);
    auto* slots = next_slots<std::int64_t>();
    if (lane_ == 0) slots[warp_] = value;
    return {slots};
  }

  // By few warps: an item is little work.
  template <class Fn>
  __device__ JoinedSum sum_of(std::int32_t count, const Fn& fn) {
    constexpr std::int32_t kFew = kWarps / 4;
    const std::int32_t warp = next_warps(kFew);
    std::int32_t sum = 0;
    if (warp < kFew)
#pragma unroll 4
      for (std::int32_t i = warp * kLanes + lane_; i < count; i += kFew * kLanes) sum += fn(i);
    __syncwarp();
    sum = WarpSum{}(sum);
    auto* slots = next_slots<std::int32_t>();
    if (lane_ == 0) slots[warp_] = sum;
    return {slots};
  }

  template <class Fn>
  __device__ bool all(std::int32_t count, const Fn& fn) {
    bool every = true;
    for_each(count, [&](std::int32_t i) { every &= fn(i); });
    return __syncthreads_and(every) != 0;
  }

  __device__ void sync() {
    __syncthreads();
    given_ = 0;
  }

  template <class Fn>
  __device__ void for_each(std::int32_t count, const Fn& fn) {
#pragma unroll 1
    for (std::int32_t i = thread_; i < count; i += kThreads) fn(i);
  }

  // Three threads a row: with as many workers as multiprocessors they are all of the block's, and rows are short.
  template <class Fn>
  __device__ void for_each_row(std::int32_t rows, const Fn& fn) {
    constexpr std::int32_t kEach = 3;
    if (thread_ < kThreads / kEach * kEach)
#pragma unroll 1
      for (std::int32_t row = thread_ / kEach; row < rows; row += kThreads / kEach) fn(row, thread_ % kEach, kEach);
  }

  // At most a row a warp.
  template <class Load, class Store>
  __device__ void sum_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    if (warp_ >= rows) return;
    std::int32_t sum = 0;
#pragma unroll 4
    for (std::int32_t i = lane_; i < count; i += kLanes) sum += load(warp_, i);
    __syncwarp();
    sum = WarpSum{}(sum);
    if (lane_ == 0) store(warp_, sum);
  }

  // A row a warp, the last ones first: they have the least to do so far.
  template <class Load, class Store>
  __device__ void fold_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    const std::int32_t row = kWarps - 1 - warp_;
    if (row >= rows) return;
    plan::Even all;
#pragma unroll 1
    for (std::int32_t i = lane_; i < count; i += kLanes) all = all + load(row, i);
    __syncwarp();
    all = {WarpSum{}(all.pieces), warp_max(all.longest)};
    if (lane_ == 0) store(row, all);
  }

  template <class Fn>
  __device__ std::int32_t count_true(std::int32_t rows, const Fn& fn) {
    return __popc(__ballot_sync(kAll, lane_ < rows && fn(lane_)));
  }

  template <class Fn>
  __device__ Smallest first_smallest(std::int32_t rows, const Fn& fn) {
    const std::int64_t value = lane_ < rows ? fn(lane_) : INT64_MAX;
    __syncwarp();
    const std::int64_t smallest = warp_min(value);
    return {__ffs(static_cast<int>(__ballot_sync(kAll, value == smallest))) - 1, smallest};
  }

  __device__ void store(WorkRecord* where, const WorkRecord& record) {
    auto* pairs = reinterpret_cast<int2*>(where);
    pairs[0] = make_int2(record.request, record.partial_row);
    pairs[1] = make_int2(record.row_begin, record.row_end);
    pairs[2] = make_int2(record.kv_begin, record.kv_end);
    pairs[3] = make_int2(record.kv_after, record.tile);
  }

  // In the warp that most often has no record to write.
  __device__ bool leader() const { return thread_ == kThreads - 1; }

 private:
  template <class T>
  __device__ T* next_slots() {
    static_assert(sizeof(T) <= BlockStorage::kSlotBytes);
    turn_ = (turn_ + 1) % BlockStorage::kSets;
    return reinterpret_cast<T*>(storage_.slots[turn_]);
  }

  // This warp's number when `warps` of them, behind those that got work since the last barrier, are the first.
  __device__ std::int32_t next_warps(std::int32_t warps) {
    const std::int32_t number = (warp_ - given_) & (kWarps - 1);
    given_ += warps;
    return number;
  }

  BlockStorage& storage_;
  const std::int32_t thread_, lane_, warp_;
  std::int32_t turn_ = 0, given_ = 0;
};

}  // namespace latte::cuda::planner
