// What the prefill kernel tests share.
#pragma once

#include "testkit/run_prefill.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {

// Runs the case and expects it to agree with the oracle. False if the kernel does not serve such a problem.
bool expect_agreement(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options,
                      const Limits& limits);
bool expect_agreement(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options = {});

class EachPrefillKernel : public EachKernel {
 protected:
  // The dtypes this kernel serves, with the output engines use beside them. Kernels without prefill have none.
  std::vector<PrefillCase> served_dtypes(const PrefillCase& shape) const;
};

}  // namespace latte::testkit
