// O = softmax(scale * Q K^T) V with bf16 products and fp32 sums, by AMX tiles or AVX-512 BF16 dot products. The two
// share layouts and everything but the matrix product, because a tile instruction does to 16 rows what the dot product
// does to one: c[16 lanes] += a-pair (broadcast) . b-pairs[16 lanes].
//
//   pages --open--> keys[step][width], or in place --scores--> s[panel][step][16 rows] --Absorb--> p --accumulate--> o
//              `--PairUp--> v[column panel][step/2][16][2] --------------------------------------------------^
//
// S^T = K Q^T: keys are the row operand as they lie in the cache (bf16 tokens of one page are read where they are),
// only Q needs its values in pairs, once per piece. O = P V: V's tokens are paired up once per block for all heads. A
// panel is 16 rows (or 16 columns of V); everything is stored panel by panel so that a 16 x 64-byte tile is one
// kilobyte without gaps.
//
// Tile products run beside the vector units, so the vector work is done in slices inside the products' loops:
//
//   scores(j + 1)  with  Absorb(j)      and half of the fetches of block j + 2
//   accumulate(j)  with  PairUp(j + 1)  and the other half
//
// With 16 rows or fewer, pairing V up would cost more than the products themselves. Then V too is read where it lies: a
// tile takes two columns of a token for a pair, and each token's probability goes in beside a zero, once for the even
// columns and once for the odd ones. Half of the products are with zero; there are few.
//
// Budget for 128 rows and 128 tokens a step: q 147 KB, s 2 x 66, p 33, v 2 x 131, o 262, two blocks of keys 295
// = 1.13 MB of 2 MB of L2.
//
// fp8_e4m3 values are exact in bf16. An fp8_ds_mla value (e4m3 times fp32) is not: its key is staged as two bf16
// numbers, hi and lo, side by side, and the query repeats its latent part to meet both, which keeps scores exact to
// 2^-17.
//
// The two matrix products, in the same order along the inner dimension in both kernels, so that a row's bits do not
// depend on the rows beside it:
//
//   scores:      s[panel][token][16]          = keys[token][width] . q[panel][width / 2][16][2]
//   accumulate:  o[panel][column][16][16]    += p[panel][token / 32][16][32] . v[column][token / 2][16][2]
//   narrow:      o[column / 2][even, odd][16][16] += p[token / 16][even, odd][16][16][2] . keys[token][2 columns]
#pragma once

#include "cpu/simd/bf16/amx-inl.hpp"
#include "cpu/simd/bf16/avx512-inl.hpp"
#include "cpu/simd/bf16/prefill-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Decode's frame, which both kernels share. Math supplies the two matrix products and calls what it is given once a
// turn of its inner loop; how many turns there are, it says beforehand.
template <class Math>
HWY_INLINE void run_decode_with(const Piece& piece) {
  const std::int32_t end = piece.record.kv_end;
  Carver carver(piece.scratch);
  Work w = open_work(piece, carver);
  Prefetch ahead(piece.keys, row_bytes(piece.shape.format, piece.shape.width));
  pack_query(w);

  Block blocks[2] = {{.s = w.s.s[0], .k = w.s.k[0], .v = w.s.v[0]}, {.s = w.s.s[1], .k = w.s.k[1], .v = w.s.v[1]}};
  Block *now = &blocks[0], *next = &blocks[1];
  const std::int32_t score_lines = ahead.share(kStep / 2, Math::score_turns(w));
  const std::int32_t accumulate_turns = Math::accumulate_turns(w);
  const std::int32_t accumulate_lines = ahead.share(kStep / 2, accumulate_turns);
  // PairUp's slices of a block, in as many turns as there are.
  const auto pair_steps = static_cast<std::int32_t>(ceil_div(PairUp::slices(w), accumulate_turns));

  constexpr bool kPairs = Math::kProbabilities == Probabilities::paired;

  if (piece.record.kv_begin < end) {
    open(w, *now, piece.record.kv_begin);
    ahead.aim(now->first + kStep, std::min(now->first + 2 * kStep, end));
    PairUp pairs(w, *now);
    Math::scores(w, *now, [&] {
      if constexpr (kPairs) pairs.step();
      ahead.lines(2 * score_lines);
    });
    if constexpr (kPairs) pairs.finish();
  }
  for (std::int32_t t = piece.record.kv_begin; t < end; t += kStep, std::swap(now, next)) {
    const bool more = t + kStep < end;
    raise(w, *now);
    Absorb<Math::kProbabilities> absorb(w, *now);
    ahead.aim(t + 2 * kStep, std::min(t + 3 * kStep, end));
    if (more) {
      open(w, *next, t + kStep);
      Math::scores(w, *next, [&] {
        absorb.step();
        ahead.lines(score_lines);
      });
    }
    absorb.finish();
    if (more) {
      PairUp pairs(w, *next);
      Math::accumulate(w, *now, [&] {
        if constexpr (kPairs)
          for (std::int32_t i = 0; i < pair_steps; ++i) pairs.step();
        ahead.lines(accumulate_lines);
      });
      if constexpr (kPairs) pairs.finish();
    } else {
      Math::accumulate(w, *now, [] {});
    }
    if (more && (t + kStep - piece.record.kv_begin) % kFoldTokens == 0) fold_sums(w);
  }
  finish_work<Math>(w);
}

std::size_t scratch_bytes(const Shape& shape) {
  Carver carver;
  Scratch(carver, shape.row_tile, shape);
  return carver.used();
}

HWY_NOINLINE void run_avx512(const Piece& piece) {
  if (piece.shape.values_in_keys)
    run_decode_with<Avx512>(piece);
  else
    run_prefill_with<Avx512>(piece);
}

// Chosen by the plan's row tile, which follows from heads and limits, not by the rows of this piece.
template <class Tiles>
HWY_NOINLINE void run_amx(const Piece& piece) {
  if (!piece.shape.values_in_keys)
    run_prefill_with<Amx<Tiles>>(piece);
  else if (piece.shape.row_tile <= kPanel)
    run_decode_with<AmxNarrow<Tiles>>(piece);
  else
    run_decode_with<Amx<Tiles>>(piece);
}

// Products on registers alone: the most the units can do.
HWY_NOINLINE double burn_avx512(double seconds) {
  constexpr int kChains = 12, kRounds = 4096;
  __m512 acc[kChains];
  for (__m512& a : acc) a = _mm512_setzero_ps();
  const __m512i a = _mm512_set1_epi16(kOneBf16), b = _mm512_set1_epi16(0x3c23);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (int n = 0; n < kRounds; ++n) {
      HWY_UNROLL(12)
      for (int i = 0; i < kChains; ++i) acc[i] = dot_pairs(acc[i], a, b);
    }
    operations += 2.0 * 32 * kChains * kRounds;
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  keep(_mm512_cvtss_f32(acc[0]));
  return operations;
}

HWY_NOINLINE double burn_amx(double seconds) {
  constexpr int kRounds = 2048;
  alignas(64) std::uint16_t ones[kPanel * kPair];
  std::fill(std::begin(ones), std::end(ones), std::uint16_t{0x3c23});
  HardwareTiles::enter();
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const Stopwatch watch;
  double operations = 0;
  while (watch.seconds() < seconds) {
    for (int n = 0; n < kRounds; ++n) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    operations += 2.0 * 4 * kRounds * kPanel * kPanel * kPair;
  }
  alignas(64) float out[kPanel * kPanel];
  _tile_stored(0, out, 64);
  keep(out[0]);
  HardwareTiles::leave();
  return operations;
}

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
