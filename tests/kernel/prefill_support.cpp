#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {

bool expect_agreement(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options,
                      const Limits& limits) {
  const PrefillCase& description = prepared.batch.description();
  if (!backend.supports(description.problem()).ok) return false;
  const auto report = run_case(backend, prepared, options, limits);
  if (!report) {
    ADD_FAILURE() << description.name() << ": " << report.status().message();
  } else {
    EXPECT_TRUE(report->ok()) << report->message() << " [policy " << policy_name(options.policy.kind) << " "
                              << options.policy.n << ", workers " << limits.workers << "]";
  }
  return true;
}

bool expect_agreement(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options) {
  return expect_agreement(backend, prepared, options, prepared.batch.description().limits());
}

std::vector<PrefillCase> EachPrefillKernel::served_dtypes(const PrefillCase& shape) const {
  std::vector<PrefillCase> cases;
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3}) {
    PrefillCase c = shape;
    c.dtype = dtype;
    c.out_dtype = dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : dtype;
    if (backend.supports(c.problem()).ok) cases.push_back(c);
  }
  EXPECT_FALSE(cases.empty()) << GetParam() << " serves nothing";
  return cases;
}

}  // namespace latte::testkit
