// O = softmax(scale * Q K^T) V with bf16 products and fp32 sums, by AMX tiles or AVX-512 BF16 dot products. The two
// share layouts and everything but the matrix product, because a tile instruction does to 16 rows what the dot product
// does to one: c[16 lanes] += a-pair (broadcast) . b-pairs[16 lanes].
//
//   pages --open--> keys[step][width], or in place --score--> s[panel][32][16 rows] --Absorb--> p --accumulate--> o
//                              `--PairKeys--> v[column panel][step / 2][16][2] --------------------------^
//
// Decode's frame is in decode-inl.hpp, prefill's in prefill-inl.hpp. Tile products run beside the vector units, so the
// vector work is done in small steps inside the products' loops.
//
// fp8_e4m3 values are exact in bf16. An fp8_ds_mla value (e4m3 times fp32) is not: scores take its byte, which is,
// group after group, and each group's scale then; values are rounded. The query's latent part stands behind its rope
// part once more, where the bytes do in a staged key.
//
// The two matrix products of decode. A plan's pieces all take the same ones, by its row tile, and each adds up in one
// order, so that a row's bits do not depend on the rows beside it:
//
//   score:       s[panel][32 tokens][16]      = keys[token][width] . q[panel][width / 2][16][2]
//   accumulate:  o[panel][column][16][16]    += p[panel][token / 32][16][32] . v[column][token / 2][16][2]
//
// With few rows pairing values up in memory takes longer than the products, so they are read where they lie
// (amx-inl.hpp AmxNarrow, avx512_few-inl.hpp).
#pragma once

#include "cpu/simd/bf16/amx-inl.hpp"
#include "cpu/simd/bf16/avx512_few-inl.hpp"
#include "cpu/simd/bf16/decode-inl.hpp"
#include "cpu/simd/bf16/prefill-inl.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

std::size_t scratch_bytes(const Shape& shape) {
  Carver carver;
  Scratch(carver, shape.row_tile, shape);
  return carver.used();
}

// Which products decode takes is chosen by the plan's row tile, which follows from heads and limits, not by the rows of
// this piece.
HWY_NOINLINE void run_avx512(const Piece& piece) {
  if (!piece.shape.values_in_keys)
    run_prefill_with<Avx512>(piece);
  else if (piece.shape.row_tile <= kFewRows)
    run_decode_with<Avx512Few>(piece);
  else
    run_decode_with<Avx512>(piece);
}

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
