#include "tests/kernel/support.hpp"

#include <cstdlib>
#include <iostream>
#include <random>

namespace latte::testkit {

Backend open_backend(const std::string& kernel, std::int32_t threads) {
  return Backend::open({.threads = threads, .kernel = kernel}).value();
}

std::vector<std::string> usable_kernels() {
  std::vector<std::string> names;
  for (const KernelInfo& kernel : open_backend("auto", 1).info().kernels)
    if (kernel.usable) names.push_back(kernel.name);
  return names;
}

std::uint64_t run_seed() {
  static const std::uint64_t seed = [] {
    const char* fixed = std::getenv("LATTE_TEST_SEED");
    const std::uint64_t value = fixed ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
    std::cout << "LATTE_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

bool expect_agreement(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options,
                      const Limits& limits) {
  const DecodeCase& description = prepared.batch.description();
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

bool expect_agreement(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options) {
  return expect_agreement(backend, prepared, options, prepared.batch.description().limits());
}

std::vector<DecodeCase> EachKernel::served_formats(const DecodeCase& shape) const {
  std::vector<DecodeCase> cases;
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
    DecodeCase c = shape;
    c.kv_format = format;
    const bool fp8 = dtype_bytes(kv_element_dtype(format)) == 1;
    c.q_dtype = c.out_dtype = fp8 ? Dtype::bf16 : kv_element_dtype(format);
    if (backend.supports(c.problem()).ok) cases.push_back(c);
  }
  EXPECT_FALSE(cases.empty()) << GetParam() << " serves nothing";
  return cases;
}

}  // namespace latte::testkit
