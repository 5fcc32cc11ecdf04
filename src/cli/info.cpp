// latte info: the machine, which kernels it can run and why not the others, and what latte supports at all.
#include <cctype>
#include <sched.h>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/build.hpp"
#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/table.hpp"
#include "latte/latte.hpp"

namespace latte::cli {
namespace {

struct InfoOptions {
  BackendChoice backend;
  bool json = false;
  bool support_markdown = false;
};

std::int32_t affinity_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
  return CPU_COUNT(&set);
}

// How the number of worker threads came about.
std::string threads_reason(std::int32_t threads, std::int32_t asked) {
  if (asked > 0) return "as --threads asks";
  const std::int32_t allowed = affinity_threads();
  const auto machine = static_cast<std::int32_t>(std::thread::hardware_concurrency());
  if (allowed > 0 && threads < allowed)
    return fmt::format("the cgroup's CPU quota; the affinity mask would allow {}", allowed);
  return fmt::format("the affinity mask allows {}, the machine has {}; no lower cgroup quota", allowed,
                     std::max(machine, allowed));
}

// "CPU"
std::string heading(std::string backend) {
  for (char& letter : backend) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return backend;
}

std::string support_markdown() {
  const SupportTable table = support_table();
  std::string text = "| feature |", rule = "|---|";
  for (const std::string& backend : table.backends) {
    text += fmt::format(" {} |", heading(backend));
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (const SupportRow& row : table.rows)
    text += fmt::format("| {} | {} |\n", row.feature, fmt::join(row.answers, " | "));
  return text;
}

// The GPU that `--backend cuda` would use, or why there is none.
std::string cuda_text() {
  const Result<Backend> backend = Backend::open({.name = "cuda"});
  if (!backend) return fmt::format("not available: {}", backend.status().message());
  const MachineInfo info = backend->info();
  return fmt::format("{}, {}", info.device, info.driver);
}

// What prefill runs for tensors of a dtype, and why; fp8 ones are where machines differ.
struct PrefillRow {
  std::string dtype, kernel, math, reason;
};
std::vector<PrefillRow> prefill_rows(const Backend& backend) {
  const Limits limits{.max_requests = 8, .max_query_tokens = 8192, .max_kv_tokens = 8192};
  std::vector<PrefillRow> rows;
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3}) {
    const Dtype out = dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : dtype;
    const Result<PrefillChoice> choice = backend.choose({.heads = 16, .dtype = dtype, .out_dtype = out}, limits);
    if (choice)
      rows.push_back({dtype_name(dtype), choice->kernel, prefill_math_name(choice->math), choice->reason});
    else
      rows.push_back({dtype_name(dtype), "none", "", choice.status().message()});
  }
  return rows;
}

void print_json(const Backend& backend, const MachineInfo& info, const std::string& reason) {
  nlohmann::ordered_json json = {{"version", version()},    {"commit", kCommit},        {"compiler", compiler()},
                                 {"backend", info.backend}, {"note", info.note},        {"processor", info.processor},
                                 {"threads", info.threads}, {"threads_reason", reason}, {"features", info.features},
                                 {"device", info.device},   {"driver", info.driver},    {"cuda", cuda_text()}};
  for (const KernelInfo& kernel : info.kernels)
    json["kernels"].push_back(
        {{"name", kernel.name}, {"usable", kernel.usable}, {"reason", kernel.reason}, {"serves", kernel.serves}});
  for (const PrefillRow& row : prefill_rows(backend))
    json["prefill"].push_back(
        {{"dtype", row.dtype}, {"kernel", row.kernel}, {"math", row.math}, {"reason", row.reason}});
  const SupportTable support = support_table();
  for (const SupportRow& row : support.rows) {
    nlohmann::ordered_json answers;
    answers["feature"] = row.feature;
    for (std::size_t i = 0; i < row.answers.size(); ++i) answers[support.backends[i]] = row.answers[i];
    json["support"].push_back(std::move(answers));
  }
  fmt::print("{}\n", json.dump());
}

void print_text(const Backend& backend, const MachineInfo& info, const std::string& reason) {
  fmt::print("latte {} ({}, {})\n", version(), kCommit, compiler());
  fmt::print("machine   {}\n", info.processor);
  fmt::print("backend   {}{}{}\n", info.backend, info.note.empty() ? "" : ": ", info.note);
  if (info.device.empty())
    fmt::print("threads   {}: {}\n", info.threads, reason);
  else
    fmt::print("driver    {}\n", info.driver);
  fmt::print("features  {}\n", info.features);
  if (info.device.empty()) fmt::print("cuda      {}\n", cuda_text());
  fmt::print("\n");
  Table kernels({"kernel", "usable", "serves", "why"});
  for (const KernelInfo& kernel : info.kernels)
    kernels.add({kernel.name, kernel.usable ? "yes" : "no", kernel.serves, kernel.reason});
  fmt::print("Kernels:\n{}\n", kernels.text("  "));
  Table prefill({"q, k, v", "kernel", "math", "why"});
  for (const PrefillRow& row : prefill_rows(backend)) prefill.add({row.dtype, row.kernel, row.math, row.reason});
  fmt::print("Prefill (192 and 128 wide, math automatic):\n{}\n", prefill.text("  "));
  const SupportTable support = support_table();
  std::vector<std::string> headings = {"feature"};
  for (const std::string& name : support.backends) headings.push_back(heading(name));
  Table rows(headings);
  for (const SupportRow& row : support.rows) {
    std::vector<std::string> cells = {row.feature};
    cells.insert(cells.end(), row.answers.begin(), row.answers.end());
    rows.add(cells);
  }
  fmt::print("Support:\n{}", rows.text("  "));
}

int run(const InfoOptions& options) {
  if (options.support_markdown) {
    fmt::print("{}", support_markdown());
    return kExitOk;
  }
  const Result<Backend> backend = options.backend.open(false);
  if (!backend) return fail(backend.status());
  const MachineInfo info = backend->info();
  const std::string reason =
      backend->on_device() ? "the GPU's multiprocessors" : threads_reason(info.threads, options.backend.threads);
  if (options.json)
    print_json(*backend, info, reason);
  else
    print_text(*backend, info, reason);
  return kExitOk;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "The machine, its kernels and why the others are not used; what latte supports");
  command->add_option("--backend", options->backend.name, kBackendHelp)->capture_default_str();
  command->add_option("--device", options->backend.device, "Which GPU, as the driver numbers them")
      ->capture_default_str();
  command->add_option("--threads", options->backend.threads, "Worker threads; 0 = all this process may use")
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON object instead of text");
  command->add_flag("--support-markdown", options->support_markdown, "Only the support table, as the README has it")
      ->excludes("--json", "--backend", "--device", "--threads");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
