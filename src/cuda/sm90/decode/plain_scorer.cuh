// Of the plain kernel (plain.cuh): what its roles share, and the scorer, which makes probabilities of a block's scores.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/math.cuh"
#include "cuda/sm90/decode/plain_store.cuh"

namespace latte::cuda::sm90::plain {

inline constexpr int kStages = 3;
inline constexpr int kSums = 2;
inline constexpr int kThreads = 4 * kWarpgroup;
inline constexpr int kScorerRegisters = 168, kValueRegisters = 160, kLoaderRegisters = 24;
static_assert(kScorerRegisters + 2 * kValueRegisters + kLoaderRegisters <= 4 * launch_registers(kThreads));
inline constexpr int kBarrierScorer = 2;
inline constexpr int kLateProducts = 12;  // of a block's scores, still running when the values are let go on

// Where the column groups of Q lie: the first 7 of 9 (3 of 5) in the scorer's registers, the others in shared memory.
template <class Config>
struct QueryPlaces {
  static constexpr int kInRegisters = Config::kGroups * 7 / 9;
  static constexpr int kShared = Config::kGroups - kInRegisters;
  // Groups for the registers come through shared memory, as far as there is room, or else straight from memory.
  static constexpr int kBuffers = Config::kGroups < 7 ? Config::kGroups : 7;
  static constexpr int kStaged = kBuffers - kShared;

  // The 16 columns that a block's n-th product of scores is about. Those with Q in shared memory read more of that than
  // the multiplication gives it time for, so they are spread between the others: every third, until there are no more
  // (with 5 groups 8 of 20).
  static constexpr int column(int n) {
    constexpr int kFromShared = kShared * 4, kAll = Config::kGroups * 4;
    constexpr int kSpread = 3 * kFromShared < kAll ? 3 * kFromShared : kAll;
    const auto shared_before = [](int m) { return (m < kSpread ? m : kSpread) * kFromShared / kSpread; };
    const int before = shared_before(n);
    return shared_before(n + 1) > before ? kInRegisters * 4 + before : n - before;
  }
};

template <class Config>
struct alignas(1024) Storage {
  std::byte kv[kStages][Config::kStageBytes];
  std::byte query[QueryPlaces<Config>::kBuffers][Config::kRows * kRowBytes];
  float factor[kStages][Config::kRows];  // what a block did to a row's reference: 2^(old - new)
  std::uint32_t moved[kStages][4];       // the last block that did so to any of a warp's rows, counted from 1
  std::int32_t bound[Config::kRows];     // tokens a row sees
  RowResult results[kSums][Config::kRows];
  bool any_slice;  // whether this thread block joins a slice of some tile
  prim::Barrier kv_full[kStages][Config::kParts], kv_empty[kStages][Config::kUnits], p_full[kStages];
  prim::Barrier sums_full[kSums], sums_empty[kSums], met;
  prim::Barrier first_query, fetched;

  // Queries are more bytes than a block, and nothing can begin without them: further blocks would only be in their way.
  __device__ void await_queries() { first_query.wait(0); }
};

// kThreadsLoad: threads fill the stages, not the copy engine.
template <class Config, bool kThreadsLoad>
class Scorer {
 public:
  static_assert(Config::kRows == 64 && Config::kTokens == 48 && Config::kParts == 1);
  using Half = typename Config::Half;
  using Places = QueryPlaces<Config>;
  static constexpr int kInRegisters = Places::kInRegisters, kShared = Places::kShared, kStaged = Places::kStaged;
  using Scores = float[Config::kTokens / 2];

  __device__ Scorer(Storage<Config>& s, const KernelCall& call)
      : s_(s), call_(call), scale_log2_(call.scale * (1 / kLn2)) {}

  // Rows and bounds of the piece first; then only its KV range is needed.
  __device__ void begin(const Piece& piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows that are not there have queries of zero, and no score moves their reference: probabilities of zero.
      // Products with zeros take less of the power that limits the clock. Others begin below every score but -inf:
      // 2^(-inf - reference) is 0 without asking. (Tokens that a row does not see are left out of it by themselves.)
      reference_[h] = piece.has(fragment_row(at_, h)) ? kLowest : infinity();
      sum_[h] = weight_[h] = 0;
    }
    load_rows(piece);
  }
  __device__ void run(std::int32_t kv_begin, std::int32_t kv_end) {
    std::int32_t first = kv_begin;
    // Two loops, so that the first has no mask and no tail to jump over: instructions come late behind a jump.
    for (; first + Config::kTokens <= seen_by_all_; first += Config::kTokens) block<false>(first, first > kv_begin);
    for (; first < kv_end; first += Config::kTokens) {
      block<true>(first, first > kv_begin);
      if (kv_end - first < Config::kTokens) zero_tail<Config>(s_.kv[ring_.back(1).slot()], kv_end - first);
    }
    if (kv_begin < kv_end) {
      finish_probabilities();
      hand_over();
    }
    give_sums();
  }

 private:
  // What rows see, and Q to where the products want it. Buffers of shared memory hold the last kShared column groups
  // for good, and the first kStaged on their way to registers.
  __device__ void load_rows(const Piece& piece) {
    const std::int32_t bound = row_bound(call_, piece, piece.packed_row(threadIdx.x % Config::kRows));
    after_previous_launch();  // it may have written the query
    sync();                   // nobody reads the query, or the bounds, of the piece before any more
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < Config::kRows) s_.bound[thread] = bound;
#pragma unroll
    for (int i = 0; i < Config::kRows * 8 / kWarpgroup; ++i) {
      // Each thread block begins at another row: those of one tile would ask L2 for the same lines at the same time.
      const int r = (thread / 8 + i * (kWarpgroup / 8) + static_cast<int>(blockIdx.x)) % Config::kRows;
      const int chunk = thread % 8;
      const QueryRow<Half> row(call_, piece, r);
#pragma unroll
      for (int buffer = 0; buffer < kShared + kStaged; ++buffer) {
        const Half* from = buffer + 1 == kShared ? row.rope
                           : buffer < kShared    ? row.nope + (kInRegisters + buffer) * 64
                                                 : row.nope + (buffer - kShared) * 64;
        prim::copy_16(query_chunk(buffer, r, chunk), from + chunk * 8, piece.has(r));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool there = piece.has(fragment_row(at_, h));
      const QueryRow<Half> row(call_, piece, fragment_row(at_, h));
      const auto* from = reinterpret_cast<const std::uint32_t*>(row.nope) + at_.lane % 4;
      asm volatile("" : "+l"(from));  // one address and constant offsets; the compiler would make one for each load
#pragma unroll
      for (int k = kStaged * 4; k < kInRegisters * 4; ++k) {
        // Not constant: an overlapped launch may still have written it.
        query_[k][h] = there ? __ldcg(from + 8 * k) : 0;
        query_[k][h + 2] = there ? __ldcg(from + 8 * k + 4) : 0;
      }
    }
    prim::wait_copies();
    prim::fence_async_proxy();
    if (first_) s_.first_query.arrive();
    first_ = false;
    sync();
    seen_by_all_ = __reduce_min_sync(~0u, min(s_.bound[at_.lane], s_.bound[at_.lane + 32]));
#pragma unroll
    for (int k = 0; k < kStaged * 4; ++k)
      prim::load_matrix_x4(query_[k],
                           query_chunk(kShared + k / 4, 16 * at_.warp + at_.lane % 16, k % 4 * 2 + at_.lane / 16));
  }
  // 16 bytes of a row in a buffer, where the swizzle has them.
  __device__ std::uint32_t query_chunk(int buffer, int row, int chunk) const {
    return prim::shared_address(s_.query[buffer]) + row * kRowBytes + (chunk ^ (row % 8)) * 16;
  }

  template <bool kMasked>
  __device__ void block(std::int32_t first, bool after_another) {
    const int stage = ring_.slot();
    Scores scores;
    if (!landed_) {
      s_.kv_full[stage][0].wait(ring_.full());
      if constexpr (kThreadsLoad) prim::fence_async_proxy();
    }
    issue_scores(scores, stage);
    // The values get the probabilities of the block before only now that most of this one's scores are done: the tensor
    // cores then work on them during this block's softmax, instead of sharing their time with its scores.
    finish_probabilities();
    prim::wait_products<1>();
    hand_over(after_another);
    ++ring_.count;
    landed_ = s_.kv_full[ring_.slot()][0].passed(ring_.full());
    if constexpr (kThreadsLoad) prim::fence_async_proxy();  // of a block that has: here it holds nothing up
    prim::wait_products<0>();
    prim::pin(scores);
    softmax<kMasked>(scores, stage, first);
  }

  // Of the block before: what the tensor cores read next is in shared memory.
  __device__ void finish_probabilities() { prim::fence_async_proxy(); }
  __device__ void hand_over(bool any = true) { s_.p_full[ring_.back(1).slot()].arrive_if(any); }

  __device__ void issue_scores(Scores& scores, int stage) {
    using namespace prim;
    const std::uint64_t keys = operand(uniform(shared_address(s_.kv[stage])), Config::kSlabBytes);
    const std::uint64_t query = operand(uniform(shared_address(s_.query)), kAtomBytes);
    begin_products();
#pragma unroll
    for (int n = 0; n < Config::kGroups * 4; ++n) {
      if (n == Config::kGroups * 4 - kLateProducts) commit_products();  // two groups: the first may be waited for alone
      const int k = Places::column(n);
      const std::uint64_t key = moved(keys, k / 4 * kAtomBytes + k % 4 * 32);
      if (k < kInRegisters * 4)
        multiply<Half, 0>(scores, query_[k % (kInRegisters * 4)], key, n > 0);
      else
        multiply<Half, 0, 0>(scores, moved(query, (k / 4 - kInRegisters) * Config::kRows * kRowBytes + k % 4 * 32), key,
                             n > 0);
    }
    commit_products();
  }

  // Masked and not, probabilities are the same operations on the same numbers: 2^(score * scale - reference).
  template <bool kMasked>
  __device__ void softmax(Scores& x, int stage, int first) {
    std::int32_t bound[2] = {};
    if constexpr (kMasked)
      for (int h = 0; h < 2; ++h) bound[h] = s_.bound[fragment_row(at_, h)] - first - at_.lane % 4 * 2;
    const auto seen = [&](int j, int h, int c) { return 8 * j + c < bound[h]; };
    float maximum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[2];  // two chains, so that one need not wait for the other
#pragma unroll
      for (int j = 0; j < Config::kTokens / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float value = !kMasked || seen(j, h, c) ? x[4 * j + 2 * h + c] : minus_infinity();
          part[c] = j == 0 ? value : fmaxf(part[c], value);
        }
      maximum[h] = fmaxf(part[0], part[1]) * scale_log2_;  // it is positive, and rounding keeps the order
    }
    const bool above = maximum[0] > reference_[0] + kMaxLag || maximum[1] > reference_[1] + kMaxLag;
    if (__any_sync(~0u, above)) move(maximum, stage);

    const std::uint32_t to = probability_row<Config>(s_.kv[stage], at_.lane / 16, 16 * at_.warp + at_.lane % 16);
#pragma unroll
    for (int j = 0; j < Config::kTokens / 8; j += 2) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2;
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          p[c] = exp2_fast(fmaf(x[4 * (j + i / 2) + 2 * h + c], scale_log2_, -reference_[h]));
          if (kMasked && !seen(j + i / 2, h, c)) p[c] = 0;
        }
        words[i] = pack<Half>(p[0], p[1]);
        sum_[h] += p[0] + p[1];
      }
      prim::store_matrix_x4(to + j * Config::kSlabBytes, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 rounded = unpack<Half>(words[i]);
        weight_[i % 2] += rounded.x + rounded.y;
      }
    }
  }

  __device__ void move(const float (&maximum)[2], int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_maximum = fmaxf(maximum[h], __shfl_xor_sync(~0u, maximum[h], 1));
      row_maximum = fmaxf(row_maximum, __shfl_xor_sync(~0u, row_maximum, 2));
      const Reference next = follow(reference_[h], row_maximum);
      sum_[h] *= next.factor;
      weight_[h] *= next.factor;
      reference_[h] = next.value;
      if (at_.lane % 4 == 0) s_.factor[stage][fragment_row(at_, h)] = next.factor;
    }
    if (at_.lane == 0) s_.moved[stage][at_.warp] = ring_.count;
  }

  __device__ void give_sums() {
    const int slot = sums_.slot();
    s_.sums_empty[slot].wait(sums_.empty());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        sum_[h] += __shfl_xor_sync(~0u, sum_[h], step);
        weight_[h] += __shfl_xor_sync(~0u, weight_[h], step);
      }
      if (at_.lane % 4 == 0) s_.results[slot][fragment_row(at_, h)] = {reference_[h], sum_[h], weight_[h]};
    }
    s_.sums_full[slot].arrive();
    ++sums_.count;
  }

  __device__ static void sync() { prim::named_sync<kBarrierScorer, kWarpgroup>(); }

  Storage<Config>& s_;
  const KernelCall& call_;
  const Lane at_;
  const float scale_log2_;
  Ring<kStages> ring_;
  Ring<kSums> sums_;
  std::uint32_t query_[kInRegisters * 4][4];
  float reference_[2], sum_[2], weight_[2];  // sums of probabilities, and of what they were rounded to
  std::int32_t seen_by_all_;                 // tokens that all rows see
  bool landed_ = false;                      // the next block was there when this was last asked
  bool first_ = true;                        // no query was loaded yet
};

}  // namespace latte::cuda::sm90::plain
