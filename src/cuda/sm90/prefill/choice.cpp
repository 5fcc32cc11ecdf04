#include "cuda/sm90/prefill/choice.hpp"

#include <algorithm>

namespace latte::cuda {
namespace {

Status refuse(const char* field, std::string expected, std::string got) {
  return {Code::unsupported, field, std::move(expected), std::move(got)};
}

Status check(const PrefillProblem& problem) {
  if (problem.dtype == Dtype::f32) return refuse("dtype", "bf16, f16 or fp8_e4m3 on cuda", "f32");
  if (problem.qk_width != kPrefillWidth || problem.v_width != kPrefillValues)
    return refuse("qk_width", "192, with v_width 128, on cuda",
                  std::to_string(problem.qk_width) + ", with v_width " + std::to_string(problem.v_width));
  return {};
}

// Nanoseconds on an H200 in a long run, at the clock its power limit leaves. Block and piece follow from the times of
// 1q8k (16 heads) and of 8q1k or 1q1k (128 heads); split is an estimate, as tiles are rarely cut.
struct Speed {
  std::int32_t piece_ns, split_ns, block_ns;
};
constexpr Speed kHalfSpeed = {.piece_ns = 3800, .split_ns = 4000, .block_ns = 2050};
constexpr Speed kFp8Speed = {.piece_ns = 3500, .split_ns = 4000, .block_ns = 1450};

constexpr std::int64_t kMostWorkers = 1 << 16;  // of a plan

// Of the keys and values of the heads that are worked on at a time. Less than L2 has: queries and outputs pass through.
constexpr std::int64_t kSharedCacheBytes = 32 * 1024 * 1024;

}  // namespace

const char* kernel_name(const PrefillKernel& kernel) {
  if (kernel.dtype == Dtype::fp8_e4m3) return "sm90_prefill_fp8";
  return kernel.dtype == Dtype::bf16 ? "sm90_prefill_bf16" : "sm90_prefill_f16";
}

Result<PrefillKernelChoice> choose_prefill(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                           std::int32_t multiprocessors) {
  if (Status status = check(problem); !status.ok()) return status;
  const bool fp8_tensors = problem.dtype == Dtype::fp8_e4m3;
  const bool fp8 = problem.math == PrefillMath::fp8 || (problem.math == PrefillMath::automatic && fp8_tensors);

  PrefillKernelChoice choice;
  choice.math = fp8 ? PrefillMath::fp8 : PrefillMath::half;
  // e4m3 values are exact in both 16-bit types; f16 keeps more of the probabilities.
  choice.kernel.dtype = fp8 ? Dtype::fp8_e4m3 : fp8_tensors ? Dtype::f16 : problem.dtype;
  if (fp8)
    choice.reason = fp8_tensors ? "the tensors are fp8 and this device multiplies fp8"
                                : "fp8 was asked for: the tensors are quantised on entry";
  else
    choice.reason = fp8_tensors ? "16-bit products were asked for: the fp8 tensors are converted to f16 on entry"
                                : "the tensors are 16-bit";

  PlanConfig& config = choice.config;
  config.op = Op::prefill;
  config.heads = problem.heads;
  config.row_tile = kPrefillRows;
  config.kv_block = kPrefillBlock;
  config.workers = limits.workers > 0 ? std::min(limits.workers, multiprocessors) : multiprocessors;
  config.mask = problem.mask;
  config.policy = policy;
  config.limits = limits;
  // A plain grid has a thread block for every piece, and the device deals them out as they come.
  if (policy.kind == PolicyKind::uniform && limits.workers == 0)
    if (const auto sizes = plan_sizes(config); sizes.ok())
      config.workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(sizes->records, 1, kMostWorkers));
  config.limits.workers = config.workers;
  const Speed& speed = fp8 ? kFp8Speed : kHalfSpeed;
  config.cost = {.piece_ticks = speed.piece_ns,
                 .split_ticks = speed.split_ns,
                 .block_ticks = speed.block_ns,
                 .granule_ticks = 0,
                 .row_granule = 1};
  config.shared_cache_tokens = kSharedCacheBytes / ((kPrefillWidth + kPrefillValues) * (fp8 ? 1 : 2));
  return choice;
}

}  // namespace latte::cuda
