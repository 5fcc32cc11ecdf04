// O = softmax(scale * Q K^T) V for few rows: keys and values take the wide side of the matrix instruction, rows the
// narrow one, so that cost follows the rows. V is the first `latent` columns of K.
//
//   pages --loader--> kv[2 stages] --kv_full--> consumers --kv_empty--> loader
//   S^T[64 tokens][rows]   = K[64][width] . Q^T          block b: by consumer warpgroup b % 2
//   P^T over the block's rope group                      --kBarrierProbabilities--> the other consumer warpgroup
//   O^T[latent / 2][rows] += V^T[latent / 2][64] . P^T   by each, for its half of the value columns
//
// A consumer's work on its block b:  scores(b) -> [values(b - 1) run meanwhile] -> softmax(b) -> values(b).
// Scores come first only if the block has landed; else the stage of b - 1 would be held while memory is idle.
//
//   warpgroup     registers                               a thread
//   loader                                                56
//   consumer x 2  O 2 x rows, S rows / 2, sums rows / 2   224
//   shared        2 x 73,728 kv + rows x 1,152 Q + tables (latent 512)
//
// A long file: what the two consumers tell each other, and when, is read as a whole.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/sm90/decode/instances.cuh"
#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/swapped_store.cuh"

namespace latte::cuda::sm90::swapped {

inline constexpr int kStages = 2;
inline constexpr int kConsumers = 2 * kWarpgroup;
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kLoaderRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert(kLoaderRegisters + 2 * kConsumerRegisters <= 3 * launch_registers(kThreads));

enum NamedBarrier {
  kBarrierConsumers = kBarrierMerge,
  kBarrierSide = 2,           // + side: one consumer warpgroup
  kBarrierProbabilities = 4,  // + stage: one consumer has written them, the other may read
};

template <class Config>
struct alignas(1024) Storage {
  static constexpr int kRows = Config::kRows;
  static constexpr int kQueryGroupBytes = kRows * kRowBytes;

  std::byte kv[kStages][Config::kStageBytes];
  std::byte query[Config::kGroups * kQueryGroupBytes];
  // What the consumers tell each other about the rows of the piece in work.
  alignas(16) std::int32_t moved[kStages][4];  // whether a block moved a reference, four times the same
  float reference[kRows];                      // log2 scale: probabilities are 2^(score - reference)
  float factor[kStages][kRows];                // what a block did to its row's reference: 2^(old - new)
  float exchange[8][kRows];                    // block maxima of the warps; at the end, sums
  float weights[8][kRows];                     // at the end: sums of rounded probabilities
  float largest[8][kRows];                     // at the end of a piece of a split tile: of the warps' values
  float stored[2][kRows];                      // at the end of a piece: what each side's values are multiplied by
  std::int32_t bound[kRows];                   // the row sees tokens before this one
  prim::Barrier kv_full[kStages][Config::kParts], kv_empty[kStages][Config::kUnits], met;

  __device__ void await_queries() {}  // they are few
};

template <class Config>
class Consumer {
 public:
  static_assert(Config::kTokens == 64);
  using Half = typename Config::Half;
  static constexpr int kRows = Config::kRows;
  using Held = HeldRows<Config, Storage<Config>>;
  static constexpr int kMine = Held::kMine;
  using Scores = float[kRows / 2];

  __device__ Consumer(Storage<Config>& s, const KernelCall& call)
      : s_(s), call_(call), scale_log2_(call.scale * (1 / kLn2)), meet_{s.met} {}

  __device__ void run(const Piece& piece) {
    begin(piece);
    const int blocks = piece.template blocks<Config>();
    for (int b = at_.side; b < blocks; b += 2) own_block(piece, b);
    if (blocks > 0 && (blocks - 1) % 2 != at_.side) {  // the last block is the other's
      add_values_of_other(ring_.ahead(blocks - 1));
      finish_values(ring_.ahead(blocks - 1));
    }
    ring_.count += blocks;
    Held{s_, at_, meet_, o_, sums_}.store(Sink(call_, piece));
  }

  __device__ Meeting& meeting() { return meet_; }

 private:
  __device__ int row(int i) const { return held_row(at_, i); }
  __device__ static constexpr int low(int i) { return held_value(i); }

  __device__ void begin(const Piece& piece) {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    after_previous_launch();  // it may have written the query
    load_query(piece, thread);
    if (thread < kRows) {
      s_.reference[thread] = minus_infinity();
      s_.bound[thread] = row_bound(call_, piece, piece.packed_row(thread));
    }
    prim::wait_copies();
    prim::fence_async_proxy();
    prim::named_sync<kBarrierConsumers, kConsumers>();
#pragma unroll
    for (int block = 0; block < Config::kHalfGroups; ++block)
#pragma unroll
      for (int e = 0; e < kRows / 2; ++e) o_[block][e] = 0;
    least_bound_ = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      sums_[i] = sums_[kMine + i] = 0;
      least_bound_ = min(least_bound_, s_.bound[row(i)]);
    }
  }

  // Query rows, group by group. Rows past the last repeat it; what comes of them is not stored.
  __device__ void load_query(const Piece& piece, int thread) {
    const int warp = thread / 32;
#pragma unroll 2
    for (int i = 0; i < kRows * 32 / kConsumers; ++i) {
      const int r = warp + i * (kConsumers / 32);
      const QueryRow<Half> from(call_, piece, r);
#pragma unroll
      for (int step = 0; step < (Config::kWidth / 8 + 31) / 32; ++step) {
        const int c = step * 32 + at_.lane;  // 16 bytes each
        if (c >= Config::kWidth / 8) continue;
        const Half* chunk = c < Config::kLatent / 8 ? from.nope + c * 8 : from.rope + (c * 8 - Config::kLatent);
        prim::copy_16(prim::shared_address(s_.query) + c / 8 * Storage<Config>::kQueryGroupBytes + r * kRowBytes +
                          ((c % 8) ^ (r % 8)) * 16,
                      chunk);
      }
    }
  }

  __device__ void own_block(const Piece& piece, int b) {
    const Ring<kStages> at = ring_.ahead(b);
    Scores scores;
    const bool landed = s_.kv_full[at.slot()][Config::kParts - 1].passed(at.full());
    if (b > 0 && !any_of_side(!landed)) {
      score(scores, at);
      add_values_of_other(ring_.ahead(b - 1));
      prim::wait_products<1>();
      publish(scores, piece, at, b);
      finish_values(ring_.ahead(b - 1));
    } else {
      if (b > 0) {
        add_values_of_other(ring_.ahead(b - 1));
        finish_values(ring_.ahead(b - 1));
      }
      score(scores, at);
      prim::wait_products<0>();
      publish(scores, piece, at, b);
    }
    if (any_moved(at.slot())) rescale(at.slot(), false);
    issue_values(at.slot());
    finish_values(at);
  }

  __device__ void score(Scores& scores, const Ring<kStages>& at) {
    using namespace prim;
    const std::uint64_t keys = operand(uniform(shared_address(s_.kv[at.slot()])), Config::kSlabBytes);
    const std::uint64_t query = operand(uniform(shared_address(s_.query)), kAtomBytes);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      s_.kv_full[at.slot()][part].wait(at.full());
      if (part == 0) fence_async_proxy();  // threads may have written the stage, all of it then
      begin_products();
#pragma unroll
      for (int k = part * Config::kPartGroups * 4; k < (part + 1) * Config::kPartGroups * 4; ++k)
        multiply<Half, 0, 0>(scores, moved(keys, Config::group_offset(k / 4) + k % 4 * 32),
                             moved(query, k / 4 * Storage<Config>::kQueryGroupBytes + k % 4 * 32), k > 0);
    }
    commit_products();
  }

  __device__ void issue_values(int stage) {
    using namespace prim;
    const std::uint32_t kv = uniform(shared_address(s_.kv[stage]));
    const std::uint32_t side = uniform(at_.side);
    const std::uint64_t values = operand(kv, Config::kSlabBytes, kAtomBytes);
    const std::uint64_t probabilities = bricks(kv + Config::kRopeOffset, 128, Config::kSlabBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < Config::kTokens / 16; ++k)
#pragma unroll
      for (int block = 0; block < Config::kHalfGroups; ++block)
        multiply<Half, 1, 0>(o_[block], moved(values, side_offset(side, block) + k * 2 * Config::kSlabBytes),
                             moved(probabilities, k * 2 * Config::kSlabBytes));
    commit_products();
  }

  // Where the block-th group of a side's value columns is.
  __device__ static std::uint32_t side_offset(std::uint32_t side, int block) {
    const int first = Config::group_offset(block), second = Config::group_offset(Config::kHalfGroups + block);
    return first + side * (second - first);
  }

  __device__ void finish_values(const Ring<kStages>& at) {
    prim::wait_products<0>();
#pragma unroll
    for (int block = 0; block < Config::kHalfGroups; ++block) prim::pin(o_[block]);
    s_.kv_empty[at.slot()][0].arrive();
  }

  // The other side scored this block: bring our sums to its reference and multiply.
  __device__ void add_values_of_other(const Ring<kStages>& at) {
    wait_for_probabilities(at.slot());
    if (any_moved(at.slot())) {
      // Scores may be in flight. Accumulators must not be touched beside them, or the compiler waits after each
      // product.
      prim::wait_products<0>();
      rescale(at.slot(), true);
    }
    issue_values(at.slot());
  }

  // Scores to probabilities, and to the other side with them.
  __device__ void publish(Scores& scores, const Piece& piece, const Ring<kStages>& at, int b) {
    prim::pin(scores);
    const int first = piece.record.kv_begin + b * Config::kTokens;
    softmax(scores, at.slot(), first);
    if (piece.record.kv_end - first < Config::kTokens) zero_tail<Config>(s_.kv[at.slot()], piece.record.kv_end - first);
    prim::fence_async_proxy();
    sync_side();
    give_probabilities(at.slot());
  }

  __device__ void softmax(Scores& x, int stage, int first) {
#pragma unroll
    for (int e = 0; e < kRows / 2; ++e) x[e] *= scale_log2_;
    if (first + Config::kTokens > least_bound_) mask(x, first);

    float reference[kMine];
    bool above = false;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      reference[i] = s_.reference[row(i)];
      above |= fmaxf(x[low(i)], x[low(i) + 2]) > reference[i] + kMaxLag;
    }
    const bool moves = any_of_side(above);
    if (moves) move(x, reference, stage);
    if (at_.lane == 0) s_.moved[stage][at_.warp] = moves;

    // Lane l names row l % 8 of the first (l < 8) or the second 8 tokens of its warp.
    const std::uint32_t to = probability_row<Config>(s_.kv[stage], 2 * at_.warp + at_.lane / 8 % 2, at_.lane % 8);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = exp2_fast(x[4 * j + e] - usable(reference[2 * j + e % 2]));
      const std::uint32_t words[2] = {pack<Half>(p[0], p[1]), pack<Half>(p[2], p[3])};
      const float2 rounded[2] = {unpack<Half>(words[0]), unpack<Half>(words[1])};
      sums_[2 * j] += p[0] + p[2];
      sums_[2 * j + 1] += p[1] + p[3];
      sums_[kMine + 2 * j] += rounded[0].x + rounded[1].x;
      sums_[kMine + 2 * j + 1] += rounded[0].y + rounded[1].y;
      prim::store_matrix_x2_transposed(to + 8 * j * 16, words[0], words[1]);
    }
  }

  __device__ void mask(Scores& x, int first) const {
    const int token = first + 16 * at_.warp + at_.lane / 4;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int bound = s_.bound[row(i)];
      if (token >= bound) x[low(i)] = minus_infinity();
      if (token + 8 >= bound) x[low(i) + 2] = minus_infinity();
    }
  }

  // Some row exceeds its reference. A row's tokens lie across lanes and warps: find all maxima, move who must.
  __device__ void move(const Scores& x, float (&reference)[kMine], int stage) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float maximum = fmaxf(x[low(i)], x[low(i) + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
      if (at_.lane < 4) s_.exchange[4 * at_.side + at_.warp][row(i)] = maximum;
    }
    sync_side();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float maximum = minus_infinity();
#pragma unroll
      for (int w = 0; w < 4; ++w) maximum = fmaxf(maximum, s_.exchange[4 * at_.side + w][row(i)]);
      const Reference next = follow(reference[i], maximum);
      sums_[i] *= next.factor;
      sums_[kMine + i] *= next.factor;
      reference[i] = next.value;
      if (at_.warp == 0 && at_.lane < 4) {
        s_.reference[row(i)] = next.value;
        s_.factor[stage][row(i)] = next.factor;
      }
    }
  }

  __device__ bool any_moved(int stage) const {
    const int4 moved = *reinterpret_cast<const int4*>(s_.moved[stage]);
    return (moved.x | moved.y | moved.z | moved.w) != 0;
  }

  // Brings what this side summed before the block to the block's reference.
  __device__ void rescale(int stage, bool sums_too) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const float factor = s_.factor[stage][row(i)];
      if (sums_too) sums_[i] *= factor, sums_[kMine + i] *= factor;
#pragma unroll
      for (int block = 0; block < Config::kHalfGroups; ++block) {
        o_[block][low(i)] *= factor;
        o_[block][low(i) + 2] *= factor;
      }
    }
  }

  __device__ void sync_side() const {
    if (at_.side == 0)
      prim::named_sync<kBarrierSide, kWarpgroup>();
    else
      prim::named_sync<kBarrierSide + 1, kWarpgroup>();
  }
  // From the side that scored the block in this stage to the other one.
  __device__ static void give_probabilities(int stage) {
    if (stage == 0)
      prim::named_arrive<kBarrierProbabilities, kConsumers>();
    else
      prim::named_arrive<kBarrierProbabilities + 1, kConsumers>();
  }
  __device__ static void wait_for_probabilities(int stage) {
    if (stage == 0)
      prim::named_sync<kBarrierProbabilities, kConsumers>();
    else
      prim::named_sync<kBarrierProbabilities + 1, kConsumers>();
  }
  __device__ bool any_of_side(bool value) const {
    return at_.side == 0 ? prim::named_any<kBarrierSide, kWarpgroup>(value)
                         : prim::named_any<kBarrierSide + 1, kWarpgroup>(value);
  }

  Storage<Config>& s_;
  const KernelCall& call_;
  const Lane at_;
  const float scale_log2_;
  Ring<kStages> ring_;
  Meeting meet_;  // both sides
  float o_[Config::kHalfGroups][kRows / 2];
  float sums_[2 * kMine];  // of probabilities, then of what they were rounded to
  std::int32_t least_bound_;
};

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    decode_swapped(const __grid_constant__ KernelCall call, const __grid_constant__ LaunchShape shape,
                   const __grid_constant__ CUtensorMap map) {
  static_assert(sizeof(Storage<Config>) <= kSharedLimit);
  extern __shared__ __align__(1024) std::byte shared[];
  auto& s = *reinterpret_cast<Storage<Config>*>(shared);
  if (threadIdx.x == 0) {
    prim::prefetch_map(map);
    for (int stage = 0; stage < kStages; ++stage) {
      for (prim::Barrier& full : s.kv_full[stage]) full.init(shape.box_slabs_log2 < 0 ? kWarpgroup : 1);
      s.kv_empty[stage][0].init(kConsumers);
    }
    s.met.init(Meeting::kArrivals);
    prim::fence_barrier_init();
  }
  const Share share = begin_share(call.plan, shape);
  if (share.empty()) return end_without_share();

  if (threadIdx.x < kWarpgroup) {
    prim::shrink_registers<kLoaderRegisters>();
    if (shape.box_slabs_log2 < 0)
      load_blocks<Config, kStages>(s, call, share, shape, TokenLoader<Config>(call.kv));
    else if (threadIdx.x < 32)
      load_blocks<Config, kStages>(s, call, share, shape, BoxLoader<Config>(map, shape));
  } else {
    prim::grow_registers<kConsumerRegisters>();
    Consumer<Config> consumer(s, call);
    bool any_split = false;
    for (std::int32_t i = share.begin; i < share.end; ++i) {
      const Piece piece = share.piece(i);
      if (piece.rows <= 0) continue;
      consumer.run(piece);
      if (!piece.split()) continue;
      any_split = true;
      merge_sync();  // the partial is stored
      announce(call, piece, share);
    }
    if (any_split) merge_slices<Config, AsHeld<Config>>(call, share, share.begin, share.end, s.kv, consumer.meeting());
  }
}

}  // namespace latte::cuda::sm90::swapped
