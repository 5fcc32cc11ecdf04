// What the kernel tests share: the kernels of this machine and the seed of this run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "latte/latte.hpp"
#include "testkit/run_case.hpp"

namespace latte::testkit {

// More workers than some machines have cores: plans split whatever the machine.
inline constexpr std::int32_t kThreads = 3;

Backend open_backend(const std::string& kernel = "auto", std::int32_t threads = kThreads);

// Names of the kernels this machine can run, best first.
std::vector<std::string> usable_kernels();

// LATTE_TEST_SEED, or a fresh one for every run. Printed, so that a failure can be had again.
std::uint64_t run_seed();

// Runs the case and expects it to agree with the oracle. False if the kernel does not serve such a problem.
bool expect_agreement(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options,
                      const Limits& limits);
bool expect_agreement(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options = {});

// A test for each usable kernel. Problems the kernel does not serve are another kernel's business.
class EachKernel : public ::testing::TestWithParam<std::string> {
 protected:
  EachKernel() : backend(open_backend(GetParam())) {}
  // The formats this kernel serves, in the precision engines use with them.
  std::vector<DecodeCase> served_formats(const DecodeCase& shape) const;

  Backend backend;
};

// For INSTANTIATE_TEST_SUITE_P.
inline auto each_kernel() { return ::testing::ValuesIn(usable_kernels()); }
inline std::string kernel_test_name(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

}  // namespace latte::testkit
