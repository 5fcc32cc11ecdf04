// O = softmax(scale * Q K^T) V for tiles of 128 query tokens of one head, keys and values 128 tokens at a time, from
// the last block to the first: the masked ones come first and the long loop has no mask.
//
//   q, k, v --TMA--> q, k[stages], v[stages] --full--> two consumers of 64 rows each: score; absorb; accumulate
//                         ^-----------empty-----------------'
// A consumer keeps the tensor cores busy while it absorbs: the products P V of one block are issued behind the scores
// of the next, and run while those scores become probabilities.
//
// fp8: another warp transposes values on their way (transpose.cuh).
//
//   registers (threads of 3 warpgroups, launched with 168): loaders 32 or 56 (fp8), consumers 232 or 224 (fp8):
//       scores 64, output 64, probabilities 32 (16-bit) or 16 (fp8), queries 24 (fp8), bounds, sums and addresses
//   shared memory: Storage, its sizeof is the launch's
#pragma once

#include "cuda/sm90/prefill/load.cuh"
#include "cuda/sm90/prefill/store.cuh"

namespace latte::cuda::sm90::prefill {

// The products of a consumer. Descriptors are added up in their low words, from places that are the same in all lanes.
template <class T>
class Products {
 public:
  __device__ Products(Storage<T>& storage, int side)
      : q_(prim::shared_address(storage.q) + side * 64 * kRowBytes),
        k_(prim::shared_address(storage.k[0])),
        v_(prim::shared_address(storage.v[0])) {}

  // Takes the queries into registers, from where products need not fetch them.
  __device__ void hold_queries(const Place& at) {
    if constexpr (!Shape<T>::kQueriesHeld) return;
    const int row = at.warp * 16 + at.lane % 16;
#pragma unroll
    for (int i = 0; i < kGroups * kSteps; ++i) {
      const int column = i % kSteps * 2 + at.lane / 16;  // of 16 bytes; the 64-byte swizzle turns them by row
      const int turned = column ^ (row / 2 % 4);
      prim::load_matrix_x4(held_[i], q_ + i / kSteps * Storage<T>::kGroupBytes + row * kRowBytes + turned * 16);
    }
  }

  // S = Q K^T.
  __device__ void score(float (&s)[64], int slot) const {
    const std::uint32_t q = prim::place(q_), k = prim::place(k_ + slot * Storage<T>::kKeyBytes);
#pragma unroll
    for (int i = 0; i < kGroups * kSteps; ++i) {
      const std::uint32_t at = i / kSteps * Storage<T>::kGroupBytes + i % kSteps * 32;
      const std::uint64_t b = prim::at_place(kKeys, k, at);
      if constexpr (kIsFp8<T>)
        prim::multiply_fp8(s, held_[i], b, i > 0);
      else
        prim::multiply<T, 0, 0>(s, prim::at_place(kKeys, q, at), b, i > 0);
    }
  }

  // O += P V.
  __device__ void accumulate(float (&o)[64], const std::uint32_t* p, int slot) const {
    const std::uint32_t v = prim::place(v_ + slot * Storage<T>::kValueBytes);
#pragma unroll
    for (int i = 0; i < kTokens / Shape<T>::kStep; ++i) {
      if constexpr (kIsFp8<T>)
        prim::multiply_fp8(o, p + 4 * i, prim::at_place(kValues, v, 32 * i));
      else
        prim::multiply<T, 1>(o, p + 4 * i, prim::at_place(kValues, v, 2 * i * kAtomBytes));
    }
  }

 private:
  static constexpr int kRowBytes = Storage<T>::kRowBytes;
  static constexpr int kSteps = kGroupColumns / Shape<T>::kStep;  // of a group
  static_assert(Shape<T>::kQueriesHeld == kIsFp8<T>);
  static constexpr std::uint64_t kKeys = kIsFp8<T> ? prim::narrow_operand(0, 512) : prim::operand(0, kAtomBytes);
  static constexpr std::uint64_t kValues = prim::operand(0, kAtomBytes, kIsFp8<T> ? 16 : kTokens * 128);

  std::uint32_t q_, k_, v_;
  std::uint32_t held_[kGroups * kSteps][4];
};

// The running softmax of a thread's two rows.
template <class T>
struct Rows {
  // A score, before the scale: the row's highest when this last moved.
  float reference[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {0, 0};  // of this thread's columns

  // Scores to probabilities. `bounds`: how many of the block's tokens each row sees, for masked blocks. Returns by what
  // the sums so far were multiplied.
  template <bool kMasked>
  __device__ float2 absorb(float (&s)[64], float scale_log2, const std::int32_t (&bounds)[2], int lane) {
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (i / 4 * 8 + i % 2 >= bounds[i / 2 % 2] - 2 * (lane % 4)) s[i] = minus_infinity();
    }
    // Masked blocks are a piece's first, when few rows have a reference.
    float highest[2];
    if (!kMasked && __all_sync(~0u, reference[0] >= 0 && reference[1] >= 0)) {
#pragma unroll
      for (int which = 0; which < 2; ++which) highest[which] = highest_from(reference[which], s, which);
    } else {
#pragma unroll
      for (int which = 0; which < 2; ++which) highest[which] = highest_of(s, which);
    }
    float factor[2], bases[2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      highest[which] = fmaxf(highest[which], __shfl_xor_sync(~0u, highest[which], 1));
      highest[which] = fmaxf(highest[which], __shfl_xor_sync(~0u, highest[which], 2));
      factor[which] = 1.0f;
      if (highest[which] * scale_log2 > fmaf(reference[which], scale_log2, Shape<T>::kMaxLag)) {
        factor[which] = exp2_fast((reference[which] - highest[which]) * scale_log2);
        reference[which] = highest[which];
      }
      bases[which] = base(which, scale_log2);
      sum[which] *= factor[which];
    }
    // Sums follow a few exponentials behind, which take long.
    constexpr int kBehind = 4;
#pragma unroll
    for (int e = 0; e < 32 + kBehind; ++e) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (e < 32) {
          float& value = s[at(which, e)];
          value = exp2_fast(fmaf(value, scale_log2, -bases[which]));
        }
        if (e >= kBehind) sum[which] += s[at(which, e - kBehind)];
      }
    }
    return make_float2(factor[0], factor[1]);
  }

  // Value e of 32 of one of the thread's two rows.
  __device__ static constexpr int at(int which, int e) { return e / 2 * 4 + 2 * which + e % 2; }

  __device__ RowResult result(int which, float scale_log2) const {
    float total = sum[which];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    return {base(which, scale_log2), total};
  }

 private:
  // What the row's exponents are taken from.
  __device__ float base(int which, float scale_log2) const {
    return fmaf(usable(reference[which]), scale_log2, -Shape<T>::kHead);
  }
  // The highest of a thread's scores of a row. Several chains, so that one need not wait for another.
  __device__ static float highest_of(const float (&s)[64], int which) {
    float part[4];
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const float score = s[at(which, e)];
      part[e % 4] = e < 4 ? score : fmaxf(part[e % 4], score);
    }
    return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
  }
  // The highest of them and of a number that is not negative, in half the instructions: numbers that are not negative
  // are in order as integers too, all negative ones are below them, and of integers there is a maximum of three. (-0 is
  // a negative one here: then, if no score is above it, another one may come out, which moves nothing either.)
  __device__ static float highest_from(float least, const float (&s)[64], int which) {
    int part[2] = {__float_as_int(least), __float_as_int(least)};
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const int one = __float_as_int(s[at(which, e)]), other = __float_as_int(s[at(which, e + 1)]);
      part[e / 2 % 2] = __vimax3_s32(part[e / 2 % 2], one, other);
    }
    return __int_as_float(max(part[0], part[1]));
  }
};

// Each of a thread's two rows by itself, so that one that moves does not cost the multiplications of both.
__device__ __forceinline__ void rescale(float (&o)[64], float2 factor) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float of_row = which == 0 ? factor.x : factor.y;
    if (!__any_sync(~0u, of_row != 1.0f)) continue;
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (i / 2 % 2 == which) o[i] *= of_row;
  }
}

// The probabilities of a block as the left operand of the next products.
template <class T>
__device__ __forceinline__ void pack_probabilities(const float (&s)[64],
                                                   std::uint32_t (&p)[128 / Shape<T>::kStep * 4]) {
#pragma unroll
  for (int i = 0; i < 128 / Shape<T>::kStep * 4; ++i) {
    if constexpr (kIsFp8<T>) {
      const int at = i / 4 * 16 + i % 2 * 2 + i / 2 % 2 * 8;
      p[i] = pack_fp8(s[at], s[at + 1], s[at + 4], s[at + 5]);
    } else {
      p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
  }
}

// What a consumer needs of a piece while it works on it.
struct Work {
  std::int32_t visible[2];   // how many of the piece's tokens this thread's rows see
  std::int32_t used, clear;  // blocks before `clear` are seen by all 64 rows, blocks from `used` on by none
  std::int32_t skipped;      // blocks from `used` on
  float scale_log2;

  __device__ Work(const Piece& piece, const Place& at)
      : visible{piece.visible(at.row(0)), piece.visible(at.row(1))}, scale_log2(piece.scale_log2) {
    const std::int32_t first = at.side * 64, rows = min(piece.rows() - first, 64);
    clear = uniform(max(piece.visible(first), 0) / kTokens);
    used = uniform(rows <= 0 ? 0 : (max(piece.visible(first + rows - 1), 0) + kTokens - 1) / kTokens);
    skipped = piece.blocks() - used;
  }

 private:
  __device__ static std::int32_t uniform(std::int32_t value) {
    return static_cast<std::int32_t>(prim::uniform(static_cast<std::uint32_t>(value)));
  }
};

template <class T>
class Consumer {
 public:
  __device__ Consumer(Storage<T>& storage, const PrefillCall& call)
      : storage_(storage), call_(call), products_(storage, at_.side) {}

  __device__ void run(const Share& share) {
    if (at_.side == 1) give_turn();  // the first one
    for (std::int32_t left = share.end - share.begin; left > 0; --left) {
      Work work = next_piece();
      pass_over(work);
      if (work.used == 0) {
        clear();
        finish(0);
        continue;
      }
      start();
      // The first scores of each further piece run while the results of the one before are stored.
      for (;; --left) {
        all_but_last_values(work);
        prim::wait_products<0>();
        prim::pin(o_);
        storage_.v_empty[stage_.slot()].arrive();
        ++stage_.count;
        if (left == 1) {
          finish(0);
          break;
        }
        work = next_piece();
        pass_over(work);
        if (prim::uniform(work.used > 0) == 0) {
          finish(1);
          clear();
          finish(0);
          --left;
          break;
        }
        start();
        finish(1);
      }
    }
    if (at_.side == 0) take_turn();  // the one that is left
  }

 private:
  using Stages = Ring<Shape<T>::kStages>;
  static constexpr int kProbabilities = kTokens / Shape<T>::kStep * 4;  // registers

  // Waits for a piece and its queries.
  __device__ Work next_piece() {
    storage_.q_full[at_.side].wait(queries_.full());
    ++queries_.count;
    return {piece(0), at_};
  }
  // The piece at hand, or the one so many before it.
  __device__ const Piece& piece(std::uint32_t before) const {
    return storage_.pieces[(queries_.count - 1 - before) % Storage<T>::kPieces];
  }

  // Passes over the blocks of a piece that nobody here sees.
  __device__ void pass_over(const Work& work) {
#pragma unroll 1
    for (std::int32_t i = work.skipped; i > 0; --i) {
      take_turn();
      give_turn();
      const int slot = stage_.slot();
      storage_.k_full[slot].wait(stage_.full());
      storage_.k_empty[slot].arrive();
      storage_.v_full[slot].wait(stage_.full());
      storage_.v_empty[slot].arrive();
      ++stage_.count;
    }
    if (work.used > 0) products_.hold_queries(at_);
    if (work.used == 0 || Shape<T>::kQueriesHeld) storage_.q_empty[at_.side].arrive();
  }

  __device__ void start() {
    storage_.k_full[stage_.slot()].wait(stage_.full());
    take_turn();
    prim::begin_products();
    products_.score(s_, stage_.slot());
    prim::commit_products();
    give_turn();
  }

  __device__ void finish(std::uint32_t before) {
    const Piece of = piece(before);
    const RowResult results[2] = {state_.result(0, of.scale_log2), state_.result(1, of.scale_log2)};
    store_rows(call_, of, at_, o_, results);
    if (of.split()) join_if_last(call_, of, at_);
  }
  __device__ void clear() {
    state_ = {};
#pragma unroll
    for (float& value : o_) value = 0;
  }

  // From the first scores, which are on their way, to the last products, which then are.
  __device__ void all_but_last_values(const Work& work) {
    clear();
    prim::wait_products<0>();
    prim::pin(s_);
    storage_.k_empty[stage_.slot()].arrive();
    std::int32_t block = work.used - 1;
    release_queries(block);
    absorb<true>(work, block);
    factor_ = make_float2(1, 1);
    await_stages(block);
    pack_probabilities<T>(s_, p_);
#pragma unroll 1
    for (--block; block >= work.clear; --block) next<true>(work, block);
#pragma unroll 1
    for (; block >= 0; --block) next<false>(work, block);
    rescale(o_, factor_);
    prim::begin_products();
    products_.accumulate(o_, p_, stage_.slot());
    prim::commit_products();
  }

  // The consumers issue the products of a block in turns, so that one's run while the other makes probabilities. A
  // block that is passed over is a turn too.
  __device__ void take_turn() { prim::named_sync<kConsumers * kWarpgroup>(kBarrierTurn + at_.side); }
  __device__ void give_turn() { prim::named_arrive<kConsumers * kWarpgroup>(kBarrierTurn + 1 - at_.side); }

  template <bool kMasked>
  __device__ void next(const Work& work, std::int32_t block) {
    const Stages before = stage_;
    ++stage_.count;
    take_turn();
    prim::begin_products();
    products_.score(s_, stage_.slot());
    prim::commit_products();
    rescale(o_, factor_);
    prim::begin_products();
    products_.accumulate(o_, p_, before.slot());
    prim::commit_products();
    give_turn();
    prim::wait_products<1>();
    prim::pin(s_);
    storage_.k_empty[stage_.slot()].arrive();
    release_queries(block);
    factor_ = absorb<kMasked>(work, block);
    await_stages(block);
    prim::wait_products<0>();
    prim::pin(o_);
    storage_.v_empty[before.slot()].arrive();
    pack_probabilities<T>(s_, p_);
  }

  // Behind the last scores of a piece: the next queries are long on their way.
  __device__ void release_queries(std::int32_t block) {
    if constexpr (!Shape<T>::kQueriesHeld) storage_.q_empty[at_.side].arrive_if(block == 0);
  }

  template <bool kMasked>
  __device__ float2 absorb(const Work& work, std::int32_t block) {
    const std::int32_t bounds[2] = {work.visible[0] - block * kTokens, work.visible[1] - block * kTokens};
    return state_.template absorb<kMasked>(s_, work.scale_log2, bounds, at_.lane);
  }

  // Values of this block, keys of the next. Stands between a block's exponentials and the wait for the products that
  // run meanwhile, and needs the former: else the compiler moves that wait up, or them down.
  __device__ void await_stages(std::int32_t block) {
    const std::uint32_t zero = prim::zero_after(state_.sum[0] + state_.sum[1]);
    const Stages next = stage_.ahead(1);
    prim::Barrier& values = storage_.v_full[stage_.slot()];
    if (block > 0)
      prim::wait_both(storage_.k_full[next.slot()], next.full() + zero, values, stage_.full());
    else
      values.wait(stage_.full() + zero);
  }

  Storage<T>& storage_;
  const PrefillCall& call_;
  const Place at_;
  Products<T> products_;
  Ring<1> queries_;
  Stages stage_;
  Rows<T> state_;
  float2 factor_;  // of the sums before the last block: what the output is yet to be multiplied by
  float s_[64], o_[64];
  std::uint32_t p_[kProbabilities];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillCall call, const __grid_constant__ Maps maps) {
  extern __shared__ std::byte shared[];
  auto& storage = *reinterpret_cast<Storage<T>*>(shared);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = kConsumers * kWarpgroup;
    for (int side = 0; side < kConsumers; ++side) {
      storage.q_full[side].init(1);
      storage.q_empty[side].init(kWarpgroup);
    }
    storage.v_landed.init(1);
    for (int i = 0; i < Shape<T>::kStages; ++i) {
      storage.k_full[i].init(1);
      storage.v_full[i].init(32);
      storage.k_empty[i].init(kConsumerThreads);
      storage.v_empty[i].init(kConsumerThreads);
    }
    if constexpr (kIsFp8<T>) {
      for (prim::Barrier& landed : storage.transposer.landed) landed.init(1);
      storage.transposer.launch_known.init(32);
    }
    prim::fence_barrier_init();
  }
  __syncthreads();
  switch (threadIdx.x / kWarpgroup) {
    case 0:
      prim::shrink_registers<Shape<T>::kLoaderRegisters>();
      switch (threadIdx.x / 32) {
        case 0: Loader<T>(storage, call, maps).run_queries(Share(call)); break;
        case 1: Loader<T>(storage, call, maps).run_keys(Share(call)); break;
        case 2: Loader<T>(storage, call, maps).run_values(Share(call)); break;
        default:
          if constexpr (kIsFp8<T>) Transposer(storage.transposer, call, maps).run(Share(call));
      }
      break;
    default: prim::grow_registers<Shape<T>::kConsumerRegisters>(); Consumer<T>(storage, call).run(Share(call));
  }
}

}  // namespace latte::cuda::sm90::prefill
