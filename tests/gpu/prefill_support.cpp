#include "tests/gpu/prefill_support.hpp"

#include <utility>

namespace latte::testkit {

PrefillCase gpu_prefill(std::vector<PrefillRequest> requests, std::int32_t heads) {
  PrefillCase c;
  c.requests = std::move(requests);
  c.heads = heads;
  c.align_bytes = 16;
  return c;
}

PrefillMath expect_agreement(const Backend& backend, const PrefillCase& description, const BuilderOptions& options,
                             const Limits* limits) {
  PreparedPrefill prepared(description);
  const auto report = run_case(backend, prepared, options, limits != nullptr ? *limits : description.limits());
  if (!report) {
    ADD_FAILURE() << description.name() << ": " << report.status().message();
    return PrefillMath::automatic;
  }
  EXPECT_TRUE(report->ok()) << report->message() << " policy " << policy_name(options.policy.kind) << " math "
                            << prefill_math_name(report->math);
  return report->math;
}

std::unique_ptr<DevicePrefillStep> DevicePrefillStep::make(const Backend& backend, const PrefillCase& description,
                                                           const BuilderOptions& options) {
  return make(backend, PrefillBatch(description), options, description.limits());
}

std::unique_ptr<DevicePrefillStep> DevicePrefillStep::make(const Backend& backend, PrefillBatch batch,
                                                           const BuilderOptions& options, const Limits& limits) {
  auto builder = PrefillBuilder::create(backend, batch.description().problem(), limits, options).value();
  auto device = DevicePrefill::upload(backend, batch).value();
  return std::unique_ptr<DevicePrefillStep>(
      new DevicePrefillStep{PreparedPrefill(std::move(batch)), std::move(device), std::move(builder)});
}

PrefillArgs DevicePrefillStep::args(Stream stream) const {
  PrefillArgs args = device.args();
  args.stream = stream;
  return args;
}

Status DevicePrefillStep::poison() {
  batch().poison_outputs();
  return device.upload_outputs(batch());
}

Status DevicePrefillStep::run(const Backend& backend, Stream stream) {
  if (Status status = poison(); !status) return status;
  const auto metadata = builder.build(0, batch().lengths(), stream);
  if (!metadata) return metadata.status();
  if (Status status = prefill(*metadata, args(stream)); !status) return status;
  if (Status status = backend.synchronize(stream); !status) return status;
  return device.download_outputs(batch());
}

Comparison DevicePrefillStep::compared() {
  if (const Status status = device.download_outputs(batch()); !status) {
    Comparison failed;
    failed.ok = false;
    failed.message = status.message();
    return failed;
  }
  return compare_prefill(prepared, builder.math());
}

}  // namespace latte::testkit
