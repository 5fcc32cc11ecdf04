// Runs a prefill case on a backend and compares it with the oracle.
#pragma once

#include <map>

#include "latte/backend.hpp"
#include "latte/prefill.hpp"
#include "latte/status.hpp"
#include "testkit/prefill_batch.hpp"
#include "testkit/prefill_oracle.hpp"
#include "testkit/run_case.hpp"

namespace latte::testkit {

// A case with its memory and its truth: made once, run on as many kernels as there are.
class PreparedPrefill {
 public:
  explicit PreparedPrefill(const PrefillCase& description, Fill fill = Fill::checked) : batch(description, fill) {}
  explicit PreparedPrefill(PrefillBatch made) : batch(std::move(made)) {}

  // Kept for cases without context; with context the truth is that of the keys and values the hook made.
  const OracleResult& oracle(PrefillMath ran, const ExpandedContext& context = {});

  PrefillBatch batch;

 private:
  std::map<PrefillMath, OracleResult> oracles_;
};

struct PrefillReport : CaseReport {
  PrefillMath math = PrefillMath::half;  // what ran
  std::int32_t chunks = 0;               // of the context
};

// The case as this backend takes it: a device wants aligned strides.
PrefillCase for_backend(const Backend& backend, PrefillCase description);

// Builds the plan, runs prefill once into poisoned outputs and compares. A Status means that the library refused. On a
// device the tensors are copied there and back.
Result<PrefillReport> run_case(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options,
                               const Limits& limits);
Result<PrefillReport> run_case(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options = {});
Result<PrefillReport> run_case(const Backend& backend, const PrefillCase& description,
                               const BuilderOptions& options = {});

// Compares the outputs in the batch's memory; damaged guard bands make it not ok.
Comparison compare_prefill(PreparedPrefill& prepared, PrefillMath ran, const ExpandedContext& context = {});

// The least PrefillContext::workspace_bytes with which a chunk holds at least `tokens` tokens.
Result<std::int64_t> workspace_for_chunks(const Backend& backend, const PrefillCase& description, std::int32_t tokens);

}  // namespace latte::testkit
