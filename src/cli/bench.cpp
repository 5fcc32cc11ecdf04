// latte bench: decode times next to what this machine can do at best, measured in the same run.
#include "cli/bench.hpp"

#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/build.hpp"
#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/spec_case.hpp"
#include "cli/table.hpp"
#include "latte/latte.hpp"

namespace latte::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> specs;
  std::string op = "decode";
  std::string policy = "balanced";
  std::string working_set = "0";
  std::int32_t repeats = 0;
  double min_time = 0.5;
  bool json = false;
  ShapeOptions shape;
  BackendChoice backend;
};

// Everything that can be wrong with the options, found before anything is measured.
struct BenchPlan {
  std::vector<BatchSpec> specs;
  Shape shape;
  BenchSettings settings;
};

Result<BenchPlan> prepare(const BenchOptions& options) {
  BenchPlan plan;
  if (options.op != "decode") return Status(Code::unsupported, "--op", "decode", fmt::format("'{}'", options.op));
  for (const std::string& text : options.specs) {
    Result<BatchSpec> spec = parse_batch_spec(text);
    if (!spec) return spec.status();
    plan.specs.push_back(std::move(*spec));
  }
  const Result<Shape> shape = resolve(options.shape);
  if (!shape) return shape.status();
  plan.shape = *shape;
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return policy.status();
  plan.settings.policy = *policy;
  const Result<std::int64_t> working_set = parse_bytes(options.working_set);
  if (!working_set) return working_set.status();
  plan.settings.working_set_bytes = *working_set;
  if (options.repeats < 0 || options.repeats > 1'000'000)
    return Status(Code::invalid_argument, "--repeats", "0 to 1000000", fmt::format("{}", options.repeats));
  if (!(options.min_time >= 0 && options.min_time <= 3600))
    return Status(Code::invalid_argument, "--min-time", "0 to 3600 seconds", fmt::format("{}", options.min_time));
  plan.settings.repeats = options.repeats;
  plan.settings.min_seconds = options.min_time;
  return plan;
}

// Measured before and after the rows: a machine that was disturbed in one of the two still has an honest ceiling.
struct TwoCeilings {
  Ceilings before, after;

  Ceilings best() const {
    return {.read_gbps = std::max(before.read_gbps, after.read_gbps), .tflops = std::max(before.tflops, after.tflops)};
  }
};

std::string machine_text(const MachineInfo& info) {
  return fmt::format("{}, {} thread{}", info.cpu, info.threads, info.threads == 1 ? "" : "s");
}

void print_json(const BenchRow& row, const Ceilings& ceilings, const MachineInfo& info) {
  const nlohmann::ordered_json json = {
      {"op", "decode"},
      {"backend", info.backend},
      {"kernel", row.kernel},
      {"spec", row.spec},
      {"heads", row.description.heads},
      {"page", row.description.page_size},
      {"kv", kv_format_name(row.description.kv_format)},
      {"policy", policy_text(row.policy)},
      {"time_us", row.time.median_us},
      {"spread_us", row.time.spread_us},
      {"plan_us", row.plan.median_us},
      {"bytes", static_cast<std::int64_t>(row.bytes)},
      {"flops", static_cast<std::int64_t>(row.flops)},
      {"gbps", row.gbps()},
      {"tflops", row.tflops()},
      {"floor_us", row.floor_us(ceilings)},
      {"over_floor", row.over_floor(ceilings)},
      {"ceilings", {{"read_gbps", ceilings.read_gbps}, {"tflops", ceilings.tflops}}},
      {"machine", machine_text(info)},
      {"commit", kCommit},
  };
  fmt::print("{}\n", json.dump());
}

void print_text(const std::vector<BenchRow>& rows, const std::map<std::string, TwoCeilings>& ceilings,
                const MachineInfo& info) {
  fmt::print("{}; {}; latte {} ({})\n", machine_text(info), compiler(), version(), kCommit);
  for (const auto& [kernel, two] : ceilings)
    fmt::print(
        "ceilings for {}: reads {:.1f} GB/s (before) {:.1f} (after), arithmetic {:.4g} TFLOP/s (before) {:.4g} "
        "(after)\n",
        kernel, two.before.read_gbps, two.after.read_gbps, two.before.tflops, two.after.tflops);
  Table table({"spec", "kernel", "policy", ">heads", ">page", "kv", ">time us", ">spread us", ">plan us", ">GB/s",
               ">TFLOP/s", ">floor us", ">time/floor"});
  for (const BenchRow& row : rows) {
    const Ceilings best = ceilings.at(row.kernel).best();
    table.add({row.spec, row.kernel, policy_text(row.policy), fmt::format("{}", row.description.heads),
               fmt::format("{}", row.description.page_size), kv_format_name(row.description.kv_format),
               fmt::format("{:.1f}", row.time.median_us), fmt::format("{:.1f}", row.time.spread_us),
               fmt::format("{:.2f}", row.plan.median_us), fmt::format("{:.2f}", row.gbps()),
               fmt::format("{:.4f}", row.tflops()), fmt::format("{:.1f}", row.floor_us(best)),
               fmt::format("{:.2f}", row.over_floor(best))});
  }
  fmt::print("{}", table.text());
}

int run(const BenchOptions& options) {
  const Result<BenchPlan> plan = prepare(options);
  if (!plan) return fail(plan.status());
  const Result<Backend> backend = Backend::open(
      {.name = options.backend.name, .threads = options.backend.threads, .kernel = options.backend.kernel});
  if (!backend) return fail(backend.status());
  const Support support = backend->supports(plan->shape.problem);
  if (!support.ok) return fail(support.reason);

  std::map<std::string, TwoCeilings> ceilings;
  std::vector<BenchRow> rows;
  {
    Progress progress("measuring", plan->specs.size() + 2);
    progress.step(0, "this machine's ceilings");
    const Result<Ceilings> before = backend->measure_ceilings(support.kernel);
    if (!before) return fail(before.status());
    ceilings[support.kernel].before = *before;
    for (std::size_t i = 0; i < plan->specs.size(); ++i) {
      progress.step(i + 1, plan->specs[i].text);
      Result<BenchRow> row = measure(*backend, plan->specs[i], make_case(plan->specs[i], plan->shape), plan->settings);
      if (!row) {
        progress.clear();
        return fail(row.status());
      }
      rows.push_back(std::move(*row));
    }
    progress.step(plan->specs.size() + 1, "the ceilings again");
    for (const BenchRow& row : rows) ceilings.try_emplace(row.kernel);
    for (auto& [kernel, two] : ceilings) {
      const Result<Ceilings> after = backend->measure_ceilings(kernel);
      if (!after) return fail(after.status());
      two.after = *after;
    }
  }
  const MachineInfo info = backend->info();
  if (!options.json) {
    print_text(rows, ceilings, info);
    return kExitOk;
  }
  for (const BenchRow& row : rows) print_json(row, ceilings.at(row.kernel).best(), info);
  return kExitOk;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Measure decode against ceilings measured in the same run");
  command->add_option("--spec", options->specs, "One or more batches, like 16q1s4k_4q4s1k")->required();
  command->add_option("--op", options->op, "decode")->capture_default_str();
  command->add_option("--policy", options->policy, "balanced, uniform:N or batch_invariant[:TOKENS]")
      ->capture_default_str();
  command
      ->add_option("--working-set", options->working_set,
                   "Rotate over so many KV bytes before any is read again, like 1G: defeats the caches")
      ->capture_default_str();
  command->add_option("--repeats", options->repeats, "Timed calls a row; 0 = as many as --min-time takes")
      ->capture_default_str();
  command->add_option("--min-time", options->min_time, "Seconds of timed calls a row, at least")->capture_default_str();
  command->add_flag("--json", options->json, "One JSON object a row on stdout");
  options->shape.add_to(*command);
  options->backend.add_to(*command);
  command->footer(
      "time is the median of single calls, spread their interquartile range, plan the building of the metadata apart.\n"
      "floor = max(FLOPs / arithmetic ceiling, bytes / read ceiling); bytes = KV once, q and out.\n"
      "Examples:\n"
      "  latte bench --spec 16q1s4k_4q4s1k --heads 16 --page 64 --kv bf16\n"
      "  latte bench --spec 8q1s8k 32q1s2k --model deepseek-v3 --tp 8 --working-set 1G --json\n"
      "  latte bench --spec 1q1s64k_15q1s1k --policy uniform:1");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
