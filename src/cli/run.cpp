// latte run: replays one captured call and compares it with what the file expects.
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "cli/captured.hpp"
#include "cli/commands.hpp"
#include "cli/replay.hpp"
#include "latte/latte.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {
namespace {

Status run_on_device(const Backend& backend, const DecodeMetadata& metadata, const CapturedCall& call) {
  DeviceTensors device(backend);
  DecodeArgs args = call.args;
  for (ConstTensorView* view : {&args.q, &args.q_nope, &args.q_pe, &args.kv_cache}) device.upload(*view);
  args.pages.block_table = static_cast<const std::int32_t*>(
      device.upload(args.pages.block_table, call.block_table.size() * sizeof(std::int32_t)));
  device.upload(args.out);
  device.upload(args.lse);
  if (device.status.ok()) device.status = decode(metadata, args);
  if (device.status.ok()) device.status = backend.synchronize();
  device.download(call.args.out, args.out);
  device.download(call.args.lse, args.lse);
  return device.status;
}

// The tolerance of docs/numerics.md; for fp32 it grows with the largest score, which the oracle knows: as
// much work as the call in fp64.
testkit::Tolerance tolerance_of(const CapturedCall& call) {
  const testkit::DecodeCase formats{
      .kv_format = call.problem.kv_format, .q_dtype = call.problem.q_dtype, .out_dtype = call.problem.out_dtype};
  double max_abs_score = 0;
  if (formats.tolerance(0).lse != formats.tolerance(1).lse)
    max_abs_score = testkit::decode_oracle(call.problem, call.lengths(), call.args).max_abs_score;
  return formats.tolerance(max_abs_score);
}

int run(const RunOptions& options) {
  std::error_code error;
  if (!options.out.empty() && std::filesystem::equivalent(options.file, options.out, error))
    return fail({Code::invalid_argument, "--out", "another file than the captured call", options.out});
  const Result<Safetensors> file = Safetensors::load(options.file);
  if (!file) return fail(file.status());
  const std::string* op = file->find_metadata("op");
  return op != nullptr && *op == op_name(Op::prefill) ? replay_prefill(*file, options) : replay_decode(*file, options);
}

}  // namespace

int replay_decode(const Safetensors& file, const RunOptions& options) {
  Result<CapturedCall> call = read_captured(file);
  if (!call) return fail(call.status());
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return fail(policy.status());
  const Result<Backend> backend = options.backend.open();
  if (!backend) return fail(backend.status());
  const DecodeProblem& problem = call->problem;
  const Result<Outputs> outputs = Outputs::make(call->rows, problem.heads, problem.latent, problem.out_dtype);
  if (!outputs) return fail(outputs.status());
  call->args.out = outputs->out;
  call->args.lse = outputs->lse;

  Result<MetadataBuilder> builder = MetadataBuilder::create(*backend, problem, call->limits(), {.policy = *policy});
  if (!builder) return fail(builder.status());
  const Result<DecodeMetadata> metadata = builder->build(0, call->lengths());
  if (!metadata) return fail(metadata.status());
  if (const Status status =
          backend->on_device() ? run_on_device(*backend, *metadata, *call) : decode(*metadata, call->args);
      !status.ok())
    return fail(status);
  fmt::print("{}: {} requests, {} query tokens, {} heads, {} cache in pages of {}, kernel {}\n", options.file,
             call->seq_lens.size(), call->query_start.back(), problem.heads, kv_format_name(problem.kv_format),
             problem.page_size, builder->kernel());
  return conclude(
      options, Op::decode, *outputs,
      {.out = call->expect_out, .lse = call->expect_lse, .tokens = call->query_start.back(), .tolerance = [&] {
         return tolerance_of(*call);
       }});
}

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Replay one captured call from a .safetensors file");
  command->add_option("case", options->file, "The captured call")->required();
  command->add_option("--out", options->out, "Write the tensors out and lse to this .safetensors file")
      ->check(file_name());
  command->add_option("--policy", options->policy, "balanced, uniform:N or batch_invariant[:TOKENS]")
      ->capture_default_str();
  options->backend.add_to(*command);
  command->footer(
      "Tensors: q [T,H,latent+rope], or q_nope [T,H,latent] and q_pe [T,H,rope]; kv_cache [pages,page_size,W];\n"
      "block_table [B,max_pages]; seq_lens [B]; query_start [B+1]; optional kv_scale, q_scale, expect.out, "
      "expect.lse.\n"
      "Metadata: op=decode, scale, mask=causal|none, kv_format, latent, rope.\n"
      "Prefill: q [Tq,H,qk]; k [Tk,H,qk]; v [Tk,H,v]; query_start and kv_start [B+1]; optional q_scale, k_scale, "
      "v_scale\n"
      "(one number or [H]), expect.out, expect.lse. Metadata: op=prefill, scale, mask, math=auto|half|fp8.\n"
      "Exit code 1 when the result is not within tolerance (docs/numerics.md) of expect.out and expect.lse.\n"
      "Examples:\n"
      "  latte capture --spec 4q1s1k --with-expect --out case.safetensors\n"
      "  latte run case.safetensors --out out.safetensors");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
