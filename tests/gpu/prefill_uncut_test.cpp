// A context in chunks against one call on the GPU over the same keys and values: nothing but rounding tells them apart.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuPrefillUncut : public OnGpu {
 protected:
  // Both calls against each other, and both against the truth.
  void expect_equal(const PrefillCase& c, double weight_roundoff);
};

// How far apart the two may lie. Scores are multiplied alike in both, and sums, partials and chunks are joined in fp32:
// nothing beside the formats below. A weight is rounded to the format of the values it meets, relative to the largest
// score of its piece, which is another one in a chunk; so each call has a rounding of its own, and another one of the
// output. A value lies, in the mean square, 0.42 u from what it was (an ulp / sqrt(12), over all significands); these
// roundings are independent, so their squares add up. A tenth is for chance.
Tolerance rounding(const PrefillCase& c, double weight_roundoff, const Tolerance& usual) {
  const double out_roundoff = c.out_dtype == Dtype::f32 ? 0 : std::ldexp(1, c.out_dtype == Dtype::f16 ? -11 : -8);
  return {.out = 1.1 * 0.42 * std::sqrt(2.0) * std::hypot(weight_roundoff, out_roundoff), .lse = usual.lse};
}

void GpuPrefillUncut::expect_equal(const PrefillCase& c, double weight_roundoff) {
  SCOPED_TRACE(c.name());
  const auto chunked = DevicePrefillStep::make(backend(), c);
  ContextExpander expander(backend(), chunked->batch());
  PrefillArgs args = chunked->args(stream());
  expander.attach(args);
  ASSERT_TRUE(succeeded(chunked->poison()));
  const auto metadata = chunked->builder.build(0, chunked->batch().lengths(), stream()).value();
  ASSERT_GT(metadata.chunks(), 1);
  ASSERT_TRUE(succeeded(prefill(metadata, args)));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  ASSERT_TRUE(succeeded(chunked->device.download_outputs(chunked->batch())));
  ASSERT_TRUE(succeeded(expander.finished()));
  const PrefillMath math = chunked->builder.math();
  const OracleResult& truth = chunked->prepared.oracle(math, expander.expanded());
  const Tolerance tolerance = c.tolerance(math, truth.max_abs_score);
  const PrefillArgs cut = chunked->batch().args();
  const Comparison right = compare(cut.out, cut.lse, truth, tolerance);
  EXPECT_TRUE(right.ok) << right.message;
  EXPECT_FALSE(chunked->batch().guard_damage());

  PrefillCase whole = c;
  for (PrefillRequest& request : whole.requests) {
    request.kv_tokens += request.context_tokens;
    request.context_tokens = 0;
  }
  PrefillBatch joined(whole);
  joined.copy_joined(chunked->batch(), expander.expanded());
  const auto uncut = DevicePrefillStep::make(backend(), std::move(joined), {}, whole.limits());
  ASSERT_EQ(uncut->builder.math(), math);
  ASSERT_TRUE(succeeded(uncut->run(backend(), stream())));
  const PrefillArgs plain = uncut->batch().args();
  const Comparison same = compare(plain.out, plain.lse, truth, tolerance);
  EXPECT_TRUE(same.ok) << "the uncut call: " << same.message;

  const Comparison direct =
      compare(cut.out, cut.lse, written(plain.out, plain.lse), rounding(c, weight_roundoff, tolerance));
  EXPECT_TRUE(direct.ok) << "from the uncut call: " << direct.message;
}

constexpr double kBf16 = 0x1p-8, kF16 = 0x1p-11, kE4m3 = 0x1p-4;

// Chunks that divide neither pages, nor tiles, nor any length: most of the context, a good part of it, the fewest
// tokens there may be.
constexpr std::int32_t kChunks[] = {1009, 541, 1};

PrefillCase context_case(Dtype dtype, PrefillMath math = PrefillMath::automatic) {
  PrefillCase c = gpu_prefill({{40, 40, 350}, {1, 1, 701}, {65, 65, 1}, {30, 30, 264}}, 3);
  c.latent = 512;
  c.rope = 64;
  c.page_size = dtype == Dtype::f16 ? 7 : 64;
  c.dtype = dtype;
  c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
  c.math = math;
  return c;
}

TEST_F(GpuPrefillUncut, IsTheSameInSixteenBits) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16})
    for (bool wide_output : {false, true})
      for (std::int32_t tokens : kChunks) {
        PrefillCase c = context_case(dtype);
        if (wide_output) c.out_dtype = Dtype::f32;
        c.context_workspace_bytes = workspace_for_chunks(backend(), c, tokens).value();
        expect_equal(c, dtype == Dtype::f16 ? kF16 : kBf16);
      }
}

TEST_F(GpuPrefillUncut, IsTheSameInFp8) {
  for (std::int32_t tokens : kChunks) {
    PrefillCase c = context_case(Dtype::fp8_e4m3);
    c.context_workspace_bytes = workspace_for_chunks(backend(), c, tokens).value();
    expect_equal(c, kE4m3);
  }
}

// Every chunk's keys and values are quantised with the scales of the call, as those of the new tokens are.
TEST_F(GpuPrefillUncut, IsTheSameWhenQuantisedOnEntry) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16})
    for (ScaleForm form : {ScaleForm::value, ScaleForm::per_head})
      for (std::int32_t tokens : kChunks) {
        PrefillCase c = context_case(dtype, PrefillMath::fp8);
        c.scale_form = form;
        c.context_workspace_bytes = workspace_for_chunks(backend(), c, tokens).value();
        expect_equal(c, kE4m3);
      }
}

// Every chunk is converted to 16 bits.
TEST_F(GpuPrefillUncut, IsTheSameWhenFp8TensorsAreConvertedOnEntry) {
  for (ScaleForm form : {ScaleForm::value, ScaleForm::per_head})
    for (std::int32_t tokens : kChunks) {
      PrefillCase c = context_case(Dtype::fp8_e4m3, PrefillMath::half);
      c.scale_form = form;
      c.context_workspace_bytes = workspace_for_chunks(backend(), c, tokens).value();
      expect_equal(c, kBf16);
    }
}

}  // namespace
}  // namespace latte::testkit
