// Sums of prefill over very many tokens.
#include <cmath>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/prefill_oracle.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

constexpr std::int32_t kWidth = 16, kDistinct = 512, kRepeats = 512, kTokens = kDistinct * kRepeats;

// `kRepeats` copies of random tokens, one head.
std::vector<std::byte> repeated_tokens(Dtype dtype, Rng& rng) {
  const std::size_t once = kDistinct * kWidth * dtype_bytes(dtype);
  std::vector<std::byte> bytes(once * kRepeats);
  for (std::size_t i = 0; i < once; i += dtype_bytes(dtype)) store(dtype, rng.normal() + 0.5, &bytes[i]);
  for (std::size_t n = 1; n < kRepeats; ++n)
    std::copy_n(bytes.begin(), once, bytes.begin() + static_cast<std::ptrdiff_t>(n * once));
  return bytes;
}

class LongPrefill : public EachKernel {};

// The same 512 tokens over and over: the answer is that of 512 tokens, and only the sums get long.
TEST_P(LongPrefill, OfAQuarterMillionTokensIsAccurate) {
  const Backend one_thread = open_backend(GetParam(), 1);
  PrefillProblem problem{
      .heads = 1, .qk_width = kWidth, .v_width = kWidth, .dtype = Dtype::f32, .out_dtype = Dtype::f32};
  problem.mask = Mask::none;
  if (!one_thread.supports(problem).ok) problem.dtype = Dtype::bf16;
  Rng rng(run_seed());
  const auto q = repeated_tokens(problem.dtype, rng), k = repeated_tokens(problem.dtype, rng),
             v = repeated_tokens(problem.dtype, rng);
  constexpr std::int32_t kQueries = 2;
  std::vector<float> out(kQueries * kWidth, NAN), lse(kQueries, NAN);
  const PrefillArgs args{.q = dense(q.data(), problem.dtype, {kQueries, 1, kWidth}),
                         .k = dense(k.data(), problem.dtype, {kTokens, 1, kWidth}),
                         .v = dense(v.data(), problem.dtype, {kTokens, 1, kWidth}),
                         .out = dense(out.data(), Dtype::f32, {kQueries, 1, kWidth}),
                         .lse = dense(lse.data(), Dtype::f32, {kQueries, 1}),
                         .scale = 0.2f};
  const std::int32_t query_start[] = {0, kQueries}, few[] = {0, kDistinct}, many[] = {0, kTokens};
  const OracleResult truth =
      prefill_oracle(problem, {.query_start = query_start, .kv_start = few}, args, PrefillMath::half);

  auto builder = PrefillBuilder::create(one_thread, problem,
                                        {.max_requests = 1, .max_query_tokens = kQueries, .max_kv_tokens = kTokens},
                                        {.policy = Policy::uniform(1)});
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  auto step = builder->build(0, {.query_start = query_start, .kv_start = many});
  ASSERT_TRUE(step.ok()) << step.status().message();
  const Status status = prefill(*step, args);
  ASSERT_TRUE(status.ok()) << status.message();

  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - truth.out[i], 2);
    norm += std::pow(truth.out[i], 2);
  }
  const bool f32 = problem.dtype == Dtype::f32;
  EXPECT_LE(std::sqrt(error / norm), f32 ? 2e-6 * (1 + truth.max_abs_score) : 3e-3);
  for (std::size_t i = 0; i < kQueries; ++i)
    EXPECT_NEAR(lse[i], truth.lse[i] + std::log(kRepeats), f32 ? 1e-5 * (1 + truth.max_abs_score) : 1e-3);
}
INSTANTIATE_TEST_SUITE_P(Kernels, LongPrefill, each_kernel(), kernel_test_name);

class RisingPrefill : public EachKernel {};

// Many tokens are alike, and then one is so far above the first ones that a row's reference rises. What the many have
// been rounded to, once more by that, must be what outputs are divided by.
TEST_P(RisingPrefill, KeepsTheWeightOfWhatCameBefore) {
  constexpr std::int32_t kKeys = 128, kAlike = 32, kRises = 96;  // alike from there on; the one that is above them
  const Backend one_thread = open_backend(GetParam(), 1);
  PrefillProblem problem{
      .heads = 1, .qk_width = kWidth, .v_width = kWidth, .dtype = Dtype::bf16, .out_dtype = Dtype::f32};
  problem.mask = Mask::none;
  ASSERT_TRUE(one_thread.supports(problem).ok);
  Rng rng(run_seed());
  const auto encode = [](const std::vector<double>& values) {
    std::vector<std::byte> bytes(values.size() * 2);
    for (std::size_t i = 0; i < values.size(); ++i) store(Dtype::bf16, values[i], &bytes[i * 2]);
    return bytes;
  };
  for (std::int32_t rows : {1, 40}) {
    auto builder = PrefillBuilder::create(one_thread, problem,
                                          {.max_requests = 1, .max_query_tokens = rows, .max_kv_tokens = kKeys});
    ASSERT_TRUE(builder.ok()) << builder.status().message();
    const std::int32_t query_start[] = {0, rows}, kv_start[] = {0, kKeys};
    auto step = builder->build(0, {.query_start = query_start, .kv_start = kv_start});
    ASSERT_TRUE(step.ok()) << step.status().message();
    for (int draw = 0; draw < 20; ++draw) {
      // A token's score is its key's first value, in powers of two; its values are 1 where it is one of the many.
      std::vector<double> q(static_cast<std::size_t>(rows) * kWidth, 0.0), k(kKeys * kWidth, 0.0), v = k;
      for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) q[r * kWidth] = 1;
      const double alike = 6 + 0.9 * rng.uniform(), above = 8.1 + rng.uniform();
      for (std::int32_t t = kAlike; t <= kRises; ++t) {
        const auto at = static_cast<std::size_t>(t) * kWidth;
        k[at] = t < kRises ? alike : above;
        std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(at), kWidth, t < kRises ? 1.0 : 0.0);
      }
      const auto q_bytes = encode(q), k_bytes = encode(k), v_bytes = encode(v);
      double many = 0, all = 0;
      for (std::int32_t t = 0; t < kKeys; ++t) {
        const double weight = std::exp2(load(Dtype::bf16, &k_bytes[static_cast<std::size_t>(t) * kWidth * 2]));
        all += weight;
        if (t >= kAlike && t < kRises) many += weight;
      }
      std::vector<float> out(static_cast<std::size_t>(rows) * kWidth, NAN);
      const Status status = prefill(*step, {.q = dense(q_bytes.data(), Dtype::bf16, {rows, 1, kWidth}),
                                            .k = dense(k_bytes.data(), Dtype::bf16, {kKeys, 1, kWidth}),
                                            .v = dense(v_bytes.data(), Dtype::bf16, {kKeys, 1, kWidth}),
                                            .out = dense(out.data(), Dtype::f32, {rows, 1, kWidth}),
                                            .scale = static_cast<float>(std::log(2.0))});
      ASSERT_TRUE(status.ok()) << status.message();
      for (float x : out) ASSERT_NEAR(x, many / all, 6e-4) << rows << " rows, scores " << alike << " and " << above;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Kernels, RisingPrefill, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
