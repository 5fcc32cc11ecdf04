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

}  // namespace
}  // namespace latte::testkit
