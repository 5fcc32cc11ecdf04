// Sums over very many tokens, rows whose tokens are all hidden, and scores that are far apart.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/oracle.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

constexpr std::int32_t kLatent = 64, kRope = 16, kWidth = kLatent + kRope, kPage = 64;

// One request of one head in the precision the kernel is for.
struct OneRequest {
  explicit OneRequest(const Backend& backend) {
    problem = {.heads = 1,
               .latent = kLatent,
               .rope = kRope,
               .q_dtype = Dtype::f32,
               .out_dtype = Dtype::f32,
               .kv_format = KvFormat::f32,
               .page_size = kPage};
    if (backend.supports(problem).ok) return;
    problem.q_dtype = Dtype::bf16;
    problem.kv_format = KvFormat::bf16;
  }
  Dtype dtype() const { return problem.q_dtype; }
  std::vector<std::byte> encode(const std::vector<double>& values) const {
    std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype()));
    for (std::size_t i = 0; i < values.size(); ++i) store(dtype(), values[i], &bytes[i * dtype_bytes(dtype())]);
    return bytes;
  }

  DecodeProblem problem;
};

class LongContext : public EachKernel {};

// The same 512 tokens over and over: the answer is that of 512 tokens, and only the sums get long.
TEST_P(LongContext, OfHalfAMillionTokensIsAccurate) {
  constexpr std::int32_t kDistinct = 512, kRepeats = 1024, kTokens = kDistinct * kRepeats;
  const Backend one_thread = open_backend(GetParam(), 1);
  const OneRequest request(one_thread);
  Rng rng(run_seed());
  std::vector<double> q(kWidth), tokens(kDistinct * kWidth);
  for (double& x : q) x = rng.normal();
  for (double& x : tokens) x = rng.normal() + 0.5;
  const auto q_bytes = request.encode(q), cache = request.encode(tokens);
  std::vector<std::int32_t> pages(kTokens / kPage);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(i % (kDistinct / kPage));

  std::vector<float> out(kLatent, NAN);
  float lse = NAN;
  DecodeArgs args{.q = dense(q_bytes.data(), request.dtype(), {1, 1, kWidth}),
                  .kv_cache = dense(cache.data(), request.dtype(), {kDistinct / kPage, kPage, kWidth}),
                  .pages = {.block_table = pages.data(), .block_table_stride = 0, .max_pages = kTokens / kPage},
                  .out = dense(out.data(), Dtype::f32, {1, 1, kLatent}),
                  .lse = dense(&lse, Dtype::f32, {1, 1}),
                  .scale = 0.1f};
  const std::int32_t query_start[] = {0, 1}, few[] = {kDistinct}, many[] = {kTokens};
  const OracleResult truth = decode_oracle(request.problem, {.seq_lens = few, .query_start = query_start}, args);

  auto builder = MetadataBuilder::create(one_thread, request.problem, {.max_requests = 1, .max_kv_tokens = kTokens},
                                         {.policy = Policy::uniform(1)});
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  auto step = builder->build(0, {.seq_lens = many, .query_start = query_start});
  ASSERT_TRUE(step.ok()) << step.status().message();
  const Status status = decode(*step, args);
  ASSERT_TRUE(status.ok()) << status.message();

  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - truth.out[i], 2);
    norm += std::pow(truth.out[i], 2);
  }
  const bool f32 = request.dtype() == Dtype::f32;
  EXPECT_LE(std::sqrt(error / norm), f32 ? 2e-6 * (1 + truth.max_abs_score) : 3e-3);
  EXPECT_NEAR(lse, truth.lse[0] + std::log(kRepeats), f32 ? 1e-5 * (1 + truth.max_abs_score) : 1e-3);
}

class HiddenTokens : public EachKernel {};

// Two query tokens over one KV token: the first sees nothing, and what it does not see is NaN.
TEST_P(HiddenTokens, NeverReachARowThatSeesNothing) {
  OneRequest request(backend);
  const auto q = request.encode(std::vector<double>(2 * kWidth, 1.0));
  const auto cache = request.encode(std::vector<double>(kPage * kWidth, std::numeric_limits<double>::quiet_NaN()));
  const std::int32_t page = 0, query_start[] = {0, 2}, seq_lens[] = {1};
  std::vector<float> out(2 * kLatent, 7.0f), lse(2, 7.0f);
  auto builder =
      MetadataBuilder::create(backend, request.problem, {.max_requests = 1, .max_query_tokens = 2, .max_kv_tokens = 1});
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  auto step = builder->build(0, {.seq_lens = seq_lens, .query_start = query_start});
  ASSERT_TRUE(step.ok()) << step.status().message();
  ASSERT_TRUE(decode(*step, {.q = dense(q.data(), request.dtype(), {2, 1, kWidth}),
                             .kv_cache = dense(cache.data(), request.dtype(), {1, kPage, kWidth}),
                             .pages = {.block_table = &page, .block_table_stride = 1, .max_pages = 1},
                             .out = dense(out.data(), Dtype::f32, {2, 1, kLatent}),
                             .lse = dense(lse.data(), Dtype::f32, {2, 1}),
                             .scale = 1.0f}));
  EXPECT_EQ(lse[0], -std::numeric_limits<float>::infinity());
  for (std::int32_t i = 0; i < kLatent; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], 0.0f) << i;
  EXPECT_TRUE(std::isnan(out[kLatent])) << "the row that does see it says so";
}

class HugeScores : public EachKernel {};

// Scores far apart, whose products with the scale have no bits left behind the point: two tokens share all the weight.
TEST_P(HugeScores, LeaveTheLargestOnesAllTheWeight) {
  constexpr std::int32_t kTokens = 150, kFirst = 5, kSecond = 131;
  const OneRequest request(backend);
  Rng rng(run_seed());
  std::vector<double> q(kWidth, 0.0), tokens(3 * kPage * kWidth);
  q[0] = 1;
  for (double& x : tokens) x = rng.normal();
  for (std::int32_t t = 0; t < kTokens; ++t)
    tokens[static_cast<std::size_t>(t) * kWidth] = t == kFirst || t == kSecond ? 1.375 : -1.0 - t % 7;
  const auto q_bytes = request.encode(q), cache = request.encode(tokens);
  const auto value = [&](std::int32_t token, std::size_t column) {
    const std::size_t at = static_cast<std::size_t>(token) * kWidth + column;
    return load(request.dtype(), &cache[at * dtype_bytes(request.dtype())]);
  };
  const std::int32_t pages[] = {0, 1, 2}, query_start[] = {0, 1}, seq_lens[] = {kTokens};
  auto builder = MetadataBuilder::create(backend, request.problem, {.max_requests = 1, .max_kv_tokens = kTokens});
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  auto step = builder->build(0, {.seq_lens = seq_lens, .query_start = query_start});
  ASSERT_TRUE(step.ok()) << step.status().message();
  for (float scale : {3e7f, 7e9f, 1.1e20f, 9.7e36f}) {
    std::vector<float> out(kLatent, NAN);
    float lse = NAN;
    ASSERT_TRUE(decode(*step, {.q = dense(q_bytes.data(), request.dtype(), {1, 1, kWidth}),
                               .kv_cache = dense(cache.data(), request.dtype(), {3, kPage, kWidth}),
                               .pages = {.block_table = pages, .block_table_stride = 3, .max_pages = 3},
                               .out = dense(out.data(), Dtype::f32, {1, 1, kLatent}),
                               .lse = dense(&lse, Dtype::f32, {1, 1}),
                               .scale = scale}));
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_NEAR(out[i], (value(kFirst, i) + value(kSecond, i)) / 2, 1e-6) << "scale " << scale << ", column " << i;
    EXPECT_NEAR(lse / (1.375 * static_cast<double>(scale)), 1, 1e-6) << "scale " << scale;
  }
}

class RisingScores : public EachKernel {};

// Many tokens are alike, and then one is so far above the first ones that a row's reference rises. What the many have
// been rounded to must be what outputs are divided by, before and after.
TEST_P(RisingScores, KeepTheWeightOfWhatCameBefore) {
  constexpr std::int32_t kTokens = 128, kAlike = 32, kRises = 96;  // alike from there on; the one that is above them
  const Backend one_thread = open_backend(GetParam(), 1);
  Rng rng(run_seed());
  for (std::int32_t heads : {1, 40}) {
    OneRequest request(one_thread);
    request.problem.heads = heads;
    auto builder = MetadataBuilder::create(one_thread, request.problem, {.max_requests = 1, .max_kv_tokens = kTokens});
    ASSERT_TRUE(builder.ok()) << builder.status().message();
    const std::int32_t pages[] = {0, 1}, query_start[] = {0, 1}, seq_lens[] = {kTokens};
    auto step = builder->build(0, {.seq_lens = seq_lens, .query_start = query_start});
    ASSERT_TRUE(step.ok()) << step.status().message();
    for (int draw = 0; draw < 20; ++draw) {
      // A token's score is its first value, in powers of two; its other values are 1 where it is one of the many.
      std::vector<double> q(static_cast<std::size_t>(heads) * kWidth, 0.0), tokens(kTokens * kWidth, 0.0);
      for (std::int32_t h = 0; h < heads; ++h) q[static_cast<std::size_t>(h) * kWidth] = 1;
      const double alike = 6 + 0.9 * rng.uniform(), above = 8.1 + rng.uniform();
      for (std::int32_t t = kAlike; t <= kRises; ++t) {
        const auto at = tokens.begin() + t * kWidth;
        std::fill(at, at + kWidth, t < kRises ? 1.0 : 0.0);
        *at = t < kRises ? alike : above;
      }
      const auto q_bytes = request.encode(q), cache = request.encode(tokens);
      const auto weight = [&](std::int32_t token) {
        const std::size_t at = static_cast<std::size_t>(token) * kWidth * dtype_bytes(request.dtype());
        return std::exp2(load(request.dtype(), &cache[at]));
      };
      double many = 0, all = 0;
      for (std::int32_t t = 0; t < kTokens; ++t) {
        all += weight(t);
        if (t >= kAlike && t < kRises) many += weight(t);
      }
      std::vector<float> out(static_cast<std::size_t>(heads) * kLatent, NAN);
      ASSERT_TRUE(decode(*step, {.q = dense(q_bytes.data(), request.dtype(), {1, heads, kWidth}),
                                 .kv_cache = dense(cache.data(), request.dtype(), {2, kPage, kWidth}),
                                 .pages = {.block_table = pages, .block_table_stride = 2, .max_pages = 2},
                                 .out = dense(out.data(), Dtype::f32, {1, heads, kLatent}),
                                 .scale = static_cast<float>(std::log(2.0))}));
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (i % kLatent == 0) continue;  // the scores themselves
        ASSERT_NEAR(out[i], many / all, 6e-4) << heads << " heads, scores " << alike << " and " << above;
      }
    }
  }
}

// The same behind many thousands of tokens, whose sums have been moved into totals: these have to follow, too.
TEST_P(RisingScores, KeepTheWeightOfTotals) {
  const Backend one_thread = open_backend(GetParam(), 1);
  for (std::int32_t heads : {1, 40})
    for (std::int32_t tokens : {4608, 9000}) {
      OneRequest request(one_thread);
      request.problem.heads = heads;
      // Every token has a score of 0 and values of 1, but one near the end a score of 9, in powers of two, and zeros.
      const auto pages = static_cast<std::size_t>((tokens + kPage - 1) / kPage);
      std::vector<double> q(static_cast<std::size_t>(heads) * kWidth, 0.0), values(pages * kPage * kWidth, 1.0);
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) q[h * kWidth] = 1;
      for (std::size_t t = 0; t < pages * kPage; ++t) values[t * kWidth] = 0;
      const auto above = values.begin() + (tokens - 100) * kWidth;
      std::fill(above, above + kWidth, 0.0);
      *above = 9;
      const auto q_bytes = request.encode(q), cache = request.encode(values);
      std::vector<std::int32_t> list(pages);
      std::iota(list.begin(), list.end(), 0);
      const std::int32_t query_start[] = {0, 1}, seq_lens[] = {tokens};
      auto builder = MetadataBuilder::create(one_thread, request.problem, {.max_requests = 1, .max_kv_tokens = tokens},
                                             {.policy = Policy::uniform(1)});
      ASSERT_TRUE(builder.ok()) << builder.status().message();
      auto step = builder->build(0, {.seq_lens = seq_lens, .query_start = query_start});
      ASSERT_TRUE(step.ok()) << step.status().message();
      std::vector<float> out(static_cast<std::size_t>(heads) * kLatent, NAN), lse(static_cast<std::size_t>(heads), NAN);
      const auto count = static_cast<std::int64_t>(pages);
      ASSERT_TRUE(decode(*step, {.q = dense(q_bytes.data(), request.dtype(), {1, heads, kWidth}),
                                 .kv_cache = dense(cache.data(), request.dtype(), {count, kPage, kWidth}),
                                 .pages = {.block_table = list.data(), .block_table_stride = count, .max_pages = count},
                                 .out = dense(out.data(), Dtype::f32, {1, heads, kLatent}),
                                 .lse = dense(lse.data(), Dtype::f32, {1, heads}),
                                 .scale = static_cast<float>(std::log(2.0))}));
      const double all = tokens - 1 + 512;
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (i % kLatent == 0) continue;  // the scores themselves
        ASSERT_NEAR(out[i], (tokens - 1) / all, 1e-3) << heads << " heads, " << tokens << " tokens";
      }
      for (float row : lse) ASSERT_NEAR(row, std::log(all), 1e-3) << heads << " heads, " << tokens << " tokens";
    }
}

// In a process of its own, which has too little address space for so many stacks.
TEST(ShortOfMemory, OpeningABackendSaysSoAndReturns) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    const rlimit limit{std::size_t{512} << 20, std::size_t{512} << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
    const auto backend = Backend::open({.threads = 1024});
    _exit(backend.ok() ? 4 : backend.status().code() == Code::out_of_memory ? 0 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, LongContext, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, HugeScores, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, RisingScores, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, HiddenTokens, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
