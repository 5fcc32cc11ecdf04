// Prompts whose older tokens lie in the paged cache: chunked, they come out as if they had never been cut.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "testkit/context_expander.hpp"
#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

class PrefillContextTest : public EachPrefillKernel {};

PrefillCase context_case(KvFormat format) {
  PrefillCase c;
  c.heads = 2;
  c.kv_format = format;
  if (format == KvFormat::fp8_ds_mla) c.latent = 512, c.rope = 64;
  c.requests = {{40, 40, 350}, {33, 20, 0}, {1, 1, 701}, {0, 5, 9}, {65, 65, 1}, {3, 0, 17}, {30, 50, 264}};
  return c;
}

constexpr KvFormat kFormats[] = {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3,
                                 KvFormat::fp8_ds_mla};

// Chunks that divide neither pages, nor tiles, nor any length.
TEST_P(PrefillContextTest, InChunksOfAnySizeAgreesWithTheOracle) {
  for (KvFormat format : kFormats)
    for (PrefillCase c : served_dtypes(context_case(format))) {
      c.page_size = c.dtype == Dtype::f16 ? 7 : 16;
      c.page_form = c.dtype == Dtype::f32 ? PageForm::csr : PageForm::block_table;
      std::int32_t chunks_before = 0;
      for (std::int32_t tokens : {1333, 541, 1}) {  // all at once, most of it, and the fewest there may be
        c.context_workspace_bytes = workspace_for_chunks(backend, c, tokens).value();
        PreparedPrefill prepared(c);
        const auto report = run_case(backend, prepared, {});
        ASSERT_TRUE(report.ok()) << c.name() << ": " << report.status().message();
        EXPECT_TRUE(report->ok()) << report->message();
        EXPECT_GT(report->chunks, chunks_before) << c.name();
        chunks_before = report->chunks;
      }
    }
}

// How far apart the same call, cut and uncut, may lie. Nothing but rounding tells them apart.
//
// Scores and values are multiplied alike in both, and sums over tokens that run otherwise differ by a few u = 2^-24.
// What is new is the joining, which weighs each chunk by its LSE, a number of fp32: it is known to u * |lse|, and with
// the logarithm and the sum behind it to about u * (1 + |lse|). Each join rounds the LSE of the sum once more, and the
// first and the uncut one were rounded too: at worst these add up in the LSE. In a row of the output, where they are
// weights of many chunks and of either sign, their squares do.
//
// Where the tensors have 16 bits or fewer, kernels may round the weights as they round the output: to a format in which
// a value lies, in the mean square, 0.42 u from what it was (an ulp / sqrt(12), over all significands), and so 0.6 u
// from another rounding of it. The LSE keeps its tolerance.
Tolerance rounding(Dtype format, std::int32_t joins, const OracleResult& truth, const Tolerance& usual) {
  if (format == Dtype::bf16 || format == Dtype::f16)
    return {.out = std::ldexp(0.6, format == Dtype::bf16 ? -8 : -11), .lse = usual.lse};
  double largest = 0;
  for (const double lse : truth.lse) largest = std::max(largest, std::fabs(lse));
  const double once = std::ldexp(1 + largest, -24);
  return {.out = std::sqrt(joins + 2.0) * once, .lse = (joins + 2) * once};
}

// Against one call over the same keys and values without a cache, and both against the truth.
void expect_equals_uncut(const Backend& backend, const PrefillCase& c, Dtype coarsest_format) {
  PreparedPrefill chunked(c);
  ContextExpander expander(backend, chunked.batch);
  auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
  PrefillArgs args = chunked.batch.args();
  expander.attach(args);
  const Status status = prefill(builder.build(0, chunked.batch.lengths()).value(), args);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_GT(expander.chunks(), 1);
  const OracleResult& truth = chunked.oracle(builder.math(), expander.expanded());
  const Tolerance tolerance = c.tolerance(builder.math(), truth.max_abs_score);
  const Comparison comparison = compare(args.out, args.lse, truth, tolerance);
  EXPECT_TRUE(comparison.ok) << comparison.message;

  PrefillCase whole = c;
  for (PrefillRequest& request : whole.requests) {
    request.kv_tokens += request.context_tokens;
    request.context_tokens = 0;
  }
  PrefillBatch uncut(whole);
  uncut.copy_joined(chunked.batch, expander.expanded());
  auto plain = PrefillBuilder::create(backend, whole.problem(), whole.limits()).value();
  ASSERT_TRUE(prefill(plain.build(0, uncut.lengths()).value(), uncut.args()).ok());
  const Comparison same = compare(uncut.args().out, uncut.args().lse, truth, tolerance);
  EXPECT_TRUE(same.ok) << "the uncut call: " << same.message;

  const Comparison direct = compare(args.out, args.lse, written(uncut.args().out, uncut.args().lse),
                                    rounding(coarsest_format, expander.chunks(), truth, tolerance));
  EXPECT_TRUE(direct.ok) << "from the uncut call: " << direct.message;
}

TEST_P(PrefillContextTest, EqualsTheUncutCallWithinRounding) {
  PrefillCase shape = context_case(KvFormat::bf16);
  shape.requests = {{40, 40, 350}, {1, 1, 701}, {65, 65, 1}, {30, 30, 264}};
  shape.seed = run_seed();
  for (const PrefillCase& served : served_dtypes(shape))
    for (Dtype out : {served.out_dtype, Dtype::f32}) {
      PrefillCase c = served;
      c.out_dtype = out;
      if (!backend.supports(c.problem()).ok) continue;
      c.context_workspace_bytes = workspace_for_chunks(backend, c, 1).value();
      SCOPED_TRACE(c.name());
      expect_equals_uncut(backend, c, served.out_dtype);
    }
}

TEST_P(PrefillContextTest, PlansAndPoliciesChangeNothing) {
  for (PrefillCase c : served_dtypes(context_case(KvFormat::bf16))) {
    c.context_workspace_bytes = workspace_for_chunks(backend, c, 1).value();
    PreparedPrefill prepared(c);
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(128)})
      expect_agreement(backend, prepared, {.policy = policy});
  }
}

TEST_P(PrefillContextTest, AStepWithoutContextNeedsNoHook) {
  for (PrefillCase c : served_dtypes(context_case(KvFormat::bf16))) {
    PrefillCase without = c;
    for (PrefillRequest& request : without.requests) request.context_tokens = 0;
    PreparedPrefill prepared(without);
    auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
    const std::vector<std::int32_t> none(c.requests.size(), 0);
    PrefillLengths lengths = prepared.batch.lengths();
    lengths.context_lens = none;
    const auto metadata = builder.build(0, lengths).value();
    EXPECT_EQ(metadata.chunks(), 0);
    const Status status = prefill(metadata, prepared.batch.args());
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison result = compare_prefill(prepared, metadata.math());
    EXPECT_TRUE(result.ok) << result.message;
  }
}

TEST_P(PrefillContextTest, WhatTheHookReturnsEndsTheCall) {
  for (const PrefillCase& c : served_dtypes(context_case(KvFormat::bf16))) {
    PrefillBatch batch(c);
    auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
    PrefillArgs args = batch.args();
    int calls = 0;
    args.user = &calls;
    args.expand = [](void* user, const ContextChunk&) {
      ++*static_cast<int*>(user);
      return Status(Code::out_of_memory, "projection", "memory", "none");
    };
    const Status status = prefill(builder.build(0, batch.lengths()).value(), args);
    EXPECT_EQ(status.code(), Code::out_of_memory);
    EXPECT_EQ(status.field(), "projection");
    EXPECT_EQ(calls, 1);
    EXPECT_FALSE(batch.guard_damage());
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PrefillContextTest, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
