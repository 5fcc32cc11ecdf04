// Equal bits: from run to run for every policy, and across batches and worker counts for the batch-invariant one.
#include <algorithm>
#include <cfenv>
#include <iterator>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class Bits : public EachKernel {
 protected:
  // Row tiles from 4 to 48: kernels may have products of their own for a few rows.
  std::vector<DecodeCase> batches_of(std::vector<RequestLengths> requests) const {
    DecodeCase c;
    c.requests = std::move(requests);
    c.page_size = 16;
    c.seed = run_seed();
    std::vector<DecodeCase> cases;
    for (std::int32_t heads : {1, 2, 3, 5, 12}) {
      c.heads = heads;
      std::ranges::move(served_formats(c), std::back_inserter(cases));
    }
    return cases;
  }
  std::vector<DecodeCase> mixed_batches() const {
    return batches_of({{1, 700}, {3, 130}, {1, 64}, {2, 0}, {1, 1}, {4, 2500}, {1, 333}});
  }
};
class SameBits : public Bits {};
class BatchInvariantBits : public Bits {};

// One set of limits for all steps, as an engine has: chunk and kernel may depend on them.
constexpr Limits kLimits{.max_requests = 16, .max_query_tokens = 4, .max_kv_tokens = 4096};

void run_step(const Backend& backend, DecodeBatch& batch, const Policy& policy, std::int32_t workers = 0) {
  Limits limits = kLimits;
  limits.workers = workers;
  auto builder = MetadataBuilder::create(backend, batch.description().problem(), limits, {.policy = policy}).value();
  batch.poison_outputs();
  const Status status = decode(builder.build(0, batch.lengths()).value(), batch.args());
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST_P(SameBits, FromRunToRunForEveryPolicy) {
  for (const DecodeCase& c : mixed_batches()) {
    DecodeBatch batch(c);
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(5), Policy::batch_invariant(256)}) {
      run_step(backend, batch, policy);
      const auto first = batch.result_bits();
      auto builder = MetadataBuilder::create(backend, c.problem(), kLimits, {.policy = policy}).value();
      const auto metadata = builder.build(0, batch.lengths()).value();
      for (int repeat = 0; repeat < 8; ++repeat) {
        batch.poison_outputs();
        ASSERT_TRUE(decode(metadata, batch.args()).ok());
        ASSERT_EQ(batch.result_bits(), first) << c.name() << " policy " << policy_name(policy.kind);
      }
    }
  }
}

// Rounding and what becomes of subnormals are the caller's own business.
TEST_P(SameBits, WhateverTheCallersRoundingMode) {
  for (DecodeCase c : mixed_batches()) {
    c.kv_scale = 0.37f, c.q_scale = 0.77f;  // whose products are rounded
    DecodeBatch batch(c);
    run_step(backend, batch, Policy::balanced());
    const auto expected = batch.result_bits();
    auto builder = MetadataBuilder::create(backend, c.problem(), kLimits).value();
    const auto metadata = builder.build(0, batch.lengths()).value();
    const DecodeArgs args = batch.args();  // whose scale is a division
    for (int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      batch.poison_outputs();
      ASSERT_EQ(std::fesetround(mode), 0);
      const Status status = decode(metadata, args);
      const int after = std::fegetround();
      std::fesetround(FE_TONEAREST);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(after, mode) << "the caller's mode was changed";
      EXPECT_TRUE(batch.result_bits() == expected) << c.name() << " rounding mode " << mode;
    }
  }
}

TEST_P(SameBits, WhereverThePagesLie) {
  for (DecodeCase c : mixed_batches()) {
    DecodeBatch batch(c);
    run_step(backend, batch, Policy::balanced());
    c.page_seed = 1;
    DecodeBatch moved(c);
    run_step(backend, moved, Policy::balanced());
    EXPECT_EQ(moved.result_bits(), batch.result_bits()) << c.name();
  }
}

// A block that all rows of a tile see, and one in which something is hidden from another row, may be different code.
TEST_P(SameBits, WhateverTheRowsBesideSee) {
  for (const DecodeCase& c : batches_of({{4, 1000}})) {
    DecodeBatch batch(c);
    auto builder = MetadataBuilder::create(backend, c.problem(), kLimits, {.policy = Policy::uniform(3)}).value();
    const auto run = [&](std::int32_t second_sees) {
      const std::vector<std::int32_t> visible = {1000, second_sees, 1000, 1000};
      StepLengths lengths = batch.lengths();
      lengths.visible = visible;
      batch.poison_outputs();
      const Status status = decode(builder.build(0, lengths).value(), batch.args());
      ASSERT_TRUE(status.ok()) << status.message();
    };
    run(1000);
    const auto all = batch.result_bits();
    const std::vector<std::byte> expected[] = {batch.token_bits(0), batch.token_bits(2), batch.token_bits(3)};
    for (std::int32_t seen : {0, 1, 47, 130, 700, 999}) {
      run(seen);
      EXPECT_NE(batch.result_bits(), all) << c.name() << " seen " << seen;
      EXPECT_EQ(batch.token_bits(0), expected[0]) << c.name() << " seen " << seen;
      EXPECT_EQ(batch.token_bits(2), expected[1]) << c.name() << " seen " << seen;
      EXPECT_EQ(batch.token_bits(3), expected[2]) << c.name() << " seen " << seen;
    }
  }
}

TEST_P(BatchInvariantBits, DoNotDependOnNeighboursOrderOrPadding) {
  constexpr std::int32_t kPad = DecodeBatch::kPadding;
  const std::vector<std::vector<std::int32_t>> steps = {
      {0}, {1}, {2}, {3}, {4}, {5}, {6}, {6, 5, 4, 3, 2, 1, 0}, {kPad, 5, kPad, 0, 1, kPad}, {5, 5, 5, 2, 6, 6}};
  for (std::int32_t chunk : {0, 256}) {
    const Policy policy = Policy::batch_invariant(chunk);
    for (const DecodeCase& c : mixed_batches()) {
      DecodeBatch whole(c);
      run_step(backend, whole, policy);
      for (const auto& order : steps) {
        DecodeBatch step = whole.reordered(order);
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

TEST_P(BatchInvariantBits, DoNotDependOnHowManyShareTheWork) {
  for (const DecodeCase& c : mixed_batches()) {
    DecodeBatch batch(c);
    run_step(backend, batch, Policy::batch_invariant(256));
    const auto expected = batch.result_bits();
    for (std::int32_t threads : {1, 2, 3, 5}) {
      const Backend other = open_backend(GetParam(), threads);
      run_step(other, batch, Policy::batch_invariant(256));
      EXPECT_EQ(batch.result_bits(), expected) << c.name() << " threads " << threads;
    }
    const Backend wide = open_backend(GetParam(), 5);
    for (std::int32_t workers : {1, 2, 3}) {
      run_step(wide, batch, Policy::batch_invariant(256), workers);
      EXPECT_EQ(batch.result_bits(), expected) << c.name() << " workers " << workers << " of 5";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SameBits, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, BatchInvariantBits, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
