// Equal bits of prefill: from run to run, wherever the tensors lie, and for the batch-invariant policy across batches
// and worker counts.
#include <gtest/gtest.h>

#include "testkit/context_expander.hpp"
#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

class SamePrefillBits : public EachPrefillKernel {};
class BatchInvariantPrefillBits : public EachPrefillKernel {};

// One set of limits for all steps, as an engine has: chunk and kernel may depend on them.
constexpr Limits kLimits{.max_requests = 8, .max_query_tokens = 300, .max_kv_tokens = 1024};

PrefillCase mixed_batch() {
  PrefillCase c;
  c.requests = {{70, 700}, {130, 130}, {1, 64}, {20, 0}, {1, 1}, {64, 63}, {33, 800}};
  c.heads = 2;
  c.scale_form = ScaleForm::per_head;
  c.seed = run_seed();
  return c;
}

void run_step(const Backend& backend, PrefillBatch& batch, const Policy& policy, std::int32_t workers = 0) {
  Limits limits = kLimits;
  limits.workers = workers;
  auto builder = PrefillBuilder::create(backend, batch.description().problem(), limits, {.policy = policy}).value();
  batch.poison_outputs();
  const Status status = prefill(builder.build(0, batch.lengths()).value(), batch.args());
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST_P(SamePrefillBits, FromRunToRunForEveryPolicy) {
  for (const PrefillCase& c : served_dtypes(mixed_batch())) {
    PrefillBatch batch(c);
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(5), Policy::batch_invariant(256)}) {
      run_step(backend, batch, policy);
      const auto first = batch.result_bits();
      auto builder = PrefillBuilder::create(backend, c.problem(), kLimits, {.policy = policy}).value();
      const auto metadata = builder.build(0, batch.lengths()).value();
      for (int repeat = 0; repeat < 5; ++repeat) {
        batch.poison_outputs();
        ASSERT_TRUE(prefill(metadata, batch.args()).ok());
        ASSERT_EQ(batch.result_bits(), first) << c.name() << " policy " << policy_name(policy.kind);
      }
    }
  }
}

TEST_P(SamePrefillBits, WithContextFromRunToRun) {
  PrefillCase shape = mixed_batch();
  shape.requests = {{40, 40, 350}, {33, 20, 0}, {1, 1, 701}, {65, 65, 1}};
  for (PrefillCase c : served_dtypes(shape)) {
    c.context_workspace_bytes = workspace_for_chunks(backend, c, 1).value();
    PrefillBatch batch(c);
    auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
    std::vector<std::byte> first;
    for (int repeat = 0; repeat < 4; ++repeat) {
      batch.poison_outputs();
      ContextExpander expander(backend, batch);
      PrefillArgs args = batch.args();
      expander.attach(args);
      const Status status = prefill(builder.build(0, batch.lengths()).value(), args);
      ASSERT_TRUE(status.ok()) << status.message();
      if (repeat == 0) first = batch.result_bits();
      ASSERT_EQ(batch.result_bits(), first) << c.name();
    }
  }
}

TEST_P(SamePrefillBits, WhereverTheTensorsLie) {
  for (const PrefillCase& c : served_dtypes(mixed_batch())) {
    PrefillBatch batch(c);
    run_step(backend, batch, Policy::balanced());
    for (Layout layout : {Layout::gapped, Layout::transposed}) {
      PrefillCase other = c;
      other.q_layout = other.k_layout = other.v_layout = other.out_layout = other.lse_layout = layout;
      PrefillBatch moved = batch.relaid(other);
      run_step(backend, moved, Policy::balanced());
      EXPECT_EQ(moved.result_bits(), batch.result_bits()) << other.name();
    }
  }
}

TEST_P(BatchInvariantPrefillBits, DoNotDependOnNeighboursOrderOrPadding) {
  constexpr std::int32_t kPad = PrefillBatch::kPadding;
  const std::vector<std::vector<std::int32_t>> steps = {
      {0}, {1}, {2}, {3}, {5}, {6}, {6, 5, 4, 3, 2, 1, 0}, {kPad, 5, kPad, 0, 1, kPad}, {5, 5, 0, 2, 6, 6}};
  for (std::int32_t chunk : {0, 256}) {
    const Policy policy = Policy::batch_invariant(chunk);
    for (const PrefillCase& c : served_dtypes(mixed_batch())) {
      PrefillBatch whole(c);
      run_step(backend, whole, policy);
      for (const auto& order : steps) {
        PrefillBatch step = whole.reordered(order);
        run_step(backend, step, policy);
        for (std::size_t i = 0; i < order.size(); ++i) {
          if (order[i] == kPad) continue;
          EXPECT_EQ(step.result_bits(static_cast<std::int32_t>(i)), whole.result_bits(order[i]))
              << "request " << order[i] << " as number " << i << " of " << step.description().spec() << ": " << c.name()
              << " chunk " << chunk;
        }
      }
    }
  }
}

// The same tensors and pages, in steps where the other requests have no context.
TEST_P(BatchInvariantPrefillBits, DoNotDependOnTheContextOfNeighbours) {
  PrefillCase shape = mixed_batch();
  shape.requests = {{40, 40, 350}, {33, 20, 0}, {1, 1, 701}, {65, 65, 1}, {30, 50, 264}};
  for (PrefillCase c : served_dtypes(shape)) {
    c.context_workspace_bytes = workspace_for_chunks(backend, c, 1).value();
    PreparedPrefill prepared(c);
    PrefillBatch& batch = prepared.batch;
    auto builder =
        PrefillBuilder::create(backend, c.problem(), c.limits(), {.policy = Policy::batch_invariant(128)}).value();
    ContextExpander expander(backend, batch);
    std::vector<std::int32_t> chunks;
    const auto run = [&](const std::vector<std::int32_t>& context_lens) {
      batch.poison_outputs();
      expander.reset();
      PrefillArgs args = batch.args();
      expander.attach(args);
      PrefillLengths lengths = batch.lengths();
      lengths.context_lens = context_lens;
      const auto metadata = builder.build(0, lengths).value();
      chunks.push_back(metadata.chunks());
      const Status status = prefill(metadata, args);
      ASSERT_TRUE(status.ok()) << status.message();
    };
    const std::vector<std::int32_t> all(batch.lengths().context_lens.begin(), batch.lengths().context_lens.end());
    run(all);
    ASSERT_TRUE(expander.finished().ok()) << expander.finished().message();
    const Comparison result = compare_prefill(prepared, builder.math(), expander.expanded());
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    std::vector<std::vector<std::byte>> expected;
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(all.size()); ++r) expected.push_back(batch.result_bits(r));
    for (std::size_t kept = 0; kept < all.size(); ++kept) {
      std::vector<std::int32_t> lens(all.size(), 0);
      lens[kept] = all[kept];
      run(lens);
      EXPECT_EQ(batch.result_bits(static_cast<std::int32_t>(kept)), expected[kept]) << c.name() << " request " << kept;
    }
    EXPECT_GT(chunks.front(), 2);
    EXPECT_EQ(chunks[2], 0);  // the one that has no context, kept
  }
}

TEST_P(BatchInvariantPrefillBits, DoNotDependOnHowManyShareTheWork) {
  for (const PrefillCase& c : served_dtypes(mixed_batch())) {
    PrefillBatch batch(c);
    run_step(backend, batch, Policy::batch_invariant(256));
    const auto expected = batch.result_bits();
    for (std::int32_t threads : {1, 2, 5}) {
      const Backend other = open_backend(GetParam(), threads);
      run_step(other, batch, Policy::batch_invariant(256));
      EXPECT_EQ(batch.result_bits(), expected) << c.name() << " threads " << threads;
    }
    const Backend wide = open_backend(GetParam(), 5);
    for (std::int32_t workers : {1, 3}) {
      run_step(wide, batch, Policy::batch_invariant(256), workers);
      EXPECT_EQ(batch.result_bits(), expected) << c.name() << " workers " << workers << " of 5";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SamePrefillBits, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, BatchInvariantPrefillBits, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
