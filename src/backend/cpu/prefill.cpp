// Prefill on the CPU: which kernel, a step in the process's own memory, and the gathering of context chunks.
#include "backend/cpu/impl.hpp"
#include "backend/errors.hpp"
#include "backend/views.hpp"
#include "core/checked.hpp"

namespace latte::backend {
namespace {

constexpr std::int64_t kSliceBytes = 256;  // what workspaces of Impl are multiples of

Result<const cpu::Kernel*> find_kernel(std::string_view name, const PrefillProblem& problem) {
  std::string reason;
  const cpu::Kernel* kernel = cpu::choose_kernel(problem, name, reason);
  if (kernel == nullptr) return unsupported("problem", "one that kernel " + std::string(name) + " serves", reason);
  return kernel;
}

std::string reason_for(std::string_view name, const PrefillProblem& problem) {
  if (problem.dtype == Dtype::fp8_e4m3) return "fp8 is converted on load: no fp8 arithmetic on this machine";
  if (problem.math == PrefillMath::fp8) return "the tensors are used as they are: no fp8 arithmetic on this machine";
  return name == "auto" ? "the fastest usable kernel that serves these formats" : "asked for";
}

Result<PrefillChoice> choose_kernel(std::string_view name, const PrefillProblem& problem, const Limits& limits,
                                    const Policy& policy, std::int32_t threads) {
  const auto kernel = find_kernel(name, problem);
  if (!kernel.ok()) return kernel.status();
  const std::int32_t workers = limits.workers > 0 ? limits.workers : threads;
  return PrefillChoice{.kernel = std::string(cpu::kernel_name(**kernel)),
                       .reason = reason_for(name, problem),
                       .math = PrefillMath::half,
                       .plan = cpu::plan_config(**kernel, problem, limits, policy, workers)};
}

cpu::HeadsView heads_view(const ConstTensorView& view) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return {.data = view.bytes(),
          .token_stride_bytes = view.stride[0] * element_bytes,
          .head_stride_bytes = view.stride[1] * element_bytes};
}

class CpuPrefillStep final : public PrefillStep {
 public:
  CpuPrefillStep(cpu::Workers& workers, const cpu::Kernel& kernel, const PrefillSetup& setup, std::int32_t* words)
      : workers_(workers), kernel_(kernel), setup_(setup), words_(setup.words.at(words)) {}

  Result<PrefillWords::Parts> stage(Stream /*stream*/) override { return words_; }
  Status publish(const Plan& plan, const PrefillLengths& lengths, Stream /*stream*/) override {
    plan_ = plan;
    lengths_ = lengths;
    return {};
  }
  const std::int32_t* kv_start() const override { return lengths_.kv_start.data(); }

  Status run(const PrefillArgs& args, std::byte* workspace) override {
    const PrefillProblem& problem = setup_.problem;
    cpu::run_prefill(workers_, {.kernel = &kernel_,
                                .plan = &plan_,
                                .qk_width = problem.qk_width,
                                .v_width = problem.v_width,
                                .mask = problem.mask,
                                .query_start = lengths_.query_start,
                                .kv_start = lengths_.kv_start,
                                .q = {.nope = args.q.bytes(),
                                      .rope = args.q.bytes(),
                                      .nope_width = problem.qk_width,
                                      .rope_width = 0,
                                      .nope_token_stride = args.q.stride[0],
                                      .nope_head_stride = args.q.stride[1],
                                      .dtype = problem.dtype},
                                .k = heads_view(args.k),
                                .v = heads_view(args.v),
                                .out = output_view<cpu::OutputView>(args.out, args.lse),
                                .scale = args.scale,
                                .q_scale = head_scale(args.q_scale),
                                .k_scale = head_scale(args.k_scale),
                                .v_scale = head_scale(args.v_scale),
                                .workspace = workspace});
    return {};
  }
  Status take_finding() override { return {}; }

 private:
  // Scales belong to fp8 tensors; what they say of others is for machines that quantise on entry.
  cpu::HeadScale head_scale(const Fp8Scale& scale) const {
    static constexpr float kOne = 1;
    if (setup_.problem.dtype != Dtype::fp8_e4m3) return {&kOne, 0};
    return {scale.ptr != nullptr ? scale.ptr : &scale.value, scale.ptr != nullptr && scale.per_head ? 1 : 0};
  }

  cpu::Workers& workers_;
  const cpu::Kernel& kernel_;
  const PrefillSetup& setup_;
  const PrefillWords::Parts words_;
  Plan plan_;
  PrefillLengths lengths_;
};

}  // namespace

Result<PrefillChoice> CpuImpl::choose(const PrefillProblem& problem, const Limits& limits, const Policy& policy) const {
  return choose_kernel(kernel_, problem, limits, policy, workers());
}

std::size_t CpuImpl::prefill_workspace_bytes(const PrefillSetup& setup) const {
  const auto kernel = find_kernel(kernel_, setup.problem);
  if (!kernel.ok()) return 0;
  const std::size_t bytes = cpu::workspace_bytes(**kernel, setup.problem, setup.choice.plan, setup.sizes);
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(bytes), kSliceBytes));
}

Result<std::unique_ptr<PrefillStep>> CpuImpl::make_prefill_step(const PrefillSetup& setup, std::int32_t* words,
                                                                const PrefillContext* /*validated*/) {
  const auto kernel = find_kernel(kernel_, setup.problem);
  if (!kernel.ok()) return kernel.status();
  return std::unique_ptr<PrefillStep>(std::make_unique<CpuPrefillStep>(workers_, **kernel, setup, words));
}

Status CpuImpl::gather_kv(const GatherKvArgs& args) {
  cpu::run_gather_kv(workers_, {.kv = cache_view(args.kv_cache, args.kv_format, args.pages),
                                .width = static_cast<std::int32_t>(args.out.shape[1]),
                                .kv_scale = scale_of(args.kv_scale),
                                .first_token = args.first_token,
                                .out_start = args.out_start,
                                .out = args.out.bytes(),
                                .out_stride = args.out.stride[0],
                                .dtype = args.out.dtype});
  return {};
}

Result<PrefillChoice> choose_for_cpu(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                     std::int32_t threads) {
  return choose_kernel("auto", problem, limits, policy, threads);
}

}  // namespace latte::backend
