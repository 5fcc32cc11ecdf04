// However a step is planned, the answer is the same.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "core/codec.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class EveryPolicy : public EachKernel {};

DecodeCase skewed_batch() {
  DecodeCase c;
  c.requests = {{1, 1900}, {3, 130}, {1, 0}, {2, 65}, {1, 1}, {4, 700}, {0, 50}};
  c.heads = 6;
  c.page_size = 16;
  return c;
}

TEST_P(EveryPolicy, AgreesWithTheOracle) {
  for (const DecodeCase& c : served_formats(skewed_batch())) {
    PreparedCase prepared(c);
    expect_agreement(backend, prepared, {.policy = Policy::balanced()});
    for (std::int32_t splits : {1, 2, 3, 7, 16})
      expect_agreement(backend, prepared, {.policy = Policy::uniform(splits)});
    for (std::int32_t chunk : {0, 128, 512, 1024})
      expect_agreement(backend, prepared, {.policy = Policy::batch_invariant(chunk)});
  }
}

TEST_P(EveryPolicy, CarriesOneHugeRequestAmongSmallOnes) {
  DecodeCase c;
  c.requests.assign(15, {1, 40});
  c.requests.insert(c.requests.begin() + 7, {1, 20'000});
  c.heads = 8;
  for (const DecodeCase& served : served_formats(c)) {
    PreparedCase prepared(served);
    expect_agreement(backend, prepared, {.policy = Policy::balanced()});
    expect_agreement(backend, prepared, {.policy = Policy::batch_invariant()});
  }
}

// An LSE of this size, rounded to fp32, would be off by 2e-3, and the weights of the pieces with it.
TEST_P(EveryPolicy, WeighsPiecesOfLargeScores) {
  constexpr std::int64_t kTokens = 1000, kPage = 64, kHeads = 16, kLatent = 512, kWidth = kLatent + 64;
  constexpr float kScore = 30720;
  const auto put = [](std::byte* to, std::int64_t i, KvFormat format, float value) {
    const std::uint16_t half = f32_to_bf16(value);
    if (format == KvFormat::f32)
      std::memcpy(to + 4 * i, &value, sizeof value);
    else
      std::memcpy(to + 2 * i, &half, sizeof half);
  };
  for (const KvFormat format : {KvFormat::bf16, KvFormat::f32}) {
    const Dtype dtype = kv_element_dtype(format);
    const DecodeProblem problem{
        .heads = kHeads, .q_dtype = dtype, .out_dtype = Dtype::f32, .kv_format = format, .page_size = kPage};
    if (!backend.supports(problem).ok) continue;
    const std::int64_t pages = (kTokens + kPage - 1) / kPage;
    std::vector<std::byte> q(kHeads * kWidth * 4), kv(static_cast<std::size_t>(pages * kPage * kWidth * 4));
    for (std::int64_t h = 0; h < kHeads; ++h) put(q.data(), h * kWidth + kLatent, format, 1);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      put(kv.data(), t * kWidth + kLatent, format, kScore);
      for (std::int64_t c = 0; c < kLatent; ++c) put(kv.data(), t * kWidth + c, format, t < 600 ? 1.0f : -1.0f);
    }
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    const std::vector<std::int32_t> seq_lens{kTokens}, query_start{0, 1};
    for (const std::int32_t splits : {1, 2, 3, 7}) {
      auto builder = MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_kv_tokens = kTokens},
                                             {.policy = Policy::uniform(splits)});
      ASSERT_TRUE(builder.ok()) << builder.status().message();
      const auto step = builder->build(0, {.seq_lens = seq_lens, .query_start = query_start});
      ASSERT_TRUE(step.ok()) << step.status().message();
      std::vector<float> out(kHeads * kLatent, std::nanf("")), lse(kHeads, std::nanf(""));
      const void *q_data = q.data(), *kv_data = kv.data();
      const Status status =
          decode(*step, {.q = dense(q_data, dtype, {1, kHeads, kWidth}),
                         .kv_cache = dense(kv_data, dtype, {pages, kPage, kWidth}),
                         .pages = {.block_table = table.data(), .block_table_stride = pages, .max_pages = pages},
                         .out = dense(out.data(), Dtype::f32, {1, kHeads, kLatent}),
                         .lse = dense(lse.data(), Dtype::f32, {1, kHeads}),
                         .scale = 1});
      ASSERT_TRUE(status.ok()) << status.message();
      for (const float value : out) ASSERT_NEAR(value, 0.2f, 2e-6f) << kv_format_name(format) << ", " << splits;
      for (const float value : lse)
        ASSERT_NEAR(value, kScore + std::log(float{kTokens}), 1e-2f) << kv_format_name(format) << ", " << splits;
    }
  }
}

TEST_P(EveryPolicy, WorksOnAPartOfTheMachine) {
  const Backend wide = open_backend(GetParam(), 5);
  for (const DecodeCase& c : served_formats(skewed_batch())) {
    PreparedCase prepared(c);
    for (std::int32_t workers : {1, 2, 4, 5})
      for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(256)})
        expect_agreement(wide, prepared, {.policy = policy}, c.limits(workers));
  }
}

TEST_P(EveryPolicy, WorksWithLimitsFarAboveTheStep) {
  for (const DecodeCase& c : served_formats(skewed_batch())) {
    PreparedCase prepared(c);
    const Limits limits{.max_requests = 64, .max_query_tokens = 16, .max_kv_tokens = 1 << 20};
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(4096)})
      expect_agreement(backend, prepared, {.policy = policy}, limits);
  }
}

TEST_P(EveryPolicy, StepsInFlightKeepApartInTheirSlots) {
  const Limits limits{.max_requests = 8, .max_query_tokens = 8, .max_kv_tokens = 4096};
  for (const DecodeCase& shape : served_formats(skewed_batch())) {
    std::vector<PreparedCase> steps;
    for (std::int32_t i = 0; i < 3; ++i) {
      DecodeCase c = shape;
      c.seed = 10 + static_cast<std::uint64_t>(i);
      c.requests = {{1 + i, 900 - 300 * i}, {2, 33 * (i + 1)}};
      if (i == 1) c.requests.push_back({1, 5});
      steps.emplace_back(c);
    }
    auto builder = MetadataBuilder::create(backend, shape.problem(), limits, {.slots = 3}).value();
    std::vector<DecodeMetadata> planned;
    for (std::int32_t i = 0; i < 3; ++i) planned.push_back(builder.build(i, steps[i].batch.lengths()).value());
    for (std::int32_t i : {2, 0, 1, 2}) {
      DecodeBatch& batch = steps[i].batch;
      batch.poison_outputs();
      const Status status = decode(planned[i], batch.args());
      ASSERT_TRUE(status.ok()) << status.message();
      const Comparison result = compare(batch.args().out, batch.args().lse, steps[i].oracle,
                                        batch.description().tolerance(steps[i].oracle.max_abs_score));
      EXPECT_TRUE(result.ok) << batch.description().name() << ": " << result.message;
    }
  }
}

TEST_P(EveryPolicy, TakesAWorkspaceFullOfGarbage) {
  DecodeCase c = skewed_batch();
  std::vector<DecodeCase> cases;
  for (const std::int32_t heads :
       {1, 6, 12}) {  // row tiles from 4 to 48: kernels may have products of their own for few
    c.heads = heads;
    std::ranges::move(served_formats(c), std::back_inserter(cases));
  }
  for (const DecodeCase& served : cases) {
    PreparedCase prepared(served);
    auto builder = MetadataBuilder::create(backend, served.problem(), served.limits(),
                                           {.policy = Policy::uniform(4), .own_workspace = false})
                       .value();
    const auto metadata = builder.build(0, prepared.batch.lengths()).value();
    const Buffer workspace = poisoned_buffer(builder.workspace_bytes(), Fill::checked);
    DecodeArgs args = prepared.batch.args();
    args.workspace = {workspace.data(), workspace.size()};
    const Status status = decode(metadata, args);
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison result =
        compare(args.out, args.lse, prepared.oracle, served.tolerance(prepared.oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << served.name() << ": " << result.message;
    EXPECT_FALSE(prepared.batch.guard_damage());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryPolicy, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
