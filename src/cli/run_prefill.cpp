// latte run for prefill.
#include <fmt/format.h>

#include "cli/captured_prefill.hpp"
#include "cli/commands.hpp"
#include "cli/replay.hpp"
#include "latte/latte.hpp"
#include "testkit/prefill_case.hpp"
#include "testkit/prefill_oracle.hpp"

namespace latte::cli {
namespace {

Status run_on_device(const Backend& backend, const PrefillMetadata& metadata, const CapturedPrefill& call) {
  DeviceTensors device(backend);
  PrefillArgs args = call.args;
  for (ConstTensorView* view : {&args.q, &args.k, &args.v}) device.upload(*view);
  for (Fp8Scale* scale : {&args.q_scale, &args.k_scale, &args.v_scale})
    scale->ptr = static_cast<const float*>(
        device.upload(scale->ptr, static_cast<std::size_t>(call.problem.heads) * sizeof(float)));
  device.upload(args.out);
  device.upload(args.lse);
  if (device.status.ok()) device.status = prefill(metadata, args);
  if (device.status.ok()) device.status = backend.synchronize();
  device.download(call.args.out, args.out);
  device.download(call.args.lse, args.lse);
  return device.status;
}

// The tolerance of docs/numerics.md; for fp32 it grows with the largest score, which the oracle knows: as
// much work as the call in fp64.
testkit::Tolerance tolerance_of(const CapturedPrefill& call, PrefillMath ran) {
  const testkit::PrefillCase formats{.dtype = call.problem.dtype, .out_dtype = call.problem.out_dtype};
  double max_abs_score = 0;
  if (formats.tolerance(ran, 0).lse != formats.tolerance(ran, 1).lse)
    max_abs_score = testkit::prefill_oracle(call.problem, call.lengths(), call.args, ran).max_abs_score;
  return formats.tolerance(ran, max_abs_score);
}

}  // namespace

int replay_prefill(const Safetensors& file, const RunOptions& options) {
  Result<CapturedPrefill> call = read_captured_prefill(file);
  if (!call) return fail(call.status());
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return fail(policy.status());
  const Result<Backend> backend = options.backend.open();
  if (!backend) return fail(backend.status());
  const PrefillProblem& problem = call->problem;
  const Result<Outputs> outputs = Outputs::make(call->rows(), problem.heads, problem.v_width, problem.out_dtype);
  if (!outputs) return fail(outputs.status());
  call->args.out = outputs->out;
  call->args.lse = outputs->lse;

  Result<PrefillBuilder> builder = PrefillBuilder::create(*backend, problem, call->limits(), {.policy = *policy});
  if (!builder) return fail(builder.status());
  const Result<PrefillMetadata> metadata = builder->build(0, call->lengths());
  if (!metadata) return fail(metadata.status());
  if (const Status status =
          backend->on_device() ? run_on_device(*backend, *metadata, *call) : prefill(*metadata, call->args);
      !status.ok())
    return fail(status);
  fmt::print("{}: prefill of {} requests, {} query tokens over {}, {} heads, {}, kernel {}, {} arithmetic\n",
             options.file, call->query_start.size() - 1, call->query_start.back(), call->kv_start.back(), problem.heads,
             dtype_name(problem.dtype), builder->kernel(), prefill_math_name(builder->math()));
  return conclude(
      options, Op::prefill, *outputs,
      {.out = call->expect_out, .lse = call->expect_lse, .tokens = call->query_start.back(), .tolerance = [&] {
         return tolerance_of(*call, builder->math());
       }});
}

}  // namespace latte::cli
