// latte capture: writes a random call as a file that `latte run` replays, with the oracle's answer if asked.
#include <fmt/format.h>

#include "cli/captured.hpp"
#include "cli/captured_prefill.hpp"
#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/spec_case.hpp"
#include "latte/latte.hpp"
#include "testkit/prefill_oracle.hpp"

namespace latte::cli {
namespace {

struct CaptureOptions {
  std::string spec;
  std::string out;
  std::uint64_t seed = 1;
  bool with_expect = false;
  ShapeOptions shape;
};

testkit::OracleResult truth_of(const testkit::DecodeBatch& batch) {
  return testkit::decode_oracle(batch.description().problem(), batch.lengths(), batch.args());
}
testkit::OracleResult truth_of(const testkit::PrefillBatch& batch) {
  return testkit::prefill_oracle(batch.description().problem(), batch.lengths(), batch.args(), PrefillMath::half);
}

template <class Batch, class Case>
int write(const CaptureOptions& options, Case description) {
  // The library says whether such a problem exists at all.
  const Result<Backend> backend = Backend::open({.threads = 1});
  if (!backend) return fail(backend.status());
  if (const Support support = backend->supports(description.problem()); !support.ok) return fail(support.reason);
  description.seed = options.seed;
  if (const Status status = check_memory(memory_bytes(description)); !status.ok()) return fail(status);
  const Batch batch(description, testkit::Fill::fast);
  testkit::OracleResult expect;
  if (options.with_expect) expect = truth_of(batch);
  if (const Status status = save_captured(options.out, batch, options.with_expect ? &expect : nullptr); !status.ok())
    return fail(status);
  fmt::print("{}: {}{}\n", options.out, description.name(), options.with_expect ? ", with the oracle's answer" : "");
  return kExitOk;
}

int run(const CaptureOptions& options) {
  const Result<BatchSpec> spec = parse_batch_spec(options.spec);
  if (!spec) return fail(spec.status());
  const Result<Op> op = options.shape.checked_op();
  if (!op) return fail(op.status());
  if (*op == Op::decode) {
    const Result<Shape> shape = resolve(options.shape);
    if (!shape) return fail(shape.status());
    return write<testkit::DecodeBatch>(options, make_case(*spec, *shape));
  }
  const Result<PrefillShape> shape = resolve_prefill(options.shape);
  if (!shape) return fail(shape.status());
  // What 16-bit tensors that are quantised on entry come to depends on whether the machine that replays them has fp8.
  if (options.with_expect && shape->problem.math == PrefillMath::fp8 && shape->problem.dtype != Dtype::fp8_e4m3)
    return fail(Status(Code::unsupported, "--with-expect", "--dtype fp8_e4m3, or --math auto or half", "--math fp8"));
  return write<testkit::PrefillBatch>(options, make_case(*spec, *shape));
}

}  // namespace

void add_capture(CLI::App& app, Action& action) {
  auto options = std::make_shared<CaptureOptions>();
  CLI::App* command = app.add_subcommand("capture", "Write a random call as a file that `latte run` replays");
  command->add_option("--spec", options->spec, "The batch, like 16q1s4k_4q4s1k")->required();
  command->add_option("--out", options->out, "The .safetensors file to write")->required()->check(file_name());
  command->add_option("--seed", options->seed, "Seed of the random values")->capture_default_str();
  command->add_flag("--with-expect", options->with_expect, "Also write what the fp64 oracle computes");
  options->shape.add_ops_to(*command);
  options->shape.add_to(*command);
  command->footer(
      "Examples:\n"
      "  latte capture --spec 4q1s1k --heads 16 --with-expect --out case.safetensors\n"
      "  latte capture --op prefill --spec 2q300_q1s1k --heads 4 --dtype fp8 --with-expect --out case.safetensors");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
