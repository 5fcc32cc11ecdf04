// The reference: the formulas of docs/numerics.md in fp64, one loop for each sum, over the same quantised inputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "latte/decode.hpp"
#include "latte/ops.hpp"

namespace latte::testkit {

// Dense: out [tokens, heads, latent], lse [tokens, heads].
struct OracleResult {
  std::int64_t tokens = 0;
  std::int32_t heads = 0;
  std::int32_t latent = 0;
  std::vector<double> out{};
  std::vector<double> lse{};
  double max_abs_score = 0;

  const double* out_row(std::int64_t token, std::int32_t head) const { return &out[(token * heads + head) * latent]; }
  double lse_at(std::int64_t token, std::int32_t head) const { return lse[token * heads + head]; }
};

// How many of its request's tokens query token j of n sees.
std::int32_t visible_tokens(Mask mask, std::int32_t seq_len, std::int32_t n, std::int32_t j);

// The sum of a[i] * b[i].
double dot(const double* a, const double* b, std::int64_t n);

// The scale of a head's numbers; of all of them where it is one number.
double scale_of(const Fp8Scale& scale, std::int32_t head = 0);

// One token of the cache as latent + rope numbers.
void load_kv_token(const DecodeProblem& problem, const std::byte* token, double kv_scale, double* to);

// Reads only the q, page table and cache entries of `args`; rows [0, query_start[B]).
OracleResult decode_oracle(const DecodeProblem& problem, const StepLengths& lengths, const DecodeArgs& args);

OracleResult merge_oracle(std::span<const Partial> partials);

// Writes args.kv_cache.
void write_kv_oracle(const WriteKvArgs& args);

}  // namespace latte::testkit
