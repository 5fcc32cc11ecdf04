// latte plan: the plan of a batch as text, JSON or a picture, for any number of workers.
#include <cerrno>
#include <cstdio>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/batch_spec.hpp"
#include "cli/commands.hpp"
#include "cli/options.hpp"
#include "cli/svg.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"
#include "latte/latte.hpp"

namespace latte::cli {
namespace {

// Of the GPU that is planned for where there is none: an H100 or H200.
constexpr std::int32_t kAssumedMultiprocessors = 132;

struct PlanOptions {
  std::string spec;
  std::string policy = "balanced";
  std::int32_t workers = 0;
  std::int32_t rows = 16;
  std::string svg;
  bool json = false;
  ShapeOptions shape;
  BackendChoice backend;
};

// A planned batch and what went in.
struct Planned {
  BatchSpec spec;
  BatchLengths lengths;
  Policy asked;
  KernelChoice choice;               // with the number of workers that was asked for
  std::int32_t multiprocessors = 0;  // of the GPU that is planned for; 0 = for threads
  OwnedPlan owned;

  const Plan& plan() const { return owned.plan(); }
  const PlanConfig& config() const { return choice.plan; }
  std::int64_t ideal_ticks() const {
    return (unsplit_ticks(config(), lengths.view()).value() + config().workers - 1) / config().workers;
  }
};

// What is planned for. The number of workers is the caller's, also beyond this machine's.
struct Machine {
  std::optional<Backend> host{};  // else a GPU
  std::string gpu{};              // the backend's name
  std::int32_t workers = 0;       // threads, 0 = the host's; multiprocessors
};

// A GPU need not be there, as long as the options ask for no certain one.
Result<Machine> find_machine(const PlanOptions& options) {
  if (options.workers < 0)
    return Status(Code::invalid_argument, "--workers", "0 or more", fmt::format("{}", options.workers));
  const BackendChoice& asked = options.backend;
  const Result<Backend> backend = asked.open();
  const bool assumed =
      !backend && asked.name == "cuda" && asked.kernel == "auto" && asked.threads == 0 && asked.device == 0;
  if (!backend && !assumed) return backend.status();
  if (backend && !backend->on_device()) return Machine{.host = *backend, .workers = options.workers};
  return Machine{.gpu = backend ? backend->info().backend : asked.name,
                 .workers = options.workers > 0 ? options.workers
                            : backend           ? backend->workers()
                                                : kAssumedMultiprocessors};
}

// Kernel, tile sizes and costs.
template <class Problem>
auto choose(const Machine& machine, const Problem& problem, const Limits& limits, const Policy& policy)
    -> decltype(choose_for(PlanTarget{}, problem, limits, policy)) {
  if (!machine.host) return choose_for({.backend = machine.gpu, .workers = machine.workers}, problem, limits, policy);
  auto choice = machine.host->choose(problem, limits, policy);
  if (choice && machine.workers > 0) choice->plan.workers = choice->plan.limits.workers = machine.workers;
  return choice;
}

Result<KernelChoice> choose(const Machine& machine, const ShapeOptions& options, Op op, const Limits& limits,
                            const Policy& policy) {
  if (op == Op::decode) {
    const Result<Shape> shape = resolve(options);
    if (!shape) return shape.status();
    return choose(machine, shape->problem, limits, policy);
  }
  const Result<PrefillShape> shape = resolve_prefill(options);
  if (!shape) return shape.status();
  Result<PrefillChoice> choice = choose(machine, shape->problem, limits, policy);
  if (!choice) return choice.status();
  return KernelChoice{
      .kernel = std::move(choice->kernel), .reason = std::move(choice->reason), .plan = std::move(choice->plan)};
}

Result<Planned> make(const PlanOptions& options) {
  Result<BatchSpec> spec = parse_batch_spec(options.spec);
  if (!spec) return spec.status();
  const Result<Policy> policy = parse_policy(options.policy);
  if (!policy) return policy.status();
  const Result<Op> op = options.shape.checked_op();
  if (!op) return op.status();
  const Result<Machine> machine = find_machine(options);
  if (!machine) return machine.status();
  Result<KernelChoice> choice = choose(*machine, options.shape, *op, spec->limits(), *policy);
  if (!choice) return choice.status();
  BatchLengths lengths = batch_lengths(*spec);
  Result<OwnedPlan> owned = OwnedPlan::make(choice->plan, lengths.view());
  if (!owned) return owned.status();
  return Planned{.spec = std::move(*spec),
                 .lengths = std::move(lengths),
                 .asked = *policy,
                 .choice = std::move(*choice),
                 .multiprocessors = machine->host ? 0 : machine->workers,
                 .owned = std::move(*owned)};
}

// What balanced settled for, or how large a chunk is.
std::string choice_text(const Planned& planned) {
  if (planned.config().policy.kind != PolicyKind::balanced) {
    const std::string asked = policy_text(planned.asked), made = policy_text(planned.config().policy);
    return made == asked ? made : fmt::format("{}, asked for as {}", made, asked);
  }
  const std::int32_t splits = planned.plan().work_meta_data[kMetaSplits];
  if (planned.config().op == Op::prefill && splits < 2)
    return splits == 0 ? "balanced, whole tiles and the last ones cut to fill the shares" : "balanced, whole tiles";
  if (splits < 0) return "balanced, in equal pieces, one a worker";
  return splits == 0 ? "balanced, by equal shares of the work" : fmt::format("balanced, as uniform:{}", splits);
}

// In decode on a GPU two multiprocessors may form one worker.
std::string workers_text(const Planned& planned) {
  const std::int32_t workers = planned.config().workers;
  if (planned.config().op != Op::decode || planned.multiprocessors <= workers) return fmt::format("{}", workers);
  return fmt::format("{} (pairs, of {} multiprocessors)", workers, planned.multiprocessors);
}

// A record in a few characters.
std::string record_text(const Planned& planned, const WorkRecord& record) {
  const std::string kv = fmt::format("[{},{}){}", record.kv_begin, record.kv_end, record.partial_row >= 0 ? "*" : "");
  if (planned.config().op == Op::decode) return fmt::format("{}{}", record.request, kv);
  const std::int32_t head = record.row_begin / planned.lengths.query_start.back();
  const std::int32_t token = record.row_begin % planned.lengths.query_start.back();
  return fmt::format("{}.{}:{}{}", record.request, head,
                     token - planned.lengths.query_start[static_cast<std::size_t>(record.request)], kv);
}

void print_text(const Planned& planned, std::int32_t rows) {
  const Plan& plan = planned.plan();
  const PlanConfig& config = planned.config();
  const std::int64_t makespan = makespan_ticks(config, plan), ideal = planned.ideal_ticks();
  fmt::print("batch      {}: {} requests, {} query tokens, {} KV tokens\n", planned.spec.text, planned.spec.requests(),
             planned.spec.total_query_tokens(), planned.spec.total_kv_tokens());
  fmt::print("kernel     {}: {}\n", planned.choice.kernel, planned.choice.reason);
  fmt::print("policy     {}\n", choice_text(planned));
  fmt::print("workers    {}\n", workers_text(planned));
  fmt::print("tiles      {} of up to {} rows ({} heads), {} of them split\n", plan.reduce_final_map.size(),
             config.row_tile, config.heads, plan.work_meta_data[kMetaSplitTiles]);
  fmt::print("records    {}, KV in blocks of {} tokens; {} partials to join\n", plan.work_info_set.size(),
             config.kv_block, plan.reduce_partial_map.size());
  fmt::print("makespan   {:.2f} us estimated, ideal {:.2f} us ({:+.1f} %)\n\n", static_cast<double>(makespan) / 1e3,
             static_cast<double>(ideal) / 1e3,
             ideal > 0 ? 100.0 * (static_cast<double>(makespan) / static_cast<double>(ideal) - 1) : 0.0);

  Table table({">worker", ">records", ">KV tokens", ">pieces", ">est. us",
               config.op == Op::decode ? "work: request[KV range], * = a piece"
                                       : "work: request.head:first query token[KV range], * = a piece"});
  const std::int32_t shown = rows < 0 ? config.workers : std::min(rows, config.workers);
  for (std::int32_t w = 0; w < shown; ++w) {
    constexpr std::int32_t kNamed = 4;
    const std::int32_t begin = plan.work_indptr[static_cast<std::size_t>(w)],
                       end = plan.work_indptr[static_cast<std::size_t>(w) + 1];
    std::int64_t tokens = 0, ticks = 0;
    std::int32_t pieces = 0;
    std::string work;
    for (std::int32_t r = begin; r < end; ++r) {
      const WorkRecord& record = plan.work_info_set[static_cast<std::size_t>(r)];
      tokens += record.kv_end - record.kv_begin;
      ticks += record_ticks(config, plan, record);
      pieces += record.partial_row >= 0;
      if (r - begin < kNamed) work += (r > begin ? " " : "") + record_text(planned, record);
    }
    if (end - begin > kNamed) work += fmt::format(" and {} more", end - begin - kNamed);
    table.add({fmt::format("{}", w), fmt::format("{}", end - begin), fmt::format("{}", tokens),
               fmt::format("{}", pieces), fmt::format("{:.2f}", static_cast<double>(ticks) / 1e3), work});
  }
  fmt::print("{}", table.text());
  if (shown < config.workers) fmt::print("... {} more workers (--rows -1 shows all)\n", config.workers - shown);
}

void print_json(const Planned& planned) {
  const Plan& plan = planned.plan();
  const PlanConfig& config = planned.config();
  std::vector<std::vector<std::int32_t>> records, finals;
  for (const WorkRecord& r : plan.work_info_set)
    records.push_back({r.request, r.partial_row, r.row_begin, r.row_end, r.kv_begin, r.kv_end, r.kv_after, r.tile});
  for (const RowRange& range : plan.reduce_final_map) finals.push_back({range.begin, range.end});
  const nlohmann::ordered_json json = {
      {"op", op_name(config.op)},
      {"spec", planned.spec.text},
      {"kernel", planned.choice.kernel},
      {"reason", planned.choice.reason},
      {"policy", policy_text(config.policy)},
      {"policy_asked", policy_text(planned.asked)},
      {"heads", config.heads},
      {"workers", config.workers},
      {"mask", mask_name(config.mask)},
      {"row_tile", config.row_tile},
      {"kv_block", config.kv_block},
      {"shared_cache_tokens", config.shared_cache_tokens},
      {"cost",
       {{"piece_ticks", config.cost.piece_ticks},
        {"split_ticks", config.cost.split_ticks},
        {"block_ticks", config.cost.block_ticks},
        {"granule_ticks", config.cost.granule_ticks},
        {"row_granule", config.cost.row_granule},
        {"alone_percent", config.cost.alone_percent}}},
      {"seq_lens", planned.lengths.seq_lens},
      {"query_start", planned.lengths.query_start},
      {"makespan_ticks", makespan_ticks(config, plan)},
      {"ideal_ticks", planned.ideal_ticks()},
      {"splits", plan.work_meta_data[kMetaSplits]},
      {"work_meta_data", std::vector<std::int32_t>(plan.work_meta_data.begin(), plan.work_meta_data.end())},
      {"work_indptr", std::vector<std::int32_t>(plan.work_indptr.begin(), plan.work_indptr.end())},
      {"work_info_set", records},
      {"reduce_indptr", std::vector<std::int32_t>(plan.reduce_indptr.begin(), plan.reduce_indptr.end())},
      {"reduce_final_map", finals},
      {"reduce_partial_map", std::vector<std::int32_t>(plan.reduce_partial_map.begin(), plan.reduce_partial_map.end())},
  };
  fmt::print("{}\n", json.dump());
}

Status write_file(const std::string& path, const std::string& text) {
  errno = 0;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (!ok) return io_error(path, "a file that can be written");
  return {};
}

int run(const PlanOptions& options) {
  const Result<Planned> planned = make(options);
  if (!planned) return fail(planned.status());
  if (!options.svg.empty()) {
    const std::string title = fmt::format("{}, {}", planned->spec.text, policy_text(planned->config().policy));
    const std::string svg = plan_svg(
        {.config = planned->config(), .plan = planned->plan(), .lengths = planned->lengths.view(), .title = title});
    if (const Status status = write_file(options.svg, svg); !status.ok()) return fail(status);
  }
  if (options.json)
    print_json(*planned);
  else
    print_text(*planned, options.rows);
  return kExitOk;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand("plan", "Who computes what: the plan of a batch as text, JSON or a picture");
  command->add_option("--spec", options->spec, "The batch, like 1q1s64k_63q1s2k")->required();
  command->add_option("--workers", options->workers, "Workers to plan for; 0 = this machine's")->capture_default_str();
  command->add_option("--policy", options->policy, "balanced, uniform:N or batch_invariant[:TOKENS]")
      ->capture_default_str();
  command->add_option("--rows", options->rows, "Workers shown in the text; -1 = all")->capture_default_str();
  command->add_option("--svg", options->svg, "Also draw the plan into this file")->check(file_name());
  command->add_flag("--json", options->json, "The six arrays, lengths and cost model as one JSON object")
      ->excludes("--rows");
  options->shape.add_ops_to(*command);
  options->shape.add_to(*command);
  options->backend.add_to(*command);
  command->footer(
      "Examples:\n"
      "  latte plan --spec 1q1s64k_63q1s2k --workers 132 --svg plan.svg\n"
      "  latte plan --spec 16q1s4k --workers 8 --policy uniform:4 --rows -1\n"
      "  latte plan --spec 256q1s4k --workers 132 --json\n"
      "  latte plan --op prefill --spec 1q16k_15q512 --workers 132 --svg plan.svg\n"
      "  latte plan --spec 64q1s4k --heads 16 --backend cuda      (no GPU needed: 132 multiprocessors are assumed)");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace latte::cli
