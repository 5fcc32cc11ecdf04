#include "testkit/run_prefill.hpp"

#include "testkit/context_expander.hpp"
#include "testkit/device_prefill.hpp"

namespace latte::testkit {
namespace {

Status run_on_host(PrefillBuilder& builder, const PrefillBatch& batch, ContextExpander& expander) {
  const auto metadata = builder.build(0, batch.lengths());
  if (!metadata) return metadata.status();
  PrefillArgs args = batch.args();
  expander.attach(args);
  return prefill(*metadata, args);
}

Status run_on_device(const Backend& backend, PrefillBuilder& builder, PrefillBatch& batch, ContextExpander& expander) {
  const auto stream = OwnedStream::create(backend);
  if (!stream) return stream.status();
  const auto copy = DevicePrefill::upload(backend, batch);
  if (!copy) return copy.status();
  const auto metadata = builder.build(0, batch.lengths(), stream->get());
  if (!metadata) return metadata.status();
  PrefillArgs args = copy->args();
  args.stream = stream->get();
  expander.attach(args);
  if (const Status status = prefill(*metadata, args); !status) return status;
  if (const Status status = backend.synchronize(stream->get()); !status) return status;
  return copy->download_outputs(batch);
}

}  // namespace

const OracleResult& PreparedPrefill::oracle(PrefillMath ran, const ExpandedContext& context) {
  const PrefillProblem problem = batch.description().problem();
  const auto found = oracles_.find(ran);
  if (found != oracles_.end() && !problem.context) return found->second;
  return oracles_[ran] = prefill_oracle(problem, batch.lengths(), batch.args(), ran, context);
}

PrefillCase for_backend(const Backend& backend, PrefillCase description) {
  if (backend.on_device()) description.align_bytes = 16;
  return description;
}

Comparison compare_prefill(PreparedPrefill& prepared, PrefillMath ran, const ExpandedContext& context) {
  const OracleResult& oracle = prepared.oracle(ran, context);
  const PrefillArgs args = prepared.batch.args();
  Comparison comparison =
      compare(args.out, args.lse, oracle, prepared.batch.description().tolerance(ran, oracle.max_abs_score));
  if (const auto damage = prepared.batch.guard_damage()) {
    comparison.ok = false;
    comparison.message = *damage;
  }
  return comparison;
}

Result<PrefillReport> run_case(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options,
                               const Limits& limits) {
  const PrefillCase& description = prepared.batch.description();
  prepared.batch.poison_outputs();
  auto builder = PrefillBuilder::create(backend, description.problem(), limits, options);
  if (!builder) return builder.status();
  ContextExpander expander(backend, prepared.batch);
  const Status status = backend.on_device() ? run_on_device(backend, *builder, prepared.batch, expander)
                                            : run_on_host(*builder, prepared.batch, expander);
  if (!status) return status;
  if (const Status complete = expander.finished(); !complete) return complete;

  PrefillReport report;
  report.name = description.name();
  report.kernel = builder->kernel();
  report.comparison = compare_prefill(prepared, builder->math(), expander.expanded());
  report.math = builder->math();
  report.chunks = expander.chunks();
  return report;
}

Result<PrefillReport> run_case(const Backend& backend, PreparedPrefill& prepared, const BuilderOptions& options) {
  return run_case(backend, prepared, options, prepared.batch.description().limits());
}

Result<PrefillReport> run_case(const Backend& backend, const PrefillCase& description, const BuilderOptions& options) {
  PreparedPrefill prepared(for_backend(backend, description));
  return run_case(backend, prepared, options);
}

Result<std::int64_t> workspace_for_chunks(const Backend& backend, const PrefillCase& description, std::int32_t tokens) {
  PrefillCase c = description;
  // Too small a workspace is refused; from there on chunks grow with it.
  const auto holds = [&](std::int64_t bytes) {
    c.context_workspace_bytes = bytes;
    const auto builder = PrefillBuilder::create(backend, c.problem(), c.limits(), {.own_workspace = false});
    return builder.ok() && builder->chunk_tokens() >= tokens;
  };
  std::int64_t low = 0, high = std::int64_t{1} << 36;
  if (!holds(high)) return Status(Code::out_of_limits, "tokens", "a chunk the library makes", std::to_string(tokens));
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace latte::testkit
