// Decode of the bf16 kernels (kernel-inl.hpp). As S^T = K Q^T, keys are the row operand as they lie in the cache (bf16
// tokens of one page are read where they are), only Q needs its values in pairs, once per piece. O = P V: V's tokens
// are paired up once per block for all heads. A panel is 16 rows (or 16 columns of V); everything is stored panel by
// panel so that a 16 x 64-byte tile is one kilobyte without gaps.
//
// Work goes by cells of 32 tokens x 32 rows, all rows before the next tokens, so that 32 keys stay in L1 while queries
// pass by. A cell's scores stay in L1, too:
//
//   for every block, 32 tokens and 32 rows:  score the cell, beside the softmax of the one before, the pairing of its
//                                            tokens' values and half of the fetches of the next block
//   for every block:                         add its values, beside the other half
//
// A row may raise its reference after earlier tokens of the block became probabilities: these are scaled and rounded
// once more, and what outputs are divided by follows them.
//
// With few rows, pairing V up would cost more than the products themselves. Then V too is read where it lies. AVX-512
// (avx512_few-inl.hpp) pairs it in registers. An AMX tile takes two columns of a token for a pair, and each token's
// probability goes in beside a zero, once for the even columns and once for the odd ones: half of the products are with
// zero; there are few.
//
// Budget for 128 rows and 128 tokens a step. L1: 32 keys 37 KB, s 2 x 4; then p of 32 rows 8, o 2 x 4. L2: q 147, p 33,
// v 133, o 262, this block's keys and the next one's 295 = 0.87 MB of 2.
#pragma once

#include "cpu/simd/bf16/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// How many of `count` things to do at each of `turns` turns.
HWY_INLINE std::int32_t a_turn(std::int32_t count, std::int32_t turns) {
  return static_cast<std::int32_t>(ceil_div(count, turns));
}

// What is done beside a cell's products: steps of softmax and of PairKeys at every turn, and, at turns that may be
// more, lines fetched.
struct Beside {
  std::int32_t softmax, pairs, lines;
};

// Scores a cell, beside the softmax of the one before. A function of its own with its own copies, so that what its loop
// counts with stays in registers.
template <class Math>
HWY_NOINLINE void score_beside(Math& math, Work& w, const Cell& next, const Cell& last, PairKeys& pairs,
                               Prefetch& ahead, const Beside& pace) {
  struct {
    Absorb<Math::kProbabilities> absorb;
    PairKeys pairs;
    Prefetch ahead;
    const Beside pace;

    HWY_INLINE void begin() { absorb.begin(); }
    HWY_INLINE void step() {
      for (std::int32_t i = 0; i < pace.softmax; ++i) absorb.step();
      for (std::int32_t i = 0; i < pace.pairs; ++i) pairs.step();
    }
    HWY_INLINE void fetch() { ahead.lines(pace.lines); }
  } aside{{w, last}, pairs, ahead, pace};
  math.score(w, next, aside);
  aside.absorb.finish();
  pairs = aside.pairs;
  ahead = aside.ahead;
}

// The frame, which all kernels share. Math supplies the two matrix products and calls what it is given at the turns of
// its loops; how many turns there are, it says beforehand.
template <class Math>
HWY_INLINE void run_decode_with(const Piece& piece) {
  const std::int32_t begin = piece.record.kv_begin, end = piece.record.kv_end;
  Carver carver(piece.scratch);
  Work w = open_work(piece, carver);
  pack_query<Math::kQueries>(w);

  using Softmax = Absorb<Math::kProbabilities>;
  const std::int32_t strips = w.strips(), score_turns = Math::score_turns(w);
  // While a block is worked on the next one is fetched, half of it with the scores and half with the values: both take
  // about as long, and of what is asked for faster than memory can give it, the processor drops a part.
  Prefetch ahead(piece.keys, row_bytes(piece.shape.format, piece.shape.width));
  const std::int32_t value_lines = ahead.share(w.step / 2, Math::accumulate_turns(w));
  const Beside pace{
      .softmax = a_turn(Softmax::steps(std::min(w.panels, 2)), score_turns),
      .pairs = Math::kPairsValues ? a_turn(PairKeys::steps(w), strips * score_turns) : 0,
      .lines = ahead.share(w.step / 2, w.step / kPair * strips * Math::fetch_turns(w)),
  };

  Math math;
  Block block{.k = w.s.k[0], .v = w.s.v[0]};
  PairKeys pairs(w, block);
  for (std::int32_t first = begin; first < end; first += w.step) {
    open(w, block, first);
    ahead.aim(first + w.step, std::min(first + 2 * w.step, end));
    Cell last;
    for (std::int32_t t = 0; t < block.padded(); t += kPair) {
      if constexpr (Math::kPairsValues) pairs.aim(t);
      for (std::int32_t panel = 0; panel < w.panels; panel += 2) {
        if (t >= block.extent[panel / 2]) continue;
        const Cell next{.block = &block,
                        .panel = panel,
                        .rows = std::min(kStrip, w.rows - panel * kPanel),
                        .t = t,
                        .s = w.s.s[last.s == w.s.s[0]]};
        score_beside(math, w, next, last, pairs, ahead, pace);
        last = next;
      }
      if constexpr (Math::kPairsValues) pairs.finish();
    }
    math.finish();
    Softmax absorb(w, last);
    absorb.begin();
    absorb.finish();
    math.accumulate(
        w, block, [&]() __attribute__((always_inline)) { ahead.lines(value_lines); });
    if (first + w.step < end && (first + w.step - begin) % kFoldTokens == 0) fold_sums(w);
  }
  finish_work<Math>(w);
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
