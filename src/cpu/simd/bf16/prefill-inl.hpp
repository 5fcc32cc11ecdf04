// Prefill with the parts of the bf16 kernels (kernel-inl.hpp): the same layouts and products, in another order.
//
// Rows of 192/128 have a third of decode's products to a score, so that softmax is nearly as much work as they are. It
// has to run beside both products, not only beside the scores. Values are therefore added one block later, when a
// block's softmax is spread over the scores of the next block and the values of the one before:
//
//   scores(j + 1)      with  Absorb(j), PairUp(j)
//   accumulate(j - 1)  with  the rest of Absorb(j), Maxima(j + 1), StageKeys(j + 2)
//
// References that block j raises count for its probabilities at once, but the outputs still wait for block j - 1, whose
// probabilities are relative to the old ones: outputs are rescaled after that.
//
// Keys are always staged: where they lie they are a stride of all heads apart, which puts the rows of a tile into one
// or two sets of L1, and they are read once for every 32 rows. V is paired up from where it lies. Both are fetched into
// L2 one block before they are read, not earlier: strides of 4 KB and more leave them few sets of L2.
//
// Budget for 256 rows and 128 tokens a step at 192/128: q 98 KB, s 2 x 131, p 2 x 66, k 2 x 49, v 2 x 33, o 131
// = 787 KB of 1 MB of L2.
#pragma once

#include "cpu/simd/bf16/softmax-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Spreads slices evenly over turns.
class Pace {
 public:
  Pace(std::int64_t slices, std::int64_t turns) : slices_(slices), turns_(std::max<std::int64_t>(turns, 1)) {}

  template <class Slices>
  HWY_INLINE void turn(Slices& slices) {
    for (owed_ += slices_; owed_ >= turns_; owed_ -= turns_) slices.step();
  }

 private:
  const std::int64_t slices_, turns_;
  std::int64_t owed_ = 0;
};

template <class Math>
HWY_INLINE void run_prefill_with(const Piece& piece) {
  using Softmax = Absorb<Math::kProbabilities>;
  const std::int32_t begin = piece.record.kv_begin, end = piece.record.kv_end;
  Carver carver(piece.scratch);
  Work w = open_work(piece, carver);
  pack_query(w);

  // Block j is blocks[j % 4], its buffers are the (j % 2)th ones.
  Block blocks[4];
  for (std::int32_t i = 0; i < 4; ++i)
    blocks[i] = {.s = w.s.s[i % 2], .k = w.s.k[i % 2], .v = w.s.v[i % 2], .p = w.s.p[i % 2], .best = w.s.best[i % 2]};

  const std::int32_t score_turns = Math::score_turns(w), accumulate_turns = Math::accumulate_turns(w);
  Prefetch keys(piece.keys, row_bytes(piece.shape.format, piece.shape.width));
  Prefetch values(piece.values, row_bytes(piece.shape.format, piece.shape.v_width));
  const std::int32_t value_lines = 2 * values.share(score_turns), key_lines = 2 * keys.share(accumulate_turns);
  Pace absorb_pace(Softmax::slices(w), score_turns + accumulate_turns);
  Pace pair_pace(PairUp::slices(w), score_turns);
  Pace stage_pace(kStep, accumulate_turns), maxima_pace(Maxima::slices(w), accumulate_turns);

  if (begin < end) {
    aim(w, blocks[0], begin);
    StageKeys(w, blocks[0], true).finish();
    const bool more = begin + kStep < end;
    if (more) aim(w, blocks[1], begin + kStep);
    StageKeys stage(w, blocks[1], more);
    Pace pace(kStep, score_turns);
    Math::scores(w, blocks[0], [&] { pace.turn(stage); });
    stage.finish();
    Maxima(w, blocks[0]).finish();
  }
  std::int32_t j = 0;
  for (std::int32_t t = begin; t < end; t += kStep, ++j) {
    Block &before = blocks[(j + 3) % 4], &now = blocks[j % 4], &next = blocks[(j + 1) % 4],
          &after = blocks[(j + 2) % 4];
    const std::uint32_t raised = raise(w, now);
    Softmax absorb(w, now);
    PairUp pairs(w, now);
    values.aim(t + kStep, std::min(t + 2 * kStep, end));
    keys.aim(t + 3 * kStep, std::min(t + 4 * kStep, end));
    const bool more = t + kStep < end, stages = t + 2 * kStep < end;
    if (more)
      Math::scores(w, next, [&] {
        absorb_pace.turn(absorb);
        pair_pace.turn(pairs);
        values.lines(value_lines);
      });
    pairs.finish();

    if (stages) aim(w, after, t + 2 * kStep);
    StageKeys stage(w, after, stages);
    Maxima maxima(w, next, more);
    if (j > 0)
      Math::accumulate(w, before, [&] {
        absorb_pace.turn(absorb);
        maxima_pace.turn(maxima);
        stage_pace.turn(stage);
        keys.lines(key_lines);
      });
    absorb.finish();
    maxima.finish();
    stage.finish();
    rescale(w, raised);
    if (more && (t + kStep - begin) % kFoldTokens == 0) fold_sums(w);
  }
  if (j > 0) Math::accumulate(w, blocks[(j + 3) % 4], [] {});
  finish_work<Math>(w);
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
