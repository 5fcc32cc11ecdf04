// latte bench: times of decode or prefill next to what this machine can do at best, measured in the same run.
#include "cli/bench.hpp"

#include <map>
#include <variant>

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
  std::string policy = "balanced";
  std::string working_set = "0";
  std::int32_t repeats = 0;
  std::int32_t workers = 0;
  double min_time = 0.5;
  std::string overlap = "off";
  bool json = false;
  ShapeOptions shape;
  ShapeOptions::Sweeps sweeps;
  BackendChoice backend;
};

// Everything that can be wrong with the options, found before anything is measured.
struct BenchPlan {
  // A row to measure, of one op or the other.
  struct Row {
    BatchSpec spec;
    std::variant<testkit::DecodeCase, testkit::PrefillCase> description;
  };
  std::vector<Row> rows;
  BenchSettings settings;
};

Result<BenchPlan> prepare(const BenchOptions& options) {
  BenchPlan plan;
  const Result<Op> op = options.shape.checked_op();
  if (!op) return op.status();
  for (const std::string& text : options.specs) {
    const Result<BatchSpec> spec = parse_batch_spec(text);
    if (!spec) return spec.status();
    for (const std::int32_t heads : options.sweeps.heads)
      for (const std::int32_t page : options.sweeps.pages) {
        ShapeOptions one = options.shape;
        one.heads = heads;
        one.page = page;
        if (*op == Op::prefill) {
          const Result<PrefillShape> shape = resolve_prefill(one);
          if (!shape) return shape.status();
          plan.rows.push_back({*spec, make_case(*spec, *shape)});
        } else {
          const Result<Shape> shape = resolve(one);
          if (!shape) return shape.status();
          plan.rows.push_back({*spec, make_case(*spec, *shape)});
        }
      }
  }
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return policy.status();
  plan.settings.policy = *policy;
  const Result<std::int64_t> working_set = parse_bytes(options.working_set);
  if (!working_set) return working_set.status();
  plan.settings.working_set_bytes = *working_set;
  if (options.workers < 0)
    return Status(Code::invalid_argument, "--workers", "0 or more", fmt::format("{}", options.workers));
  plan.settings.workers = options.workers;
  if (options.repeats < 0 || options.repeats > 1'000'000)
    return Status(Code::invalid_argument, "--repeats", "0 to 1000000", fmt::format("{}", options.repeats));
  if (!(options.min_time >= 0 && options.min_time <= 3600))
    return Status(Code::invalid_argument, "--min-time", "0 to 3600 seconds", fmt::format("{}", options.min_time));
  plan.settings.repeats = options.repeats;
  plan.settings.min_seconds = options.min_time;
  if (options.overlap != "on" && options.overlap != "off" && options.overlap != "serial")
    return Status(Code::invalid_argument, "--overlap", "on, off or serial", fmt::format("'{}'", options.overlap));
  plan.settings.overlap = options.overlap == "on";
  return plan;
}

// Measured before and after the rows: a machine that was disturbed in one of the two still has an honest ceiling.
struct TwoCeilings {
  Ceilings before, after;

  Ceilings best() const {
    return {.read_gbps = std::max(before.read_gbps, after.read_gbps),
            .tflops = std::max(before.tflops, after.tflops),
            .clock_mhz = std::max(before.clock_mhz, after.clock_mhz)};
  }
};

std::string machine_text(const MachineInfo& info, const Ceilings& ceilings) {
  if (!info.device.empty())
    return fmt::format("{}, {}, {}, {:.0f} MHz under load", info.device, info.features, info.driver,
                       ceilings.clock_mhz);
  return fmt::format("{}, {} thread{}", info.processor, info.threads, info.threads == 1 ? "" : "s");
}

void print_json(const BenchRow& row, const Ceilings& ceilings, const MachineInfo& info, const std::string& overlap) {
  nlohmann::ordered_json json = {
      {"op", op_name(row.op)},
      {"backend", info.backend},
      {"kernel", row.kernel},
      {"spec", row.spec},
      {"heads", row.heads},
      {"page", row.page},
      {"kv", row.kv},
      {"mask", row.mask},
      {"policy", policy_text(row.policy)},
      {"time_us", row.time.median_us},
      {"spread_us", row.time.spread_us},
      {"samples", row.time.samples},
      {"plan_us", row.plan.median_us},
      {"bytes", static_cast<std::int64_t>(row.bytes)},
      {"flops", static_cast<std::int64_t>(row.flops)},
      {"gbps", row.gbps()},
      {"tflops", row.tflops()},
      {"floor_us", row.floor_us(ceilings)},
      {"over_floor", row.over_floor(ceilings)},
      {"ceilings", {{"read_gbps", ceilings.read_gbps}, {"tflops", ceilings.tflops}}},
      {"machine", machine_text(info, ceilings)},
      {"commit", kCommit},
  };
  if (row.op == Op::prefill) {
    json["math"] = row.math;
    json["qk_width"] = row.widths[0];
    json["v_width"] = row.widths[1];
  } else {
    json["q"] = row.q;
    json["latent"] = row.widths[0];
    json["rope"] = row.widths[1];
  }
  json["working_set"] = row.working_set_bytes;
  if (row.workers > 0) json["workers"] = row.workers;
  if (row.on_device) {
    json["plan_host_us"] = row.plan_host.median_us;
    json["overlap"] = overlap;
    json["ceilings"]["clock_mhz"] = ceilings.clock_mhz;
  }
  fmt::print("{}\n", json.dump());
}

// A device's ceilings are the same for all its kernels that multiply the same kind of numbers.
std::string ceiling_key(const MachineInfo& info, const std::string& kernel, const std::string& math) {
  if (info.device.empty()) return "kernel " + kernel;
  return math == "fp8" ? info.device + ", fp8" : info.device;
}
std::string ceiling_key(const MachineInfo& info, const BenchRow& row) {
  return ceiling_key(info, row.kernel, row.math);
}

void print_text(const std::vector<BenchRow>& rows, const std::map<std::string, TwoCeilings>& ceilings,
                const MachineInfo& info) {
  fmt::print("{}; {}; latte {} ({})\n", machine_text(info, ceilings.begin()->second.best()), compiler(), version(),
             kCommit);
  for (const auto& [kernel, two] : ceilings)
    fmt::print(
        "ceilings for {}: reads {:.1f} GB/s (before) {:.1f} (after), arithmetic {:.4g} TFLOP/s (before) {:.4g} "
        "(after)\n",
        kernel, two.before.read_gbps, two.after.read_gbps, two.before.tflops, two.after.tflops);
  const bool prefill = !rows.empty() && rows.front().op == Op::prefill;
  std::vector<std::string> headings = {"spec",
                                       "kernel",
                                       "policy",
                                       ">heads",
                                       prefill ? "math" : ">page",
                                       prefill ? "dtype" : "kv",
                                       ">time us",
                                       ">spread us",
                                       ">plan us",
                                       ">GB/s",
                                       ">TFLOP/s",
                                       ">floor us",
                                       ">time/floor"};
  if (!info.device.empty()) headings.push_back(">host plan us");
  Table table(headings);
  for (const BenchRow& row : rows) {
    const Ceilings best = ceilings.at(ceiling_key(info, row)).best();
    table.add({row.spec, row.kernel, policy_text(row.policy), fmt::format("{}", row.heads),
               row.op == Op::prefill ? row.math : fmt::format("{}", row.page), row.kv,
               fmt::format("{:.1f}", row.time.median_us), fmt::format("{:.1f}", row.time.spread_us),
               fmt::format("{:.2f}", row.plan.median_us), fmt::format("{:.2f}", row.gbps()),
               fmt::format("{:.4f}", row.tflops()), fmt::format("{:.1f}", row.floor_us(best)),
               fmt::format("{:.2f}", row.over_floor(best)), fmt::format("{:.2f}", row.plan_host.median_us)});
  }
  fmt::print("{}", table.text());
  if (!rows.empty() && rows.front().workers > 0)
    fmt::print("planned for {} of the workers (--workers)\n", rows.front().workers);
}

// The kernel that will run a row and the arithmetic it uses (prefill), to measure its ceilings.
struct Chosen {
  std::string kernel, math;
};
template <class Case>
Result<Chosen> choose(const Backend& backend, const Case& description, const BenchSettings& settings) {
  const auto choice = backend.choose(description.problem(), description.limits(settings.workers), settings.policy);
  if (!choice) return choice.status();
  if constexpr (std::is_same_v<Case, testkit::PrefillCase>)
    return Chosen{choice->kernel, prefill_math_name(choice->math)};
  else
    return Chosen{choice->kernel, ""};
}

int run(const BenchOptions& options) {
  const Result<BenchPlan> plan = prepare(options);
  if (!plan) return fail(plan.status());
  BackendChoice choice = options.backend;
  choice.serial_launches = options.overlap == "serial";
  const Result<Backend> backend = choice.open();
  if (!backend) return fail(backend.status());
  if (options.overlap != "off" && !backend->on_device())
    return fail(Status(Code::unsupported, "--overlap", "off: only a device's kernels can overlap", options.overlap));
  // Ceilings are those of the threads that work. (On a device they are the whole device's.)
  choice.threads = backend->on_device() ? choice.threads : plan->settings.workers;
  const bool some = choice.threads > 0 && choice.threads < backend->workers();
  const Result<Backend> working = some ? choice.open(/*tell=*/false) : backend;
  if (!working) return fail(working.status());
  const MachineInfo info = backend->info();
  std::map<std::string, std::string> kernels;  // whose ceilings are measured, by ceiling_key
  for (const BenchPlan::Row& row : plan->rows) {
    const Result<Chosen> chosen = std::visit(
        [&](const auto& description) -> Result<Chosen> {
          const Result<Chosen> kernel = choose(*backend, description, plan->settings);
          if (!kernel) return kernel.status();
          const auto copies = copies_that_fit(*backend, description, plan->settings.working_set_bytes);
          if (!copies) return copies.status();
          return *kernel;
        },
        row.description);
    if (!chosen) return fail(chosen.status());
    kernels.try_emplace(ceiling_key(info, chosen->kernel, chosen->math), chosen->kernel);
  }

  std::map<std::string, TwoCeilings> ceilings;
  std::vector<BenchRow> rows;
  {
    Progress progress("measuring", plan->rows.size() + 2);
    const auto measure_ceilings = [&](Ceilings TwoCeilings::*when) -> Status {
      for (const auto& [key, kernel] : kernels) {
        const Result<Ceilings> measured = working->measure_ceilings(kernel);
        if (!measured) return measured.status();
        ceilings[key].*when = *measured;
      }
      return {};
    };
    progress.step(0, "this machine's ceilings");
    if (const Status status = measure_ceilings(&TwoCeilings::before); !status.ok()) return fail(status);
    for (std::size_t i = 0; i < plan->rows.size(); ++i) {
      const BatchSpec& spec = plan->rows[i].spec;
      progress.step(i + 1, spec.text);
      Result<BenchRow> row = std::visit(
          [&](const auto& description) {
            return backend->on_device() ? measure_on_device(*backend, spec, description, plan->settings)
                                        : measure(*backend, spec, description, plan->settings);
          },
          plan->rows[i].description);
      if (!row) {
        progress.clear();
        return fail(row.status());
      }
      kernels.try_emplace(ceiling_key(info, *row), row->kernel);
      rows.push_back(std::move(*row));
    }
    progress.step(plan->rows.size() + 1, "the ceilings again");
    if (const Status status = measure_ceilings(&TwoCeilings::after); !status.ok()) return fail(status);
  }
  if (!options.json) {
    print_text(rows, ceilings, info);
    return kExitOk;
  }
  for (const BenchRow& row : rows) print_json(row, ceilings.at(ceiling_key(info, row)).best(), info, options.overlap);
  return kExitOk;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Measure decode or prefill against ceilings measured in the same run");
  command->add_option("--spec", options->specs, "One or more batches, like 16q1s4k_4q4s1k")->required();
  command->add_option("--policy", options->policy, "balanced, uniform:N or batch_invariant[:TOKENS]")
      ->capture_default_str();
  command
      ->add_option("--working-set", options->working_set,
                   "Rotate over so many KV bytes before any is read again, like 1G: defeats the caches")
      ->capture_default_str();
  command
      ->add_option("--workers", options->workers,
                   "Use so many of the backend's workers, as if the others were busy elsewhere; 0 = all")
      ->capture_default_str();
  command->add_option("--repeats", options->repeats, "Timed calls a row; 0 = as many as --min-time takes")
      ->capture_default_str();
  command->add_option("--min-time", options->min_time, "Seconds of timed calls a row, at least")
      ->capture_default_str()
      ->excludes("--repeats");
  command
      ->add_option("--overlap", options->overlap,
                   "decode, on a device: on lets a call's kernel fetch while the one before it ends "
                   "(DecodeArgs::overlap_previous); serial lets none begin before that "
                   "(BackendOptions::serial_launches)")
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON object a row on stdout");
  options->shape.add_ops_to(*command);
  options->shape.add_to(*command, &options->sweeps);
  options->backend.add_to(*command);
  command->footer(
      "time is the median of single calls, spread their interquartile range, plan the building of the metadata apart.\n"
      "On a device a graph of many calls is replayed: time is that of a replay over its calls, plan the planning\n"
      "kernel's, the same way; calls follow each other on the same buffers unless --working-set asks for more.\n"
      "floor = max(FLOPs / arithmetic ceiling, bytes / read ceiling); bytes = KV once, q and out.\n"
      "prefill: 8q1k is 8 prompts of 1024 tokens; q, k and v have --dtype, widths are 192 and 128, there are no "
      "pages.\n"
      "Examples:\n"
      "  latte bench --spec 16q1s4k_4q4s1k --heads 16 --page 64 --kv bf16\n"
      "  latte bench --spec 8q1s8k 32q1s2k --model deepseek-v3 --tp 8 --working-set 1G --json\n"
      "  latte bench --spec 1q1s64k_15q1s1k --policy uniform:1\n"
      "  latte bench --op prefill --spec 8q1k 1q16k_15q512 --heads 16 --dtype fp8 --backend cuda\n"
      "  latte bench --spec 64q1s4k 128q1s4k --heads 16 128 --page 64 --backend cuda --json");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
