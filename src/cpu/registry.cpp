// Which kernels there are, which one a problem gets, and what the planner is told about it.
#include <algorithm>

#include "cpu/kernel.hpp"
#include "cpu/workers.hpp"

namespace latte::cpu {
namespace {

std::int32_t ticks(double ns) { return std::max(1, static_cast<std::int32_t>(ns)); }

// Measured on 512/64; other widths scale the arithmetic, other formats the bytes.
CostModel cost_model(const Kernel& kernel, const DecodeProblem& problem, std::int32_t row_tile) {
  constexpr double kReferenceWidth = 512 + 64 + 512, kReferenceBytes = 1152;
  // Packing a query row and writing its output; writing a partial row, reading it back and joining it. From the times
  // of 64q1s64 and of 64q1s256 with uniform:1, 2 and 4, at 16 and 128 heads, on one thread of a Zen 5.
  constexpr double kPieceNs = 500, kPieceRowNs = 130, kSplitNs = 1000, kSplitRowNs = 200;
  const double width = (2.0 * problem.latent + problem.rope) / kReferenceWidth;
  const double bytes = static_cast<double>(kv_token_elements(problem.kv_format, problem.latent, problem.rope)) *
                       static_cast<double>(dtype_bytes(kv_element_dtype(problem.kv_format))) / kReferenceBytes;
  return {.piece_ticks = ticks(kPieceNs + kPieceRowNs * row_tile),
          .split_ticks = ticks(kSplitNs + kSplitRowNs * row_tile),
          .block_ticks = ticks(kernel.speed.block_ns * bytes),
          .granule_ticks = ticks(kernel.speed.row_block_ns * kernel.speed.granule * width),
          .row_granule = kernel.speed.granule};
}

constexpr std::int32_t kDefaultChunk = 1024;

// Measured on 192/128; other widths scale the arithmetic, other dtypes the bytes.
CostModel cost_model(const Kernel& kernel, const PrefillProblem& problem, std::int32_t row_tile) {
  constexpr double kReferenceWidth = 192 + 128, kReferenceBytes = 2;
  // As in decode, for rows a quarter as wide.
  constexpr double kPieceNs = 500, kPieceRowNs = 50, kSplitNs = 500, kSplitRowNs = 80;
  const double width = (problem.qk_width + problem.v_width) / kReferenceWidth;
  const double bytes = static_cast<double>(dtype_bytes(problem.dtype)) / kReferenceBytes;
  const Speed& speed = kernel.prefill_speed;
  return {.piece_ticks = ticks(kPieceNs + kPieceRowNs * width * row_tile),
          .split_ticks = ticks(kSplitNs + kSplitRowNs * width * row_tile),
          .block_ticks = ticks(speed.block_ns * width * bytes),
          .granule_ticks = ticks(speed.row_block_ns * speed.granule * width),
          .row_granule = speed.granule};
}

// As few tiles of `rows` rows as the kernel allows, then as even as its row groups allow.
std::int32_t even_tile(std::int64_t rows, std::int32_t most, std::int32_t granule) {
  const std::int64_t tiles = ceil_div(rows, most);
  return static_cast<std::int32_t>(std::min<std::int64_t>(most, round_up(ceil_div(rows, tiles), granule)));
}

}  // namespace

std::vector<KernelListing> list_kernels(const Features& machine) {
  std::vector<KernelListing> list;
  const auto add = [&](const Kernel& kernel) {
    std::string reason;
    const bool usable = kernel.usable(machine, reason);
    list.push_back({&kernel, kernel.name, usable, reason, kernel.serves});
  };
  for (const Kernel& kernel : bf16_kernels()) add(kernel);
  for (const Kernel& kernel : fp32_kernels()) add(kernel);
  add(scalar_kernel());
  // Behind scalar, which takes everything: never chosen unless asked for.
  for (const Kernel& kernel : emulated_kernels()) add(kernel);
  return list;
}

const Kernel* choose_kernel(std::span<const KernelListing> list, Dtype q, KvFormat kv, std::string_view override_name,
                            std::string& reason) {
  const bool any = override_name.empty() || override_name == "auto";
  for (const KernelListing& entry : list) {
    if (!any && entry.name != override_name) continue;
    if (entry.usable && entry.kernel->takes(q, kv)) return entry.kernel;
    if (any) continue;
    reason = "kernel " + std::string(entry.name) + ": " +
             (entry.usable ? "serves only " + std::string(entry.serves) : entry.reason);
    return nullptr;
  }
  reason = "no kernel named " + std::string(override_name);
  return nullptr;
}

const std::vector<KernelListing>& kernels() {
  static const std::vector<KernelListing> list = list_kernels(features());
  return list;
}

std::string cpu_name() { return features().name; }
std::string feature_text() { return to_string(features()); }
std::string_view kernel_name(const Kernel& kernel) { return kernel.name; }

const Kernel* choose_kernel(const DecodeProblem& problem, std::string_view override_name, std::string& reason) {
  return choose_kernel(kernels(), problem.q_dtype, problem.kv_format, override_name, reason);
}

const Kernel* choose_kernel(const PrefillProblem& problem, std::string_view override_name, std::string& reason) {
  return choose_kernel(kernels(), problem.dtype, format_of(problem.dtype), override_name, reason);
}

PlanConfig plan_config(const Kernel& kernel, const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                       std::int32_t workers) {
  const DefaultFloatingPoint arithmetic;  // costs do not depend on the caller's rounding mode
  PlanConfig config;
  config.heads = problem.heads;
  const std::int64_t rows = std::max<std::int64_t>(1, std::int64_t{problem.heads} * limits.max_query_tokens);
  config.row_tile = even_tile(rows, kernel.max_row_tile, kernel.speed.granule);
  config.kv_block = kKvBlock;
  config.workers = workers;
  config.mask = problem.mask;
  config.policy = policy;
  if (policy.kind == PolicyKind::batch_invariant && policy.n == 0) config.policy.n = kDefaultChunk;
  config.cost = cost_model(kernel, problem, config.row_tile);
  config.limits = limits;
  return config;
}

PlanConfig plan_config(const Kernel& kernel, const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                       std::int32_t workers) {
  const DefaultFloatingPoint arithmetic;  // costs do not depend on the caller's rounding mode
  PlanConfig config;
  config.op = Op::prefill;
  config.heads = problem.heads;
  config.row_tile =
      even_tile(std::max(1, limits.max_query_tokens), kernel.prefill_row_tile, kernel.prefill_speed.granule);
  config.kv_block = kKvBlock;
  config.workers = workers;
  config.mask = problem.mask;
  config.policy = policy;  // batch_invariant without a chunk never splits: many tiles are the rule
  config.cost = cost_model(kernel, problem, config.row_tile);
  config.limits = limits;
  // Half of the last-level cache that a server processor's cores share.
  constexpr std::int64_t kSharedCacheBytes = std::int64_t{16} << 20;
  config.shared_cache_tokens = kSharedCacheBytes / ((std::int64_t{problem.qk_width} + problem.v_width) *
                                                    static_cast<std::int64_t>(dtype_bytes(problem.dtype)));
  return config;
}

}  // namespace latte::cpu
