// However a prefill step is planned, the answer is the same.
#include <gtest/gtest.h>

#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

class EveryPrefillPolicy : public EachPrefillKernel {};

PrefillCase skewed_batch() {
  PrefillCase c;
  c.requests = {{65, 1000}, {130, 130}, {1, 0}, {2, 65}, {70, 3}, {1, 1}, {0, 50}};
  c.heads = 2;
  return c;
}

TEST_P(EveryPrefillPolicy, AgreesWithTheOracle) {
  for (const PrefillCase& c : served_dtypes(skewed_batch())) {
    PreparedPrefill prepared(c);
    expect_agreement(backend, prepared, {.policy = Policy::balanced()});
    for (std::int32_t splits : {1, 2, 3, 7, 16})
      expect_agreement(backend, prepared, {.policy = Policy::uniform(splits)});
    for (std::int32_t chunk : {0, 128, 512, 1024})
      expect_agreement(backend, prepared, {.policy = Policy::batch_invariant(chunk)});
  }
}

// One tile of one head over many tokens: workers without a tile of their own take parts of it.
TEST_P(EveryPrefillPolicy, JoinsAFewLongRequestsOnManyWorkers) {
  const Backend wide = open_backend(GetParam(), 7);
  PrefillCase shape;
  shape.heads = 1;
  for (const std::vector<PrefillRequest>& requests :
       std::vector<std::vector<PrefillRequest>>{{{5, 6000}}, {{33, 4000}, {1, 2500}}, {{3, 1}, {7, 5001}}}) {
    shape.requests = requests;
    for (const PrefillCase& c : served_dtypes(shape)) {
      PreparedPrefill prepared(c);
      for (const Policy& policy : {Policy::balanced(), Policy::uniform(11), Policy::batch_invariant(512)})
        expect_agreement(wide, prepared, {.policy = policy});
      auto builder = PrefillBuilder::create(wide, c.problem(), c.limits(), {.policy = Policy::uniform(11)}).value();
      const auto metadata = builder.build(0, prepared.batch.lengths()).value();
      EXPECT_GT(metadata.plan().partial_rows(), 0) << "nothing was split: " << c.name();
    }
  }
}

TEST_P(EveryPrefillPolicy, WorksOnAPartOfTheMachine) {
  const Backend wide = open_backend(GetParam(), 5);
  for (const PrefillCase& c : served_dtypes(skewed_batch())) {
    PreparedPrefill prepared(c);
    for (std::int32_t workers : {1, 2, 5})
      for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(256)})
        expect_agreement(wide, prepared, {.policy = policy}, c.limits(workers));
  }
}

TEST_P(EveryPrefillPolicy, WorksWithLimitsFarAboveTheStep) {
  for (const PrefillCase& c : served_dtypes(skewed_batch())) {
    PreparedPrefill prepared(c);
    const Limits limits{.max_requests = 32, .max_query_tokens = 4096, .max_kv_tokens = 16384};
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(4096)})
      expect_agreement(backend, prepared, {.policy = policy}, limits);
  }
}

TEST_P(EveryPrefillPolicy, StepsInFlightKeepApartInTheirSlots) {
  const Limits limits{.max_requests = 4, .max_query_tokens = 200, .max_kv_tokens = 1024};
  for (const PrefillCase& shape : served_dtypes(skewed_batch())) {
    std::vector<PreparedPrefill> steps;
    for (std::int32_t i = 0; i < 3; ++i) {
      PrefillCase c = shape;
      c.seed = 10 + static_cast<std::uint64_t>(i);
      c.requests = {{60 + 40 * i, 900 - 300 * i}, {20, 33 * (i + 1)}};
      if (i == 1) c.requests.push_back({1, 5});
      steps.emplace_back(c);
    }
    auto builder =
        PrefillBuilder::create(backend, shape.problem(), limits, {.policy = Policy::uniform(3), .slots = 3}).value();
    std::vector<PrefillMetadata> planned;
    for (std::int32_t i = 0; i < 3; ++i) planned.push_back(builder.build(i, steps[i].batch.lengths()).value());
    for (std::int32_t i : {2, 0, 1, 2}) {
      steps[i].batch.poison_outputs();
      const Status status = prefill(planned[i], steps[i].batch.args());
      ASSERT_TRUE(status.ok()) << status.message();
      const Comparison result = compare_prefill(steps[i], planned[i].math());
      EXPECT_TRUE(result.ok) << steps[i].batch.description().name() << ": " << result.message;
    }
  }
}

TEST_P(EveryPrefillPolicy, TakesAWorkspaceFullOfGarbage) {
  for (const PrefillCase& c : served_dtypes(skewed_batch())) {
    PreparedPrefill prepared(c);
    auto builder =
        PrefillBuilder::create(backend, c.problem(), c.limits(), {.policy = Policy::uniform(4), .own_workspace = false})
            .value();
    const auto metadata = builder.build(0, prepared.batch.lengths()).value();
    std::vector<std::byte> memory(builder.workspace_bytes() + 256, std::byte{0xff});
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    PrefillArgs args = prepared.batch.args();
    args.workspace = {memory.data() + (256 - address % 256) % 256, builder.workspace_bytes()};
    ASSERT_TRUE(builder.init_workspace(args.workspace).ok());
    const Status status = prefill(metadata, args);
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison result = compare_prefill(prepared, metadata.math());
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, EveryPrefillPolicy, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
