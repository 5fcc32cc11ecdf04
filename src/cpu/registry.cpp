// Which kernels there are, which one a problem gets, and what the planner is told about it.
#include <algorithm>

#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

std::vector<KernelListing> list_kernels() {
  std::vector<KernelListing> list;
  const auto add = [&](const Kernel& kernel) {
    std::string reason;
    const bool usable = kernel.usable(features(), reason);
    list.push_back({&kernel, kernel.name, usable, reason, kernel.serves});
  };
  for (const Kernel& kernel : bf16_kernels()) add(kernel);
  for (const Kernel& kernel : fp32_kernels()) add(kernel);
  add(scalar_kernel());
  // Behind scalar, which takes everything: never chosen unless asked for.
  for (const Kernel& kernel : emulated_kernels()) add(kernel);
  return list;
}

// Measured on 512/64; other widths scale the arithmetic, other formats the bytes.
CostModel cost_model(const Kernel& kernel, const DecodeProblem& problem, std::int32_t row_tile) {
  constexpr double kReferenceWidth = 512 + 64 + 512, kReferenceBytes = 1152;
  // Packing a query row and writing its output; writing a partial row, reading it back and joining it. From the times
  // of 64q1s64 and of 64q1s256 with uniform:1, 2 and 4, at 16 and 128 heads, on one thread of a Zen 4.
  constexpr double kPieceNs = 500, kPieceRowNs = 200, kSplitNs = 500, kSplitRowNs = 330;
  const double width = (2.0 * problem.latent + problem.rope) / kReferenceWidth;
  const double bytes = static_cast<double>(kv_token_elements(problem.kv_format, problem.latent, problem.rope)) *
                       static_cast<double>(dtype_bytes(kv_element_dtype(problem.kv_format))) / kReferenceBytes;
  const auto ticks = [](double ns) { return std::max(1, static_cast<std::int32_t>(ns)); };
  return {.piece_ticks = ticks(kPieceNs + kPieceRowNs * row_tile),
          .split_ticks = ticks(kSplitNs + kSplitRowNs * row_tile),
          .block_ticks = ticks(kernel.speed.block_ns * bytes),
          .granule_ticks = ticks(kernel.speed.row_block_ns * kernel.speed.granule * width),
          .row_granule = kernel.speed.granule};
}

constexpr std::int32_t kDefaultChunk = 1024;

}  // namespace

const std::vector<KernelListing>& kernels() {
  static const std::vector<KernelListing> list = list_kernels();
  return list;
}

std::string cpu_name() { return features().name; }
std::string feature_text() { return to_string(features()); }
std::string_view kernel_name(const Kernel& kernel) { return kernel.name; }

const Kernel* choose_kernel(const DecodeProblem& problem, std::string_view override_name, std::string& reason) {
  const bool any = override_name.empty() || override_name == "auto";
  for (const KernelListing& entry : kernels()) {
    if (!any && entry.name != override_name) continue;
    if (entry.usable && entry.kernel->takes(problem)) return entry.kernel;
    if (any) continue;
    reason = "kernel " + std::string(entry.name) + ": " +
             (entry.usable ? "serves only " + std::string(entry.serves) : entry.reason);
    return nullptr;
  }
  reason = "no kernel named " + std::string(override_name);
  return nullptr;
}

PlanConfig plan_config(const Kernel& kernel, const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                       std::int32_t workers) {
  PlanConfig config;
  config.heads = problem.heads;
  // As few tiles as the kernel allows for the longest query, then as even as its row groups allow.
  const std::int64_t rows = std::max<std::int64_t>(1, std::int64_t{problem.heads} * limits.max_query_tokens);
  const std::int64_t tiles = ceil_div(rows, kernel.max_row_tile);
  config.row_tile = static_cast<std::int32_t>(
      std::min<std::int64_t>(kernel.max_row_tile, round_up(ceil_div(rows, tiles), kernel.speed.granule)));
  config.kv_block = kKvBlock;
  config.workers = workers;
  config.mask = problem.mask;
  config.policy = policy;
  if (policy.kind == PolicyKind::batch_invariant && policy.n == 0) config.policy.n = kDefaultChunk;
  config.cost = cost_model(kernel, problem, config.row_tile);
  config.limits = limits;
  return config;
}

}  // namespace latte::cpu
