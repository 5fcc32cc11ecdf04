#include "testkit/run_case.hpp"

namespace latte::testkit {

Result<CaseReport> run_case(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options,
                            const Limits& limits) {
  const DecodeCase& description = prepared.batch.description();
  prepared.batch.poison_outputs();
  auto builder = MetadataBuilder::create(backend, description.problem(), limits, options);
  if (!builder) return builder.status();
  const auto metadata = builder->build(0, prepared.batch.lengths());
  if (!metadata) return metadata.status();
  const DecodeArgs args = prepared.batch.args();
  const Status status = decode(*metadata, args);
  if (!status) return status;

  CaseReport report{
      .name = description.name(),
      .kernel = builder->kernel(),
      .comparison = compare(args.out, args.lse, prepared.oracle, description.tolerance(prepared.oracle.max_abs_score))};
  if (const auto damage = prepared.batch.guard_damage()) {
    report.comparison.ok = false;
    report.comparison.message = *damage;
  }
  return report;
}

Result<CaseReport> run_case(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options) {
  return run_case(backend, prepared, options, prepared.batch.description().limits());
}

Result<CaseReport> run_case(const Backend& backend, const DecodeCase& description, const BuilderOptions& options) {
  PreparedCase prepared(description);
  return run_case(backend, prepared, options);
}

}  // namespace latte::testkit
