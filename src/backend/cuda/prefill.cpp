// Prefill on a device: which kernel, a step whose plan lies there, and what its tensors go through on entry.
#include <algorithm>
#include <string>

#include "backend/cuda/impl.hpp"
#include "backend/errors.hpp"
#include "backend/views.hpp"
#include "core/checked.hpp"
#include "cuda/sm90/prefill/choice.hpp"
#include "plan/layout.hpp"

namespace latte::backend {
namespace {

// The parts of a step's workspace, in this order, each from a multiple of 256 bytes on.
struct PrefillParts {
  std::int64_t arrived = 0, launches = 0, claimed = 0, ready = 0;  // zero before the first launch
  std::int64_t partial_lse = 0, partial_out = 0;
  std::int64_t q = 0, k = 0, v = 0;  // of the type that the kernel multiplies, where the caller's are of another
  std::int64_t values = 0;           // fp8: transposed
  std::int64_t value_blocks = 0;     // of a head
  std::int64_t bytes = 0;

  explicit PrefillParts(const PrefillSetup& setup) {
    const PrefillProblem& problem = setup.problem;
    const Limits limits = plan::resolve(setup.choice.plan.limits);
    const bool fp8_tensors = problem.dtype == Dtype::fp8_e4m3, fp8 = setup.choice.math == PrefillMath::fp8;
    const std::int64_t row = std::int64_t{problem.heads} * (fp8 ? 1 : 2);  // bytes a column
    const bool convert = fp8 != fp8_tensors;
    if (fp8) value_blocks = cuda::transposed_blocks(limits.max_total_kv_tokens, limits.max_requests);
    const std::int64_t all_blocks = problem.heads * value_blocks;
    const auto words = [](std::int64_t count) { return count * static_cast<std::int64_t>(sizeof(std::uint32_t)); };
    take(arrived, static_cast<std::int64_t>(arrived_bytes(setup.sizes)));
    take(launches, words(fp8 ? 2 : 0));
    take(claimed, words(all_blocks));
    take(ready, words(all_blocks));
    take(partial_lse, words(setup.sizes.partial_rows));
    take(partial_out, words(setup.sizes.partial_rows * cuda::kPrefillValues));
    take(q, convert ? limits.max_total_query_tokens * row * cuda::kPrefillWidth : 0);
    take(k, convert ? limits.max_total_kv_tokens * row * cuda::kPrefillWidth : 0);
    take(v, convert ? limits.max_total_kv_tokens * row * cuda::kPrefillValues : 0);
    take(values, all_blocks * cuda::kPrefillBlock * cuda::kPrefillValues);
  }
  std::int64_t zeroed_bytes() const { return partial_lse; }  // from the first on

 private:
  void take(std::int64_t& part, std::int64_t count) {
    part = bytes;
    bytes += round_up(count, 256);
  }
};

// As many tokens as the tensor has, but no more than a step may: converted ones have no more room.
cuda::PrefillTensor tensor(const ConstTensorView& view, std::int64_t most) {
  return {.data = view.data,
          .token_stride = view.stride[0],
          .head_stride = view.stride[1],
          .tokens = static_cast<std::int32_t>(std::min(view.shape[0], most))};
}

// Query tokens that the call's tensors hold.
std::int32_t output_tokens(const PrefillArgs& args) {
  std::int64_t tokens = std::min(args.q.shape[0], args.out.shape[0]);
  if (args.lse.rank != 0) tokens = std::min(tokens, args.lse.shape[0]);
  return static_cast<std::int32_t>(std::min<std::int64_t>(tokens, INT32_MAX));
}

class CudaPrefillStep final : public PrefillStep {
 public:
  CudaPrefillStep(CudaImpl& impl, const PrefillSetup& setup, const cuda::PrefillKernel& kernel,
                  const PrefillContext* validated)
      : device_(*impl.device()),
        setup_(setup),
        kernel_(kernel),
        limits_(plan::resolve(setup.choice.plan.limits)),
        workers_(plan::worker_count(setup.choice.plan)),
        parts_(setup),
        words_(device_),
        validates_(validated != nullptr),
        findings_(impl, "context_lens", validated != nullptr ? context_limits(*validated) : Limits()) {}

  Status allocate(std::int32_t* words) {
    LATTE_RETURN_IF_ERROR(words_.allocate(words, setup_.words.count));
    return validates_ ? findings_.allocate() : Status();
  }

  Result<PrefillWords::Parts> stage(Stream stream) override {
    LATTE_RETURN_IF_ERROR(words_.stage(stream));
    return setup_.words.at(words_.staged());
  }

  Status publish(const Plan& plan, const PrefillLengths& lengths, Stream stream) override {
    // Nobody on the device but validation asks for the context's lengths.
    return words_.upload(stream, lengths.context_lens.first(validates_ ? lengths.context_lens.size() : 0),
                         lengths.query_start, lengths.kv_start, plan.work_meta_data, plan.work_indptr,
                         plan.work_info_set, plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map);
  }

  const std::int32_t* kv_start() const override { return on_device().kv_start; }

  Status run(const PrefillArgs& args, std::byte* workspace) override {
    const PrefillWords::Parts step = on_device();
    const std::int32_t* const plan = step.plan.data();
    cuda::PrefillCall call{.heads = setup_.problem.heads,
                           .mask = setup_.problem.mask,
                           .scale = args.scale,
                           .q = tensor(args.q, limits_.max_total_query_tokens),
                           .k = tensor(args.k, limits_.max_total_kv_tokens),
                           .v = tensor(args.v, limits_.max_total_kv_tokens),
                           .out = output_view<cuda::OutputView>(args.out, args.lse),
                           .out_tokens = output_tokens(args),
                           .query_start = step.query_start,
                           .kv_start = step.kv_start,
                           .meta = plan,
                           .plan = device_plan(setup_.sizes, workers_, plan),
                           .workspace = {.arrived = reinterpret_cast<std::uint32_t*>(workspace + parts_.arrived),
                                         .partial_lse = reinterpret_cast<float*>(workspace + parts_.partial_lse),
                                         .partial_out = reinterpret_cast<float*>(workspace + parts_.partial_out)}};
    if (fp8())
      call.values = {.data = workspace + parts_.values,
                     .blocks = static_cast<std::int32_t>(parts_.value_blocks),
                     .launches = reinterpret_cast<std::uint32_t*>(workspace + parts_.launches),
                     .counted = reinterpret_cast<std::uint32_t*>(workspace + parts_.launches) + 1,
                     .claimed = reinterpret_cast<std::uint32_t*>(workspace + parts_.claimed),
                     .ready = reinterpret_cast<std::uint32_t*>(workspace + parts_.ready)};
    // Scales belong to fp8 values, the caller's or those made here.
    if (fp8() || fp8_tensors()) {
      call.q_scale = args.q_scale;
      call.k_scale = args.k_scale;
      call.v_scale = args.v_scale;
    }
    // Every page that the chunks behind this launch will follow, also of requests without query tokens.
    if (validates_)
      LATTE_RETURN_IF_ERROR(findings_.look({.lengths = {.seq_lens = step.context_lens},
                                            .kv = cache_view(args.kv_cache, args.pages),
                                            .requests = plan + kMetaRequests},
                                           args.stream));
    LATTE_RETURN_IF_ERROR(enter(call, workspace, args.stream));
    return device_.prefill(kernel_, call, workers_, args.stream);
  }

  Status take_finding() override { return findings_.take(); }

 private:
  static Limits context_limits(const PrefillContext& context) {
    return {.max_kv_tokens = context.max_tokens, .max_total_kv_tokens = context.max_total_tokens};
  }
  PrefillWords::Parts on_device() const { return setup_.words.at(words_.on_device()); }
  bool fp8_tensors() const { return setup_.problem.dtype == Dtype::fp8_e4m3; }
  bool fp8() const { return setup_.choice.math == PrefillMath::fp8; }

  // Brings the tensors into the type that the kernel multiplies.
  Status enter(cuda::PrefillCall& call, std::byte* workspace, Stream stream) const {
    if (fp8() == fp8_tensors()) return {};
    LATTE_RETURN_IF_ERROR(convert(call.q, call.q_scale, cuda::kPrefillWidth, workspace + parts_.q, stream));
    LATTE_RETURN_IF_ERROR(convert(call.k, call.k_scale, cuda::kPrefillWidth, workspace + parts_.k, stream));
    return convert(call.v, call.v_scale, cuda::kPrefillValues, workspace + parts_.v, stream);
  }

  Status convert(cuda::PrefillTensor& tensor, const Fp8Scale& scale, std::int32_t width, std::byte* to,
                 Stream stream) const {
    LATTE_RETURN_IF_ERROR(device_.convert({.from = tensor,
                                           .from_dtype = setup_.problem.dtype,
                                           .scale = scale,
                                           .heads = setup_.problem.heads,
                                           .width = width,
                                           .to = to},
                                          stream));
    tensor.data = to;
    tensor.token_stride = std::int64_t{setup_.problem.heads} * width;
    tensor.head_stride = width;
    return {};
  }

  cuda::Device& device_;
  const PrefillSetup& setup_;
  const cuda::PrefillKernel kernel_;
  const Limits limits_;  // resolved
  const std::int32_t workers_;
  const PrefillParts parts_;
  StagedWords words_;
  const bool validates_;  // the context, before it runs
  Findings findings_;
};

}  // namespace

Result<PrefillChoice> choose_for_cuda(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                      std::int32_t multiprocessors) {
  auto choice = cuda::choose_prefill(problem, limits, policy, multiprocessors);
  if (!choice.ok()) return choice.status();
  return PrefillChoice{.kernel = cuda::kernel_name(choice->kernel),
                       .reason = std::move(choice->reason),
                       .math = choice->math,
                       .plan = choice->config};
}

Result<PrefillChoice> CudaImpl::choose(const PrefillProblem& problem, const Limits& limits,
                                       const Policy& policy) const {
  return choose_for_cuda(problem, limits, policy, workers());
}

// As PrefillParts has them: k and v converted, v transposed by blocks, of which every request may begin one.
ChunkEntry CudaImpl::chunk_entry(const PrefillProblem& problem, PrefillMath math, std::int32_t max_requests) const {
  const bool fp8 = math == PrefillMath::fp8, convert = fp8 != (problem.dtype == Dtype::fp8_e4m3);
  const std::int64_t converted = convert ? (fp8 ? 1 : 2) * (cuda::kPrefillWidth + cuda::kPrefillValues) : 0;
  const std::int64_t transposed = fp8 ? cuda::kPrefillValues : 0;
  return {.token_bytes = problem.heads * (converted + transposed),
          .fixed_bytes = problem.heads * transposed * cuda::kPrefillBlock * max_requests};
}

std::size_t CudaImpl::prefill_workspace_bytes(const PrefillSetup& setup) const {
  return static_cast<std::size_t>(PrefillParts(setup).bytes);
}

Result<std::unique_ptr<PrefillStep>> CudaImpl::make_prefill_step(const PrefillSetup& setup, std::int32_t* words,
                                                                 const PrefillContext* validated) {
  const PlanConfig& plan = setup.choice.plan;
  const auto choice = cuda::choose_prefill(setup.problem, plan.limits, plan.policy, workers());
  if (!choice.ok()) return choice.status();
  LATTE_RETURN_IF_ERROR(device_->prepare(choice->kernel));
  auto step = std::make_unique<CudaPrefillStep>(*this, setup, choice->kernel, validated);
  LATTE_RETURN_IF_ERROR(step->allocate(words));
  return std::unique_ptr<PrefillStep>(std::move(step));
}

Status CudaImpl::init_prefill_workspace(const PrefillSetup& setup, std::byte* workspace, Stream stream) {
  return device_->clear(workspace, static_cast<std::size_t>(PrefillParts(setup).zeroed_bytes()), stream);
}

Status CudaImpl::gather_kv(const GatherKvArgs& args) {
  return device_->gather_kv({.kv = cache_view(args.kv_cache, args.pages),
                             .format = args.kv_format,
                             .kv_scale = args.kv_scale,
                             .first_token = args.first_token,
                             .out_start = args.out_start.data(),
                             .requests = static_cast<std::int32_t>(args.out_start.size()) - 1,
                             .tokens = args.tokens,
                             .width = static_cast<std::int32_t>(args.out.shape[1]),
                             .out = args.out.data,
                             .out_stride = args.out.stride[0],
                             .out_dtype = args.out.dtype},
                            args.stream);
}

}  // namespace latte::backend
