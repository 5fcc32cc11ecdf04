// Runs a case on a backend and compares it with the oracle.
#pragma once

#include <string>

#include "latte/backend.hpp"
#include "latte/decode.hpp"
#include "latte/status.hpp"
#include "testkit/batch.hpp"
#include "testkit/case.hpp"
#include "testkit/compare.hpp"
#include "testkit/oracle.hpp"

namespace latte::testkit {

// A case with its memory and its truth: made once, run on as many kernels as there are.
struct PreparedCase {
  explicit PreparedCase(const DecodeCase& description, Fill fill = Fill::checked)
      : batch(description, fill), oracle(decode_oracle(description.problem(), batch.lengths(), batch.args())) {}

  DecodeBatch batch;
  OracleResult oracle;
};

struct CaseReport {
  std::string name;  // of the case
  std::string kernel;
  Comparison comparison;  // guard bands included: damage makes it not ok

  bool ok() const { return comparison.ok; }
  // One line that says what to run again and what was wrong.
  std::string message() const { return "[" + kernel + "] " + name + ": " + comparison.message; }
};

// The case as this backend takes it: a device wants aligned strides.
DecodeCase for_backend(const Backend& backend, DecodeCase description);

// Builds the plan, runs decode once into poisoned outputs and compares. A Status means that the library refused. On a
// device the tensors are copied there and back.
Result<CaseReport> run_case(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options,
                            const Limits& limits);
Result<CaseReport> run_case(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options = {});
Result<CaseReport> run_case(const Backend& backend, const DecodeCase& description, const BuilderOptions& options = {});

}  // namespace latte::testkit
