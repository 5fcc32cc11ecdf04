// latte run: replays one captured decode call and compares it with what the file expects.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/captured.hpp"
#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/safetensors.hpp"
#include "latte/latte.hpp"
#include "testkit/codec.hpp"
#include "testkit/compare.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {
namespace {

struct RunOptions {
  std::string file;
  std::string out;
  std::string policy = "balanced";
  BackendChoice backend;
};

struct Outputs {
  AlignedBytes out_bytes, lse_bytes;
  TensorView out, lse;
};

Result<Outputs> make_outputs(const CapturedCall& call) {
  const DecodeProblem& problem = call.problem;
  // q holds at least as many elements, so the product fits.
  const auto rows = static_cast<std::size_t>(call.rows) * static_cast<std::size_t>(problem.heads);
  const std::size_t out_size = rows * static_cast<std::size_t>(problem.latent) * dtype_bytes(problem.out_dtype);
  Result<AlignedBytes> out = AlignedBytes::make(std::max<std::size_t>(out_size, 1));
  Result<AlignedBytes> lse = AlignedBytes::make(std::max<std::size_t>(rows * sizeof(float), 1));
  if (!out) return out.status();
  if (!lse) return lse.status();
  // Rows that belong to no request stay zero in the written file.
  std::memset(out->data(), 0, out->size());
  std::memset(lse->data(), 0, lse->size());
  Outputs outputs{.out_bytes = std::move(*out), .lse_bytes = std::move(*lse), .out = {}, .lse = {}};
  outputs.out = dense(static_cast<void*>(outputs.out_bytes.data()), problem.out_dtype,
                      {call.rows, problem.heads, problem.latent});
  outputs.lse = dense(static_cast<void*>(outputs.lse_bytes.data()), Dtype::f32, {call.rows, problem.heads});
  return outputs;
}

// The call's tensors and page table on the backend's device; results come back into `call`'s own outputs.
class DeviceCall {
 public:
  static Status run(const Backend& backend, const DecodeMetadata& metadata, const CapturedCall& call) {
    DeviceCall device(backend);
    DecodeArgs args = call.args;
    for (ConstTensorView* view : {&args.q, &args.q_nope, &args.q_pe, &args.kv_cache})
      view->data = device.upload(view->data, bytes_of(*view));
    args.pages.block_table = static_cast<const std::int32_t*>(
        device.upload(args.pages.block_table, call.block_table.size() * sizeof(std::int32_t)));
    args.out.data = device.upload(args.out.data, bytes_of(args.out));
    args.lse.data = device.upload(args.lse.data, bytes_of(args.lse));
    if (device.status_.ok()) device.status_ = decode(metadata, args);
    if (device.status_.ok()) device.status_ = backend.synchronize();
    if (device.status_.ok())
      device.status_ = copy_to_host(backend, call.args.out.data, args.out.data, bytes_of(args.out));
    if (device.status_.ok())
      device.status_ = copy_to_host(backend, call.args.lse.data, args.lse.data, bytes_of(args.lse));
    return device.status_;
  }

 private:
  explicit DeviceCall(const Backend& backend) : backend_(backend) {}

  // A captured call's tensors are dense.
  static std::size_t bytes_of(const ConstTensorView& view) {
    if (view.rank == 0) return 0;
    std::size_t bytes = dtype_bytes(view.dtype);
    for (std::int32_t axis = 0; axis < view.rank; ++axis)
      bytes *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(axis)]);
    return bytes;
  }

  void* upload(const void* host, std::size_t bytes) {
    if (host == nullptr || !status_.ok()) return nullptr;
    Result<DeviceMemory> memory = DeviceMemory::allocate(backend_, bytes);
    status_ = memory ? copy_to_device(backend_, memory->data(), host, bytes) : memory.status();
    if (!status_.ok()) return nullptr;
    memory_.push_back(std::move(*memory));
    return memory_.back().data();
  }

  Backend backend_;
  Status status_;
  std::vector<DeviceMemory> memory_;
};

std::vector<double> values_of(Dtype dtype, const std::byte* data, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  testkit::load_row(dtype, data, count, values.data());
  return values;
}

// The contract's tolerance; for fp32 it grows with the largest score, which the oracle knows.
testkit::Tolerance tolerance_of(const CapturedCall& call) {
  const testkit::DecodeCase formats{
      .kv_format = call.problem.kv_format, .q_dtype = call.problem.q_dtype, .out_dtype = call.problem.out_dtype};
  double max_abs_score = 0;
  if (formats.tolerance(0).lse != formats.tolerance(1).lse)
    max_abs_score = testkit::decode_oracle(call.problem, call.lengths(), call.args).max_abs_score;
  return formats.tolerance(max_abs_score);
}

testkit::Comparison compare_with_file(const CapturedCall& call, const Outputs& outputs) {
  const DecodeProblem& problem = call.problem;
  testkit::OracleResult expected{.tokens = call.query_start.back(), .heads = problem.heads, .latent = problem.latent};
  const std::int64_t rows = expected.tokens * problem.heads;
  // What the file does not tell is compared with itself.
  expected.out = call.expect_out != nullptr ? values_of(library_dtype(call.expect_out->dtype),
                                                        call.expect_out->bytes.data(), rows * problem.latent)
                                            : values_of(problem.out_dtype, outputs.out.bytes(), rows * problem.latent);
  expected.lse = call.expect_lse != nullptr
                     ? values_of(library_dtype(call.expect_lse->dtype), call.expect_lse->bytes.data(), rows)
                     : values_of(Dtype::f32, outputs.lse.bytes(), rows);
  return testkit::compare(outputs.out, outputs.lse, expected, tolerance_of(call));
}

Status save(const std::string& path, const CapturedCall& call, const Outputs& outputs) {
  const DecodeProblem& problem = call.problem;
  const std::int64_t rows = call.rows * problem.heads;
  const std::size_t out_size = static_cast<std::size_t>(rows * problem.latent) * dtype_bytes(problem.out_dtype);
  const TensorToWrite tensors[] = {{.name = "out",
                                    .dtype = file_dtype(problem.out_dtype),
                                    .shape = {call.rows, problem.heads, problem.latent},
                                    .bytes = {outputs.out.bytes(), out_size}},
                                   {.name = "lse",
                                    .dtype = FileDtype::f32,
                                    .shape = {call.rows, problem.heads},
                                    .bytes = {outputs.lse.bytes(), static_cast<std::size_t>(rows) * sizeof(float)}}};
  return save_safetensors(path, tensors, {{"op", "decode"}});
}

int run(const RunOptions& options) {
  const Result<Safetensors> file = Safetensors::load(options.file);
  if (!file) return fail(file.status());
  Result<CapturedCall> call = read_captured(*file);
  if (!call) return fail(call.status());
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return fail(policy.status());
  const Result<Backend> backend = options.backend.open();
  if (!backend) return fail(backend.status());
  Result<Outputs> outputs = make_outputs(*call);
  if (!outputs) return fail(outputs.status());
  call->args.out = outputs->out;
  call->args.lse = outputs->lse;

  Result<MetadataBuilder> builder =
      MetadataBuilder::create(*backend, call->problem, call->limits(), {.policy = *policy});
  if (!builder) return fail(builder.status());
  const Result<DecodeMetadata> metadata = builder->build(0, call->lengths());
  if (!metadata) return fail(metadata.status());
  if (const Status status =
          backend->on_device() ? DeviceCall::run(*backend, *metadata, *call) : decode(*metadata, call->args);
      !status.ok())
    return fail(status);
  fmt::print("{}: {} requests, {} query tokens, {} heads, {} cache in pages of {}, kernel {}\n", options.file,
             call->seq_lens.size(), call->query_start.back(), call->problem.heads,
             kv_format_name(call->problem.kv_format), call->problem.page_size, builder->kernel());
  if (!options.out.empty()) {
    if (const Status status = save(options.out, *call, *outputs); !status.ok()) return fail(status);
    fmt::print("wrote {}\n", options.out);
  }

  if (call->expect_out == nullptr && call->expect_lse == nullptr) {
    fmt::print("nothing to compare with: the file has neither expect.out nor expect.lse\n");
    return kExitOk;
  }
  const testkit::Comparison comparison = compare_with_file(*call, *outputs);
  if (call->expect_out != nullptr)
    fmt::print("out  error {:.3e}, allowed {:.1e}\n", comparison.out_error, comparison.tolerance.out);
  if (call->expect_lse != nullptr)
    fmt::print("lse  error {:.3e}, allowed {:.1e}\n", comparison.lse_error, comparison.tolerance.lse);
  fmt::print("{}\n", comparison.ok ? "matches" : "DIFFERS: " + comparison.message);
  return comparison.ok ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Replay one captured decode call from a .safetensors file");
  command->add_option("case", options->file, "The captured call")->required();
  command->add_option("--out", options->out, "Write the tensors out and lse to this .safetensors file");
  command->add_option("--policy", options->policy, "balanced, uniform:N or batch_invariant[:TOKENS]")
      ->capture_default_str();
  options->backend.add_to(*command);
  command->footer(
      "Tensors: q [T,H,latent+rope], or q_nope [T,H,latent] and q_pe [T,H,rope]; kv_cache [pages,page_size,W];\n"
      "block_table [B,max_pages]; seq_lens [B]; query_start [B+1]; optional kv_scale, q_scale, expect.out, "
      "expect.lse.\n"
      "Metadata: op=decode, scale, mask=causal|none, kv_format, latent, rope.\n"
      "Exit code 1 when the result is not within the contract's tolerance of expect.out and expect.lse.\n"
      "Examples:\n"
      "  latte capture --spec 4q1s1k --with-expect --out case.safetensors\n"
      "  latte run case.safetensors --out out.safetensors");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
