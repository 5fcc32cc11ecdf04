// latte check: the shared case grids on every usable kernel, against the fp64 oracle.
#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "latte/latte.hpp"
#include "testkit/grid.hpp"
#include "testkit/prefill_grid.hpp"
#include "testkit/run_case.hpp"
#include "testkit/run_prefill.hpp"

namespace latte::cli {
namespace {

struct CheckOptions {
  BackendChoice backend{.kernel = "all"};
  std::string op = "all";
  double tolerance_factor = 1;
  bool quick = false;
  bool json = false;
};

// An error next to what is allowed; the worst is the one that uses most of its allowance.
struct Error {
  double value = 0, allowed = 0;

  double share() const { return allowed > 0 ? value / allowed : value > 0 ? 1e9 : 0; }
  void raise(const Error& other) {
    if (allowed == 0 || other.share() > share()) *this = other;
  }
};

// Runs that are told of together: one kernel, one op, one format of cache (decode) or of q, k and v (prefill).
struct GroupKey {
  std::size_t kernel;  // its position
  Op op;
  std::string format;
  auto operator<=>(const GroupKey&) const = default;
};
struct Group {
  std::int32_t runs = 0, failed = 0;
  Error out, row, lse;
};

Op op_of(const testkit::DecodeCase&) { return Op::decode; }
Op op_of(const testkit::PrefillCase&) { return Op::prefill; }

std::string format_of(const testkit::DecodeCase& description, const Result<testkit::CaseReport>&) {
  return kv_format_name(description.kv_format);
}
std::string format_of(const testkit::PrefillCase& description, const Result<testkit::PrefillReport>& report) {
  const bool fp8 = report && report->math == PrefillMath::fp8;
  return fmt::format("{}{}", dtype_name(description.dtype), fp8 ? ", multiplied as fp8" : "");
}

struct Tally {
  std::vector<std::string> kernels;
  std::map<GroupKey, Group> groups;
  std::vector<std::string> failures;
  std::int32_t cases = 0;
  std::int32_t runs = 0;
  std::int32_t skipped = 0;  // cases that no kernel asked for serves

  std::size_t position(const std::string& kernel) {
    const auto found = std::find(kernels.begin(), kernels.end(), kernel);
    if (found != kernels.end()) return static_cast<std::size_t>(found - kernels.begin());
    kernels.push_back(kernel);
    return kernels.size() - 1;
  }

  template <class Case, class Report>
  void add(const std::string& kernel, const Case& description, const Report& report, const std::string& how) {
    Group& group = groups[{position(kernel), op_of(description), format_of(description, report)}];
    ++runs;
    ++group.runs;
    if (report) {
      const testkit::Comparison& c = report->comparison;
      group.out.raise({c.out_error, c.out_allowed});
      group.row.raise({c.row_error, testkit::kRowFactor * c.tolerance.out});
      if (description.with_lse) group.lse.raise({c.lse_error, c.tolerance.lse});
      if (report->ok()) return;
      failures.push_back(fmt::format("{} {}", report->message(), how));
    } else {
      failures.push_back(fmt::format("{}: {} {}", description.name(), report.status().message(), how));
    }
    ++group.failed;
  }
};

// Policies share the quick grid; the full one runs them all on every case.
std::vector<Policy> policies_for(std::size_t index, bool quick) {
  const std::vector<Policy> all = {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(128)};
  return quick ? std::vector<Policy>{all[index % all.size()]} : all;
}

// The backends to check: one for each kernel asked for. Those of a device cannot be asked for; the cases' shapes reach
// all of them.
Result<std::vector<Backend>> open_backends(BackendChoice choice, std::vector<std::string>& names) {
  const bool all = choice.kernel == "all";
  if (all) choice.kernel = "auto";
  const Result<Backend> first = choice.open();
  if (!first) return first.status();
  if (!all || first->on_device()) {
    names.push_back(choice.kernel);
    return std::vector<Backend>{*first};
  }
  std::vector<Backend> backends;
  for (const KernelInfo& kernel : first->info().kernels) {
    if (!kernel.usable) continue;
    names.push_back(choice.kernel = kernel.name);
    Result<Backend> backend = choice.open(false);
    if (!backend) return backend.status();
    backends.push_back(std::move(*backend));
  }
  return backends;
}

void print_json(const CheckOptions& options, const std::string& backend, const Tally& tally) {
  nlohmann::ordered_json json = {{"backend", backend},
                                 {"op", options.op},
                                 {"quick", options.quick},
                                 {"tolerance_factor", options.tolerance_factor},
                                 {"cases", tally.cases},
                                 {"runs", tally.runs},
                                 {"skipped", tally.skipped},
                                 {"failed", tally.failures.size()},
                                 {"groups", nlohmann::ordered_json::array()},
                                 {"failures", tally.failures}};
  for (const auto& [key, group] : tally.groups)
    json["groups"].push_back({{"kernel", tally.kernels[key.kernel]},
                              {"op", op_name(key.op)},
                              {"kv", key.format},
                              {"runs", group.runs},
                              {"failed", group.failed},
                              {"out_error", group.out.value},
                              {"out_allowed", group.out.allowed},
                              {"lse_error", group.lse.value},
                              {"lse_allowed", group.lse.allowed}});
  fmt::print("{}\n", json.dump());
}

void print_text(const CheckOptions& options, const Tally& tally) {
  constexpr std::size_t kShownFailures = 20;
  for (std::size_t k = 0; k < tally.kernels.size(); ++k) {
    Table table({"op", "format", ">runs", ">failed", ">out error", ">allowed", ">worst row", ">allowed", ">lse error",
                 ">allowed"});
    for (const auto& [key, group] : tally.groups) {
      if (key.kernel != k) continue;
      const auto number = [](double value) { return fmt::format("{:.1e}", value); };
      table.add({op_name(key.op), key.format, fmt::format("{}", group.runs), fmt::format("{}", group.failed),
                 number(group.out.value), number(group.out.allowed), number(group.row.value), number(group.row.allowed),
                 number(group.lse.value), number(group.lse.allowed)});
    }
    fmt::print("kernel {}\n{}\n", tally.kernels[k], table.empty() ? "  serves none of the cases\n" : table.text("  "));
  }
  for (std::size_t i = 0; i < std::min(tally.failures.size(), kShownFailures); ++i)
    fmt::print("FAILED {}\n", tally.failures[i]);
  if (tally.failures.size() > kShownFailures)
    fmt::print("... {} more failures\n", tally.failures.size() - kShownFailures);
  if (tally.skipped > 0) fmt::print("{} cases are not for these kernels (`latte info` says what is)\n", tally.skipped);
  const std::string tolerance =
      options.tolerance_factor == 1 ? "tolerance" : fmt::format("{} times the tolerance", options.tolerance_factor);
  if (tally.failures.empty())
    fmt::print("ok: {} cases, {} runs, all within {} of the fp64 oracle\n", tally.cases - tally.skipped, tally.runs,
               tolerance);
  else
    fmt::print("{} of {} runs failed\n", tally.failures.size(), tally.runs);
}

// The backends to run on, and what is known about them.
struct Machines {
  std::vector<Backend> backends;
  std::vector<std::string> names;  // of the kernels asked for
  bool may_refuse = false;         // a kernel made for some formats is not at fault for the others
};

// `Prepared` is a case with its memory and its truth.
template <class Prepared, class Case>
void check_cases(const std::vector<Case>& cases, const Machines& machines, const CheckOptions& options, Tally& tally) {
  Progress progress("checking", cases.size());
  const bool device = machines.backends.front().on_device();
  tally.cases += static_cast<std::int32_t>(cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    progress.step(i, cases[i].spec());
    const auto serves = [&](const Backend& backend) {
      return !machines.may_refuse || backend.supports(cases[i].problem()).ok;
    };
    if (std::none_of(machines.backends.begin(), machines.backends.end(), serves)) {
      ++tally.skipped;
      continue;
    }
    Case description = testkit::for_backend(machines.backends.front(), cases[i]);
    description.tolerance_factor = options.tolerance_factor;
    Prepared prepared(description);
    for (std::size_t k = 0; k < machines.backends.size(); ++k) {
      const Backend& backend = machines.backends[k];
      if (!serves(backend)) continue;
      for (const Policy& policy : policies_for(i, options.quick)) {
        const auto report = testkit::run_case(backend, prepared, {.policy = policy});
        tally.add(device && report ? report->kernel : machines.names[k], cases[i], report,
                  fmt::format("kernel={} policy={}", machines.names[k], policy_text(policy)));
      }
    }
  }
}

int run(const CheckOptions& options) {
  const bool all = options.op == "all";
  const Result<Op> op = all ? Op::decode : parse_op(options.op);
  if (!op) return fail(Status(Code::invalid_argument, "--op", "decode, prefill or all", options.op));
  if (!(options.tolerance_factor > 0) || std::isinf(options.tolerance_factor))
    return fail(Status(Code::invalid_argument, "--tolerance-factor", "a finite number above 0",
                       fmt::format("{}", options.tolerance_factor)));
  Machines machines;
  Result<std::vector<Backend>> backends = open_backends(options.backend, machines.names);
  if (!backends) return fail(backends.status());
  machines.backends = std::move(*backends);
  // The CPU's own choice has to serve everything.
  const bool device = machines.backends.front().on_device();
  machines.may_refuse = device || options.backend.kernel != "auto";
  Tally tally;
  if (!device) tally.kernels = machines.names;
  const testkit::GridSize size = options.quick ? testkit::GridSize::quick : testkit::GridSize::full;
  if (all || *op == Op::decode) check_cases<testkit::PreparedCase>(testkit::case_grid(size), machines, options, tally);
  if (all || *op == Op::prefill)
    check_cases<testkit::PreparedPrefill>(testkit::prefill_grid(size), machines, options, tally);
  if (tally.runs == 0) return fail(fmt::format("kernel {} serves none of the cases", options.backend.kernel));
  if (options.json)
    print_json(options, machines.backends.front().info().backend, tally);
  else
    print_text(options, tally);
  return tally.failures.empty() ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, Action& action) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "Run the case grid against the fp64 oracle");
  command->add_option("--backend", options->backend.name, kBackendHelp)->capture_default_str();
  command->add_option("--device", options->backend.device, "Which GPU, as the driver numbers them")
      ->capture_default_str();
  command
      ->add_option("--kernel", options->backend.kernel,
                   "all = every usable one, auto = the one latte would choose, or a name")
      ->capture_default_str();
  command->add_option("--threads", options->backend.threads, "Worker threads; 0 = all this process may use")
      ->capture_default_str();
  command->add_option("--op", options->op, "decode, prefill or all")->capture_default_str();
  command
      ->add_option("--tolerance-factor", options->tolerance_factor,
                   "What is tolerated, times this: below 1 shows how much is left")
      ->capture_default_str();
  command->add_flag("--quick", options->quick, "A sample of the grid: seconds instead of minutes");
  command->add_flag("--json", options->json, "One JSON object instead of tables");
  command->footer(
      "Exit code 1 when a result is outside its tolerance (docs/numerics.md).\n"
      "Examples:\n"
      "  latte check --quick\n"
      "  latte check --kernel avx2 --threads 1\n"
      "  latte check --quick --tolerance-factor 0.5\n"
      "  latte check --op prefill --backend cuda");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
