// O = softmax(scale * Q K^T) V for up to 64 rows a thread block, rows on the wide side of the matrix instruction. V is
// the first `latent` columns of K.
//
//   pages --loader--> kv[3 stages] --kv_full--> scorer: S = Q K^T, P = 2^(S - reference)
//                           ^                         | P over the block's rope group
//                           +---kv_empty--- values <--p_full: O[64][latent / 2] += P V, each a half of the columns
//   scorer --sums_full--> values: divide, store --sums_empty--> scorer
//
// Registers decide the roles. Most of Q lies in the scorer's registers: its products then read half as much from shared
// memory, which is what limits them. While the scorer turns block b into probabilities, the tensor cores multiply the
// values of block b - 1.
//
//   role        registers                                        a thread
//   scorer      Q 112, S 24, the rest 32                         168
//   values x 2  O 128, the rest 32                               160
//   loader      one warp of four works, or all for odd pages     24
//   shared      3 x 55,296 kv + 57,344 of Q + tables             (latent 512)
//
// The scorer is in plain_scorer.cuh, with what the roles share; the values and the kernel are here.
#pragma once

#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/plain_scorer.cuh"
#include "cuda/sm90/decode/plain_seam.cuh"

namespace latte::cuda::sm90::plain {

template <class Config>
class Values {
 public:
  static constexpr int kParts = HeldRow<Config>::kParts;

  __device__ Values(Storage<Config>& s) : s_(s) {}

  __device__ void run(std::int32_t blocks) {
#pragma unroll
    for (int e = 0; e < kWide / 2; ++e)
#pragma unroll
      for (int part = 0; part < kParts; ++part) o_[part][e] = 0;
    for (std::int32_t b = 0; b < blocks; ++b, ++ring_.count) block();
  }

  // Rows of a partial that are joined here stay here.
  __device__ void store(const Sink& sink, Seam here) {
    const int slot = sums_.slot();
    s_.sums_full[slot].wait(sums_.full());
    RowResult results[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = fragment_row(at_, h);
      results[h] = s_.results[slot][r];
      if (!sink.partial() && at_.side == 0 && at_.lane % 4 == 0) sink.put_lse(r, results[h].lse());
    }
    s_.sums_empty[slot].arrive();
    ++sums_.count;
    if (sink.partial()) {
      using Rows = PartialRow<AsHeld, Config::kLatent>;
      const RowRange kept(here, sink.rows());
      const bool keep = 16 * at_.warp >= kept.begin && 16 * at_.warp < kept.end;
      const Rows to = keep ? SeamRoom<Config>(s_.kv).own(here) : Rows(sink.workspace(), sink.partial_row(0));
#pragma unroll
      for (int h = 0; h < 2; ++h) HeldRow<Config>{o_, at_, h}.store_partial(to, sink.rows(), results[h]);
    } else {
      sink.with_type([&](auto element) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          HeldRow<Config>{o_, at_, h}.store(reinterpret_cast<decltype(element)*>(sink.row(fragment_row(at_, h))),
                                            results[h].inverse);
      });
    }
  }

 private:
  __device__ void block() {
    using namespace prim;
    const int stage = ring_.slot();
    const std::uint32_t kv = uniform(shared_address(s_.kv[stage]));
    std::uint64_t probabilities = bricks(kv + Config::kRopeOffset, 128, Config::kSlabBytes);
    std::uint64_t values =
        operand(kv + uniform(at_.side * Config::kHalfGroups * kAtomBytes), Config::kSlabBytes, kAtomBytes);
    asm volatile("" : "+l"(probabilities), "+l"(values));  // now, and not behind the wait
    s_.p_full[stage].wait(ring_.full());
    if (s_.moved[stage][at_.warp] == ring_.count + 1) rescale(stage);
    begin_products();
#pragma unroll
    for (int k = 0; k < Config::kUnits; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        multiply<typename Config::Half, 0, 1>(
            o_[part], moved(probabilities, k * 2 * Config::kSlabBytes),
            moved(values, part * (kWide / 64) * kAtomBytes + k * 2 * Config::kSlabBytes));
      commit_products();
    }
    give_back<0>(stage);
    pin_values();
  }

  // Unit after unit, as the products are done with it. A lane speaks for its warp, but with the last unit each thread
  // for itself: it has also read what the scorer said of the block.
  template <int kUnit>
  __device__ void give_back(int stage) {
    static_assert(Config::kUnitTokens == 16);  // one step of the products
    constexpr bool kLast = kUnit + 1 == Config::kUnits;
    prim::wait_products<Config::kUnits - 1 - kUnit>();
    if (kLast || at_.lane == 0) s_.kv_empty[stage][kUnit].arrive();
    if constexpr (!kLast) give_back<kUnit + 1>(stage);
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

template <class Config, bool kThreadsLoad>
__global__ void __launch_bounds__(kThreads, 1)
    decode_plain(const __grid_constant__ KernelCall call, const __grid_constant__ LaunchShape shape,
                 const __grid_constant__ CUtensorMap map) {
  static_assert(sizeof(Storage<Config>) <= kSharedLimit);
  extern __shared__ __align__(1024) std::byte shared[];
  auto& s = *reinterpret_cast<Storage<Config>*>(shared);
  if (threadIdx.x == 0) {
    prim::prefetch_map(map);
    s.any_slice = false;
    for (int stage = 0; stage < kStages; ++stage) {
      s.kv_full[stage][0].init(kThreadsLoad ? kWarpgroup : 1);
      for (int unit = 0; unit < Config::kUnits; ++unit)
        s.kv_empty[stage][unit].init(unit + 1 < Config::kUnits ? 2 * kWarpgroup / 32 : 2 * kWarpgroup);
      s.p_full[stage].init(kWarpgroup);
      for (std::uint32_t& block : s.moved[stage]) block = 0;
    }
    for (int slot = 0; slot < kSums; ++slot) {
      s.sums_full[slot].init(kWarpgroup);
      s.sums_empty[slot].init(2 * kWarpgroup);
    }
    s.met.init(Meeting::kArrivals);
    s.first_query.init(kWarpgroup);
    s.fetched.init(1);
    prim::fence_barrier_init();
  }
  const Share share = begin_share(call.plan, shape);
  if (share.empty()) return end_without_share();

  if (threadIdx.x < kWarpgroup) {
    prim::grow_registers<kScorerRegisters>();
    Scorer<Config, kThreadsLoad> scorer(s, call);
    for (std::int32_t i = share.begin; i < share.end; ++i) {
      const Piece piece = share.piece(i);
      if (piece.rows <= 0) continue;
      scorer.begin(piece);
      scorer.run(piece.record.kv_begin, piece.record.kv_end);
    }
  } else if (threadIdx.x >= 3 * kWarpgroup) {
    prim::shrink_registers<kLoaderRegisters>();
    if constexpr (kThreadsLoad)
      load_blocks<Config, kStages>(s, call, share, shape, TokenLoader<Config>(call.kv));
    else if (threadIdx.x < 3 * kWarpgroup + 32)
      load_blocks<Config, kStages>(s, call, share, shape, BoxLoader<Config>(map, shape));
  } else {
    prim::grow_registers<kValueRegisters>();
    // Looked up before there are values, which leave no registers for it. By all threads: behind what one does by
    // itself the compiler no longer keeps the products' descriptors in uniform registers.
    const Seam ends = seam(call, share, share.end - 1);
    const Seam begins = share.end - share.begin > 1 ? seam(call, share, share.begin) : Seam::none;
    Values<Config> values(s);
    for (std::int32_t i = share.begin; i < share.end; ++i) {
      {
        const Piece piece = share.piece(i);
        if (piece.rows <= 0) continue;
        values.run(piece.template blocks<Config>());
      }
      const Piece piece = share.piece(i);
      const Seam here = i + 1 == share.end ? ends : i == share.begin ? begins : Seam::none;
      if (threadIdx.x == kWarpgroup && piece.split() && here == Seam::none) s.any_slice = true;
      if (here == Seam::before)
        SeamRoom<Config>(s.kv).fetch_second(call, piece, share, s.fetched);
      else if (is_twin(here))
        merge_sync();  // nobody has any more use for the stages
      values.store(Sink(call, piece), here);
      if (!piece.split() || here == Seam::before) continue;
      merge_sync();
      announce(call, piece, share);
    }
    Meeting meet{s.met};
    if (ends != Seam::none) {
      const Piece piece = share.piece(share.end - 1);
      if (is_twin(ends) && threadIdx.x == kWarpgroup)
        SeamRoom<Config>(s.kv).fetch_twin(call, piece, share, ends, s.fetched);
      s.fetched.wait(0);
      meet();
      SeamRoom<Config>(s.kv).store_sum(Sink(call, piece), ends);
    }
    if (s.any_slice)
      merge_slices<Config, AsHeld>(call, share, share.begin + (begins != Seam::none), share.end - (ends != Seam::none),
                                   s.kv, meet);
  }
}

}  // namespace latte::cuda::sm90::plain
