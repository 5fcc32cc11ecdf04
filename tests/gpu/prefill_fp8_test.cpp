// fp8 on the GPU: when it runs, when it does not, and how far it is from the truth of the same fp8 numbers.
#include <cstdio>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuPrefillFp8 : public OnGpu {};

// What the best peer's fp8 kernel has on the same kind of data (1 x 2048 causal, 16 heads). Rounding the weights to
// e4m3 alone costs 1.97e-2 there.
constexpr double kPeerError = 2.0e-2;

PrefillCase fp8_case(PrefillMath math, std::vector<PrefillRequest> requests, std::int32_t heads) {
  PrefillCase c = gpu_prefill(std::move(requests), heads);
  c.dtype = Dtype::fp8_e4m3;
  c.math = math;
  return c;
}

TEST_F(GpuPrefillFp8, RunsForFp8TensorsUnlessToldOtherwise) {
  const std::vector<PrefillRequest> requests = {{200, 200}, {65, 300}, {70, 3}};
  EXPECT_EQ(expect_agreement(backend(), fp8_case(PrefillMath::automatic, requests, 3)), PrefillMath::fp8);
  EXPECT_EQ(expect_agreement(backend(), fp8_case(PrefillMath::fp8, requests, 3)), PrefillMath::fp8);
  EXPECT_EQ(expect_agreement(backend(), fp8_case(PrefillMath::half, requests, 3)), PrefillMath::half);
}

TEST_F(GpuPrefillFp8, DoesNotRunForSixteenBitTensorsUnlessAskedFor) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    PrefillCase c = gpu_prefill({{200, 200}, {65, 300}, {70, 3}}, 3);
    c.dtype = dtype;
    c.out_dtype = dtype;
    EXPECT_EQ(expect_agreement(backend(), c), PrefillMath::half);
    c.math = PrefillMath::half;
    EXPECT_EQ(expect_agreement(backend(), c), PrefillMath::half);
    c.math = PrefillMath::fp8;
    for (ScaleForm form : {ScaleForm::value, ScaleForm::pointer, ScaleForm::per_head}) {
      c.scale_form = form;
      EXPECT_EQ(expect_agreement(backend(), c), PrefillMath::fp8) << "quantised on entry";
    }
  }
}

TEST_F(GpuPrefillFp8, BuilderMetadataAndChoiceSayWhatRunsAndWhy) {
  for (PrefillMath math : {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8})
    for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
      PrefillCase c = fp8_case(math, {{64, 64}}, 2);
      c.dtype = dtype;
      auto builder = PrefillBuilder::create(backend(), c.problem(), c.limits()).value();
      const PrefillBatch batch(c);
      const auto metadata = builder.build(0, batch.lengths(), stream()).value();
      const Result<PrefillChoice> choice = backend().choose(c.problem(), c.limits());
      ASSERT_TRUE(succeeded(choice.status()));
      EXPECT_NE(builder.math(), PrefillMath::automatic);
      EXPECT_EQ(metadata.math(), builder.math());
      EXPECT_EQ(choice->math, builder.math());
      EXPECT_STREQ(metadata.kernel(), builder.kernel());
      EXPECT_EQ(choice->kernel, builder.kernel());
      EXPECT_FALSE(builder.reason().empty());
    }
}

TEST_F(GpuPrefillFp8, IsNoFurtherFromTheTruthThanThePeer) {
  for (ScaleForm form : {ScaleForm::value, ScaleForm::per_head})
    for (bool outliers : {false, true}) {
      PrefillCase c = fp8_case(PrefillMath::automatic, {{2048, 2048}}, 16);
      c.scale_form = form;
      c.outliers = outliers;
      PreparedPrefill prepared(c);
      const auto report = run_case(backend(), prepared);
      ASSERT_TRUE(succeeded(report.status()));
      EXPECT_EQ(report->math, PrefillMath::fp8);
      EXPECT_TRUE(report->ok()) << report->message();
      EXPECT_LE(report->comparison.out_error, kPeerError) << c.name();
      std::printf("fp8 error %.3e, lse %.1e (%s%s)\n", report->comparison.out_error, report->comparison.lse_error,
                  form == ScaleForm::per_head ? "scales per head" : "one scale", outliers ? ", outliers" : "");
    }
}

// Long rows: what the accumulator of the hardware loses must not grow with the number of tokens.
TEST_F(GpuPrefillFp8, DoesNotLosePrecisionOnLongRows) {
  PrefillCase c = fp8_case(PrefillMath::fp8, {{64, 30'000}}, 2);
  c.mask = Mask::none;
  EXPECT_EQ(expect_agreement(backend(), c), PrefillMath::fp8);
  c.requests = {{128, 16'000}};
  c.outliers = true;
  EXPECT_EQ(expect_agreement(backend(), c), PrefillMath::fp8);
}

// Values are transposed by whoever needs them first. Here thread blocks need values of others, and more of them are
// launched than the device has room for, or a single one does it all; the last block of each request is not full. Each
// call has values of its own in the same workspace.
TEST_F(GpuPrefillFp8, ThreadBlocksShareTransposedValues) {
  const auto expect_agreement_in_every_call = [this](PrefillCase c, const Policy& policy, std::int32_t workers) {
    auto step = DevicePrefillStep::make(backend(), PrefillBatch(c), {.policy = policy}, c.limits(workers));
    EXPECT_EQ(step->builder.math(), PrefillMath::fp8);
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
    for (std::uint64_t seed : {21, 22, 23}) {
      c.seed = seed;
      PreparedPrefill other(c);
      other.batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_inputs(other.batch)));
      ASSERT_TRUE(succeeded(step->device.upload_outputs(other.batch)));
      ASSERT_TRUE(succeeded(prefill(metadata, step->args(stream()))));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(other.batch)));
      const Comparison result = compare_prefill(other, PrefillMath::fp8);
      EXPECT_TRUE(result.ok) << c.name() << " policy " << policy_name(policy.kind) << ": " << result.message;
    }
  };
  PrefillCase c = fp8_case(PrefillMath::fp8, {{300, 300}, {1, 2500}, {130, 400}}, 24);
  for (Mask mask : {Mask::causal, Mask::none}) {
    c.mask = mask;
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(1), Policy::uniform(7)})
      expect_agreement_in_every_call(c, policy, 0);
  }
  expect_agreement_in_every_call(fp8_case(PrefillMath::fp8, {{200, 300}, {1, 4500}}, 3), Policy::balanced(), 1);
}

// Values at the ends of the format: 448 and subnormals, under scales far from one.
TEST_F(GpuPrefillFp8, TakesTheWholeRangeOfTheFormat) {
  for (float scale : {1.0f / 120, 64.0f}) {
    PrefillCase c = fp8_case(PrefillMath::automatic, {{130, 200}, {64, 64}}, 3);
    c.q_scale = c.k_scale = c.v_scale = scale;
    expect_agreement(backend(), c);
    c.math = PrefillMath::half;
    expect_agreement(backend(), c);
  }
}

}  // namespace
}  // namespace latte::testkit
