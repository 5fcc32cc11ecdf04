// Which arithmetic runs, and that it says so.
#include <gtest/gtest.h>

#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

PrefillCase small(Dtype dtype, PrefillMath math) {
  PrefillCase c;
  c.heads = 3;
  c.requests = {{70, 150}, {33, 33}};
  c.dtype = dtype;
  c.math = math;
  return c;
}

TEST(PrefillMathOnCpu, IsHalfWhateverIsAskedAndGivesAReason) {
  const Backend backend = open_backend();
  for (PrefillMath math : {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8})
    for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
      const PrefillCase c = small(dtype, math);
      auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
      EXPECT_EQ(builder.math(), PrefillMath::half) << c.name();
      EXPECT_FALSE(builder.reason().empty());
      const bool fp8_wanted = math == PrefillMath::fp8 || (dtype == Dtype::fp8_e4m3 && math == PrefillMath::automatic);
      if (fp8_wanted) {
        EXPECT_NE(builder.reason().find("fp8"), std::string::npos) << builder.reason();
      }
      const PrefillBatch batch(c);
      EXPECT_EQ(builder.build(0, batch.lengths()).value().math(), PrefillMath::half);
      const Result<PrefillChoice> choice = backend.choose(c.problem(), c.limits());
      ASSERT_TRUE(choice.ok()) << choice.status().message();
      EXPECT_EQ(choice->math, PrefillMath::half);
      EXPECT_EQ(choice->kernel, builder.kernel());
    }
}

// The forced fallback: tensors that were to be quantised on entry are multiplied as they are, scales unread.
TEST(PrefillMathOnCpu, ThatFallsBackToHalfComputesTheUnquantisedTruth) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (ScaleForm form : {ScaleForm::value, ScaleForm::pointer, ScaleForm::per_head}) {
      PrefillCase c = small(dtype, PrefillMath::fp8);
      c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
      c.scale_form = form;
      c.outliers = true;
      const auto report = run_case(open_backend(), c);
      ASSERT_TRUE(report.ok()) << report.status().message();
      EXPECT_TRUE(report->ok()) << report->message();
      EXPECT_EQ(report->math, PrefillMath::half);
    }
}

TEST(PrefillMathOnCpu, GivesTheSameBitsHoweverItIsAskedFor) {
  const Backend backend = open_backend();
  std::vector<std::byte> first;
  for (PrefillMath math : {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8}) {
    PreparedPrefill prepared(small(Dtype::fp8_e4m3, math));
    ASSERT_TRUE(run_case(backend, prepared).ok());
    if (first.empty()) first = prepared.batch.result_bits();
    EXPECT_EQ(prepared.batch.result_bits(), first);
  }
}

}  // namespace
}  // namespace latte::testkit
