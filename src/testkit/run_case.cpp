#include "testkit/run_case.hpp"

#include "testkit/device_batch.hpp"

namespace latte::testkit {
namespace {

Status run_on_host(MetadataBuilder& builder, DecodeBatch& batch) {
  const auto metadata = builder.build(0, batch.lengths());
  if (!metadata) return metadata.status();
  return decode(*metadata, batch.args());
}

Status run_on_device(const Backend& backend, MetadataBuilder& builder, DecodeBatch& batch) {
  const auto stream = OwnedStream::create(backend);
  if (!stream) return stream.status();
  const auto copy = DeviceBatch::upload(backend, batch);
  if (!copy) return copy.status();
  const auto metadata = builder.build(0, batch.lengths(), stream->get());
  if (!metadata) return metadata.status();
  DecodeArgs args = copy->args();
  args.stream = stream->get();
  if (const Status status = decode(*metadata, args); !status) return status;
  if (const Status status = backend.synchronize(stream->get()); !status) return status;
  return copy->download_outputs(batch);
}

}  // namespace

DecodeCase for_backend(const Backend& backend, DecodeCase description) {
  if (backend.on_device()) description.align_bytes = 16;
  return description;
}

Result<CaseReport> run_case(const Backend& backend, PreparedCase& prepared, const BuilderOptions& options,
                            const Limits& limits) {
  const DecodeCase& description = prepared.batch.description();
  prepared.batch.poison_outputs();
  auto builder = MetadataBuilder::create(backend, description.problem(), limits, options);
  if (!builder) return builder.status();
  const Status status =
      backend.on_device() ? run_on_device(backend, *builder, prepared.batch) : run_on_host(*builder, prepared.batch);
  if (!status) return status;

  const DecodeArgs args = prepared.batch.args();
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
  PreparedCase prepared(for_backend(backend, description));
  return run_case(backend, prepared, options);
}

}  // namespace latte::testkit
