// O = softmax(scale * Q K^T) V for up to 64 rows a thread block, rows on the wide side of the matrix instruction. V is
// the first `latent` columns of K.
//
//   pages --loader--> kv[5 stages] --kv_full--> scorer: S = Q K^T, P = 2^(S - reference)
//                           ^                         | P over the block's rope group
//                           +---kv_empty--- values <--p_full: O[64][latent / 2] += P V, each a half of the columns
//   scorer --sums_full--> values: divide, store --sums_empty--> scorer
//
// Registers decide the roles. Most of Q lies in the scorer's registers, which leaves shared memory for five stages
// where Q in shared memory would leave four, and halves what a score product reads from it. While the
// scorer turns block b into probabilities, the tensor cores multiply the values of block b - 1.
//
//   role        registers                                        a thread
//   scorer      Q 96, S 16, the rest 56                          168
//   values x 2  O 128, the rest 32                               160
//   loader      one warp of four works                           24
//   shared      5 x 36,864 kv + 24,576 of Q + tables             (latent 512)
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/sm90/decode/instances.cuh"
#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/merge.cuh"

namespace latte::cuda::sm90::plain {

inline constexpr int kStages = 5;
inline constexpr int kSums = 2;
inline constexpr int kSharedGroups = 3;  // column groups of Q in shared memory, the last ones; the others in registers
inline constexpr int kThreads = 4 * kWarpgroup;
inline constexpr int kLoaderRegisters = 24;
inline constexpr int kScorerRegisters = 168;
inline constexpr int kValueRegisters = 160;
static_assert(kLoaderRegisters + kScorerRegisters + 2 * kValueRegisters <= 4 * launch_registers(kThreads));
inline constexpr std::uint32_t kBarrierScorer = 2;
inline constexpr int kWarpArrivals = 4;  // a lane of each warp of a warpgroup

template <class Config>
struct alignas(1024) Storage {
  std::byte kv[kStages][Config::kStageBytes];
  std::byte query[kSharedGroups][Config::kRows * kRowBytes];
  float factor[kStages][Config::kRows];  // what a block did to a row's reference: 2^(old - new)
  std::int32_t moved[kStages][4];        // whether any of a warp's rows did
  RowResult results[kSums][Config::kRows];
  bool any_split;  // whether this thread block has a piece of a split tile
  prim::Barrier kv_full[kStages], kv_empty[kStages], p_full[kStages];
  prim::Barrier sums_full[kSums], sums_empty[kSums];
};

// Fragments of a thread, here as in all of this file: rows 16 warp + lane / 4 and 8 further on; for each 8 columns j,
// columns 8j + 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ int fragment_row(const Lane& at, int h) { return 16 * at.warp + at.lane / 4 + 8 * h; }

template <class Config>
class Scorer {
 public:
  static_assert(Config::kRows == 64 && Config::kTokens == 32);
  using Half = typename Config::Half;
  static constexpr int kRegisterGroups = Config::kGroups - kSharedGroups;
  using Scores = float[Config::kTokens / 2];

  __device__ Scorer(Storage<Config>& s, const DecodeCall& call)
      : s_(s), call_(call), scale_log2_(call.scale * (1 / kLn2)) {}

  // Rows and bounds of the piece first; then only its KV range is needed.
  __device__ void begin(const Piece& piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference_[h] = minus_infinity();
      sum_[h] = 0;
      bound_[h] = row_bound(call_, piece, piece.first_row() + min(fragment_row(at_, h), piece.rows - 1));
      asm volatile("" : "+r"(bound_[h]));  // now, before the query takes the registers
    }
    load_query(piece);
  }
  __device__ void run(std::int32_t kv_begin, std::int32_t kv_end) {
    for (std::int32_t first = kv_begin; first < kv_end; first += Config::kTokens, ++ring_.count)
      block(first, kv_end, first > kv_begin);
    if (kv_begin < kv_end) {
      finish_probabilities();
      hand_over();
    }
    give_sums();
  }

 private:
  __device__ void load_query(const Piece& piece) {
    sync();  // nobody reads the query of the piece before any more
    // Rows past the last repeat it: loads without a question, and what comes of them is not stored.
    const int last = piece.rows - 1;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = 0; i < Config::kRows * 8 / kWarpgroup; ++i) {
      const int r = (thread + i * kWarpgroup) / 8, chunk = thread % 8;
      const QueryRow<Half> row(call_, piece, min(r, last));
#pragma unroll
      for (int group = 0; group < kSharedGroups; ++group) {
        const Half* from = group + 1 == kSharedGroups ? row.rope : row.nope + (kRegisterGroups + group) * 64;
        prim::copy_16(prim::shared_address(s_.query[group]) + r * kRowBytes + (chunk ^ (r % 8)) * 16, from + chunk * 8);
      }
    }
    const QueryRow<Half> rows[2] = {{call_, piece, min(fragment_row(at_, 0), last)},
                                    {call_, piece, min(fragment_row(at_, 1), last)}};
#pragma unroll
    for (int k = 0; k < kRegisterGroups * 4; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 16 * k + at_.lane % 4 * 2 + e / 2 * 8;
        query_[k][e] = __ldg(reinterpret_cast<const std::uint32_t*>(rows[e % 2].nope + column));
      }
    prim::wait_copies();
    prim::fence_async_proxy();
    sync();
  }

  __device__ void block(std::int32_t first, std::int32_t kv_end, bool after_another) {
    const int stage = ring_.slot();
    Scores scores;
    s_.kv_full[stage].wait(ring_.full());
    issue_scores(scores, stage);
    if (after_another) finish_probabilities();
    prim::wait_products<0>();
    prim::pin(scores);
    // The values get the probabilities of the block before only now that this one's scores are done: the tensor cores
    // then work on them during this block's softmax, instead of sharing their time with its scores.
    if (after_another) hand_over();
    softmax(scores, stage, first);
    if (kv_end - first < Config::kTokens) zero_tail<Config>(s_.kv[stage], kv_end - first);
  }

  // Of the block before: what the tensor cores read next is in shared memory.
  __device__ void finish_probabilities() {
    prim::fence_async_proxy();
    __syncwarp();
  }
  __device__ void hand_over() {
    if (at_.lane == 0) s_.p_full[Ring<kStages>{ring_.count - 1}.slot()].arrive();
  }

  __device__ void issue_scores(Scores& scores, int stage) {
    using namespace prim;
    const std::uint64_t keys = operand(uniform(shared_address(s_.kv[stage])), Config::kSlabBytes);
    const std::uint64_t query = operand(uniform(shared_address(s_.query)), kAtomBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < kRegisterGroups * 4; ++k)
      multiply<Half, 0>(scores, query_[k], moved(keys, k / 4 * kAtomBytes + k % 4 * 32), k > 0);
#pragma unroll
    for (int k = 0; k < kSharedGroups * 4; ++k)
      multiply<Half, 0, 0>(scores, moved(query, k / 4 * Config::kRows * kRowBytes + k % 4 * 32),
                           moved(keys, (kRegisterGroups + k / 4) * kAtomBytes + k % 4 * 32));
    commit_products();
  }

  __device__ void softmax(Scores& x, int stage, int first) {
    // Masked in every block, not only where it matters: a branch costs the compiler more registers than there are.
    float maximum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t bound = bound_[h] - first - at_.lane % 4 * 2;
      maximum[h] = minus_infinity();
#pragma unroll
      for (int j = 0; j < Config::kTokens / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& value = x[4 * j + 2 * h + c];
          value = 8 * j + c < bound ? value * scale_log2_ : minus_infinity();
          maximum[h] = fmaxf(maximum[h], value);
        }
    }
    const bool above = maximum[0] > reference_[0] + kSlack || maximum[1] > reference_[1] + kSlack;
    const bool moves = __any_sync(~0u, above);
    if (moves) move(maximum, stage);
    if (at_.lane == 0) s_.moved[stage][at_.warp] = moves;

    const std::uint32_t to = probability_row<Config>(s_.kv[stage], 0, 16 * at_.warp + at_.lane % 16);
    const float base[2] = {usable(reference_[0]), usable(reference_[1])};
#pragma unroll
    for (int j = 0; j < Config::kTokens / 8; ++j) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = exp2_fast(x[4 * j + e] - base[e / 2]);
      sum_[0] += p[0] + p[1];
      sum_[1] += p[2] + p[3];
      prim::store_matrix_x2(to + j * Config::kSlabBytes, pack<Half>(p[0], p[1]), pack<Half>(p[2], p[3]));
    }
  }

  __device__ void move(const float (&maximum)[2], int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_maximum = fmaxf(maximum[h], __shfl_xor_sync(~0u, maximum[h], 1));
      row_maximum = fmaxf(row_maximum, __shfl_xor_sync(~0u, row_maximum, 2));
      const Reference next = follow(reference_[h], row_maximum);
      sum_[h] *= next.factor;
      reference_[h] = next.value;
      if (at_.lane % 4 == 0) s_.factor[stage][fragment_row(at_, h)] = next.factor;
    }
  }

  __device__ void give_sums() {
    const int slot = sums_.slot();
    s_.sums_empty[slot].wait(sums_.empty());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 2);
      if (at_.lane % 4 == 0) s_.results[slot][fragment_row(at_, h)] = RowResult(reference_[h], sum_[h]);
    }
    __syncwarp();
    if (at_.lane == 0) s_.sums_full[slot].arrive();
    ++sums_.count;
  }

  __device__ static void sync() { prim::named_sync(kBarrierScorer, kWarpgroup); }

  Storage<Config>& s_;
  const DecodeCall& call_;
  const Lane at_;
  const float scale_log2_;
  Ring<kStages> ring_;
  Ring<kSums> sums_;
  std::uint32_t query_[kRegisterGroups * 4][4];
  float reference_[2], sum_[2];
  std::int32_t bound_[2];
};

template <class Config>
class Values {
 public:
  // Columns of one product: with 256 the compiler wants more registers than there are.
  static constexpr int kWide = 128;
  static constexpr int kParts = Config::kLatent / 2 / kWide;

  __device__ Values(Storage<Config>& s) : s_(s) {}

  __device__ void run(std::int32_t blocks) {
#pragma unroll
    for (int e = 0; e < kWide / 2; ++e)
#pragma unroll
      for (int part = 0; part < kParts; ++part) o_[part][e] = 0;
    for (std::int32_t b = 0; b < blocks; ++b, ++ring_.count) block();
  }

  __device__ void store(const Sink& sink) {
    const int slot = sums_.slot();
    s_.sums_full[slot].wait(sums_.full());
    sink.with_type([&](auto element) { store_as<decltype(element)>(sink, slot); });
    __syncwarp();
    if (at_.lane == 0) s_.sums_empty[slot].arrive();
    ++sums_.count;
  }

 private:
  template <class Element>
  __device__ void store_as(const Sink& sink, int slot) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = fragment_row(at_, h);
      const RowResult result = s_.results[slot][r];
      if (at_.side == 0 && at_.lane % 4 == 0) sink.put_lse(r, result.lse);
      auto* row = reinterpret_cast<Element*>(sink.row(r, Config::kLatent));
      // Rows are the same for the four lanes that exchange values below.
      if (row == nullptr) continue;
      row += at_.side * (Config::kLatent / 2);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int j = 0; j < kWide / 8; j += 4)
          store_32_columns(row + part * kWide + 8 * j, o_[part], j, h, result.inverse);
    }
  }

  // Four lanes hold 8 columns of each of 4 neighbours j. 16-bit values are exchanged so that each lane stores 8 columns
  // in a row; 32-bit pairs make whole sectors as they are.
  template <class Element>
  __device__ void store_32_columns(Element* to, const float (&o)[kWide / 2], int j, int h, float scale) const {
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        reinterpret_cast<float2*>(to + 8 * i)[at_.lane % 4] =
            make_float2(o[4 * (j + i) + 2 * h] * scale, o[4 * (j + i) + 2 * h + 1] * scale);
    } else {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack<Element>(o[4 * (j + i) + 2 * h] * scale, o[4 * (j + i) + 2 * h + 1] * scale);
      transpose_in_fours(words, at_.lane);
      reinterpret_cast<uint4*>(to)[at_.lane % 4] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ void block() {
    using namespace prim;
    const int stage = ring_.slot();
    s_.p_full[stage].wait(ring_.full());
    if (s_.moved[stage][at_.warp]) rescale(stage);
    const std::uint32_t kv = uniform(shared_address(s_.kv[stage]));
    const std::uint64_t probabilities = bricks(kv + Config::kRopeOffset, 128, Config::kSlabBytes);
    const std::uint64_t values =
        operand(kv + uniform(at_.side * Config::kHalfGroups * kAtomBytes), Config::kSlabBytes, kAtomBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < Config::kTokens / 16; ++k)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        multiply<typename Config::Half, 0, 1>(
            o_[part], moved(probabilities, k * 2 * Config::kSlabBytes),
            moved(values, part * (kWide / 64) * kAtomBytes + k * 2 * Config::kSlabBytes));
    commit_products();
    wait_products<0>();
    pin_values();
    if (at_.lane == 0) s_.kv_empty[stage].arrive();
  }

  __device__ void pin_values() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) prim::pin(o_[part]);
  }

  __device__ void rescale(int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = s_.factor[stage][fragment_row(at_, h)];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int j = 0; j < kWide / 8; ++j) {
          o_[part][4 * j + 2 * h] *= factor;
          o_[part][4 * j + 2 * h + 1] *= factor;
        }
    }
  }

  Storage<Config>& s_;
  const Lane at_;
  Ring<kStages> ring_;
  Ring<kSums> sums_;
  float o_[kParts][kWide / 2];
};

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    decode_plain(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap map,
                 const __grid_constant__ LaunchShape shape) {
  static_assert(sizeof(Storage<Config>) <= kSharedLimit);
  extern __shared__ __align__(1024) std::byte shared[];
  auto& s = *reinterpret_cast<Storage<Config>*>(shared);
  if (threadIdx.x == 0) {
    prim::prefetch_map(map);
    s.any_split = false;
    for (int stage = 0; stage < kStages; ++stage) {
      s.kv_full[stage].init(1);
      s.kv_empty[stage].init(2 * kWarpArrivals);
      s.p_full[stage].init(kWarpArrivals);
    }
    for (int slot = 0; slot < kSums; ++slot) {
      s.sums_full[slot].init(kWarpArrivals);
      s.sums_empty[slot].init(2 * kWarpArrivals);
    }
    prim::fence_barrier_init();
  }
  __syncthreads();
  prim::wait_previous_launch();
  prim::allow_next_launch();
  const Share share(call.plan, shape.blocks_a_worker);

  if (threadIdx.x < kWarpgroup) {
    prim::grow_registers<kScorerRegisters>();
    Scorer<Config> scorer(s, call);
    for (std::int32_t i = share.begin; i < share.end; ++i) {
      const Piece piece = share.piece(i);
      if (piece.rows <= 0) continue;
      scorer.begin(piece);
      scorer.run(piece.record.kv_begin, piece.record.kv_end);
    }
  } else if (threadIdx.x >= 3 * kWarpgroup) {
    prim::shrink_registers<kLoaderRegisters>();
    if (threadIdx.x < 3 * kWarpgroup + 32)
      load_blocks<Config, kStages>(s, call.kv, share, shape, BoxLoader<Config>(map, shape));
  } else {
    prim::grow_registers<kValueRegisters>();
    Values<Config> values(s);
    for (std::int32_t i = share.begin; i < share.end; ++i) {
      {
        const Piece piece = share.piece(i);
        if (piece.rows <= 0) continue;
        values.run(piece.template blocks<Config>());
      }
      const Piece piece = share.piece(i);
      values.store(Sink(call, piece));
      if (!piece.split()) continue;
      if (threadIdx.x == kWarpgroup) s.any_split = true;
      TileMerge<Config>::announce(call, piece, share);
    }
    merge_sync();
    if (s.any_split) merge_all<Config>(call, share, s.kv[0]);
  }
}

}  // namespace latte::cuda::sm90::plain
