// The CPU backend: resident threads, and slots in the process's own memory. prefill.cpp has prefill.
#include "backend/cpu/impl.hpp"

#include <array>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "backend/builder.hpp"
#include "backend/errors.hpp"
#include "backend/views.hpp"

namespace latte::backend {
namespace {

constexpr std::int32_t kMaxThreads = 1024;

std::string kernel_names() {
  std::string names = "auto";
  for (const cpu::KernelListing& listing : cpu::kernels()) names += ", " + std::string(listing.name);
  return names;
}

// The listing of a kernel that this machine can run.
Result<const cpu::KernelListing*> usable_kernel(std::string_view name) {
  for (const cpu::KernelListing& listing : cpu::kernels()) {
    if (listing.name != name) continue;
    if (listing.usable) return &listing;
    return unsupported("kernel", "one this machine can run", std::string(name) + ": " + listing.reason);
  }
  return invalid("kernel", "one of " + kernel_names(), "\"" + std::string(name) + "\"");
}

Result<const cpu::Kernel*> find_kernel(std::string_view name, const DecodeProblem& problem) {
  std::string reason;
  const cpu::Kernel* kernel = cpu::choose_kernel(problem, name, reason);
  if (kernel == nullptr) return unsupported("problem", "one that kernel " + std::string(name) + " serves", reason);
  return kernel;
}

Result<KernelChoice> choose_kernel(std::string_view name, const DecodeProblem& problem, const Limits& limits,
                                   const Policy& policy, std::int32_t threads) {
  const auto kernel = find_kernel(name, problem);
  if (!kernel.ok()) return kernel.status();
  const std::int32_t workers = limits.workers > 0 ? limits.workers : threads;
  return KernelChoice{.kernel = std::string(cpu::kernel_name(**kernel)),
                      .reason = name == "auto" ? "the fastest usable kernel that serves these formats" : "asked for",
                      .plan = cpu::plan_config(**kernel, problem, limits, policy, workers)};
}

cpu::QueryView query_view(const DecodeProblem& problem, const DecodeArgs& args) {
  const bool whole = args.q.rank != 0;
  const ConstTensorView& nope = whole ? args.q : args.q_nope;
  const ConstTensorView& rope = whole ? args.q : args.q_pe;
  // In the one tensor the rope part starts behind the latent part of the same row.
  const std::size_t skip = whole ? static_cast<std::size_t>(problem.latent) * dtype_bytes(problem.q_dtype) : 0;
  return {.nope = nope.bytes(),
          .rope = rope.bytes() + skip,
          .nope_width = problem.latent,
          .rope_width = problem.rope,
          .nope_token_stride = nope.stride[0],
          .nope_head_stride = nope.stride[1],
          .rope_token_stride = rope.stride[0],
          .rope_head_stride = rope.stride[1],
          .dtype = problem.q_dtype};
}

struct WorkspaceDelete {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{kWorkspaceAlignment}); }
};

class CpuStep final : public DecodeStep {
 public:
  // Nothing is filled: large limits cost address space, not memory.
  CpuStep(cpu::Workers& workers, const cpu::Kernel& kernel, const Builder& builder, std::int32_t* words,
          bool own_workspace)
      : workers_(workers), kernel_(kernel), builder_(builder), words_(builder.words.at(words)) {
    if (own_workspace) workspace_.reset(new (std::align_val_t{kWorkspaceAlignment}) std::byte[builder.workspace_bytes]);
  }

  // make_plan refuses before it writes, so the step planned before stays whole when it does.
  Result<DecodeWords::Parts> stage(Stream /*stream*/) override { return words_; }
  Status publish(const Plan& plan, const StepLengths& lengths, Stream /*stream*/) override {
    plan_ = plan;
    lengths_ = lengths;
    return {};
  }
  Status plan_on_device(const DeviceLengths& /*lengths*/, Stream /*stream*/) override {
    return unsupported("backend", "one with a device", "cpu");
  }
  Result<std::vector<std::int32_t>> copy_words(Stream /*stream*/) override {
    return std::vector<std::int32_t>(words_.plan.begin(), words_.plan.end());
  }

  Status run(const PlannedStep& /*step*/, const DecodeArgs& args) override {
    const cpu::DefaultFloatingPoint arithmetic;
    const DecodeProblem& problem = builder_.problem;
    const float q_scale = scale_of(args.q_scale);
    const float kv_scale = scale_of(args.kv_scale);
    const cpu::DecodeCall call{.kernel = &kernel_,
                               .plan = &plan_,
                               .heads = problem.heads,
                               .latent = problem.latent,
                               .rope = problem.rope,
                               .mask = problem.mask,
                               .lengths = lengths_,
                               .q = query_view(problem, args),
                               .kv = cache_view(args.kv_cache, problem.kv_format, args.pages),
                               .out = output_view<cpu::OutputView>(args.out, args.lse),
                               .score_scale = args.scale * q_scale * kv_scale,
                               .value_scale = kv_scale,
                               .workspace = args.workspace.empty() ? workspace_.get() : args.workspace.data()};
    cpu::run_decode(workers_, call);
    return {};
  }
  bool owns_workspace() const override { return workspace_ != nullptr; }
  Status take_finding() override { return {}; }

 private:
  cpu::Workers& workers_;
  const cpu::Kernel& kernel_;
  const Builder& builder_;
  const DecodeWords::Parts words_;
  std::unique_ptr<std::byte[], WorkspaceDelete> workspace_;  // null when the caller brings one
  Plan plan_;
  StepLengths lengths_;
};

}  // namespace

cpu::CacheView cache_view(const ConstTensorView& cache, KvFormat format, const PageTable& pages) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const bool lists = !pages.page_indptr.empty();
  return {.data = cache.bytes(),
          .page_stride_bytes = cache.stride[0] * element_bytes,
          .token_stride_bytes = cache.stride[1] * element_bytes,
          .page_size = static_cast<std::int32_t>(cache.shape[1]),
          .format = format,
          .pages = lists ? pages.page_indices.data() : pages.block_table,
          .row_stride = lists ? 0 : pages.block_table_stride,
          .indptr = lists ? pages.page_indptr.data() : nullptr};
}

MachineInfo CpuImpl::info() const {
  MachineInfo info{.backend = "cpu",
                   .processor = cpu::cpu_name(),
                   .threads = workers(),
                   .features = cpu::feature_text(),
                   .kernels = {}};
  for (const cpu::KernelListing& listing : cpu::kernels())
    info.kernels.push_back({.name = std::string(listing.name),
                            .usable = listing.usable,
                            .reason = listing.reason,
                            .serves = std::string(listing.serves)});
  return info;
}

Result<KernelChoice> CpuImpl::choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const {
  return choose_kernel(kernel_, problem, limits, policy, workers());
}

std::size_t CpuImpl::workspace_bytes(const DecodeProblem& problem, const PlanConfig& config,
                                     const PlanSizes& sizes) const {
  const auto kernel = find_kernel(kernel_, problem);
  return kernel.ok() ? cpu::workspace_bytes(**kernel, problem, config, sizes) : 0;
}

Result<std::unique_ptr<DecodeStep>> CpuImpl::make_step(const Builder& builder, const BuilderOptions& options,
                                                       std::int32_t* words) {
  const auto kernel = find_kernel(kernel_, builder.problem);
  if (!kernel.ok()) return kernel.status();
  return std::unique_ptr<DecodeStep>(
      std::make_unique<CpuStep>(workers_, **kernel, builder, words, options.own_workspace));
}

Status CpuImpl::merge(const MergeArgs& args) {
  const std::span<const Partial> partials = args.partials;
  // Context parallelism and chunked prefill join a handful; only more than that goes to the heap.
  std::array<cpu::MergePart, 32> few;
  std::vector<cpu::MergePart> many(partials.size() > few.size() ? partials.size() : 0);
  const std::span<cpu::MergePart> parts = many.empty() ? std::span(few).first(partials.size()) : std::span(many);
  for (std::size_t i = 0; i < partials.size(); ++i) parts[i] = merge_part<cpu::MergePart>(partials[i]);
  const TensorView& out = args.out;
  cpu::run_merge(workers_, parts, out.shape[0], static_cast<std::int32_t>(out.shape[1]),
                 static_cast<std::int32_t>(out.shape[2]), output_view<cpu::OutputView>(out, args.lse));
  return {};
}

Status CpuImpl::write_kv(const WriteKvArgs& args) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
  cpu::run_write_kv(workers_, {.kv_c = args.kv_c.bytes(),
                               .k_pe = args.k_pe.bytes(),
                               .kv_c_stride = args.kv_c.stride[0],
                               .k_pe_stride = args.k_pe.stride[0],
                               .dtype = args.kv_c.dtype,
                               .slots = args.slot_mapping,
                               .cache = args.kv_cache.bytes(),
                               .page_stride_bytes = args.kv_cache.stride[0] * element_bytes,
                               .token_stride_bytes = args.kv_cache.stride[1] * element_bytes,
                               .page_size = static_cast<std::int32_t>(args.kv_cache.shape[1]),
                               .latent = static_cast<std::int32_t>(args.kv_c.shape[1]),
                               .rope = static_cast<std::int32_t>(args.k_pe.shape[1]),
                               .format = args.kv_format,
                               .kv_scale = scale_of(args.kv_scale)});
  return {};
}

Result<Ceilings> CpuImpl::measure_ceilings(std::string_view kernel) {
  const auto listing = usable_kernel(kernel);
  if (!listing.ok()) return listing.status();
  const Result<cpu::MeasuredCeilings> measured = cpu::measure_ceilings(workers_, *(*listing)->kernel);
  if (!measured.ok()) return measured.status();
  return Ceilings{.read_gbps = measured->read_gbps, .tflops = measured->tflops};
}

Result<std::shared_ptr<Impl>> open_cpu(const BackendOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads)
    return invalid("threads", "0 .. " + text(kMaxThreads), text(options.threads));
  if (options.device != 0) return invalid("device", "0, as the cpu backend has no devices", text(options.device));
  if (options.kernel != "auto")
    if (auto listing = usable_kernel(options.kernel); !listing.ok()) return listing.status();
  const std::int32_t threads = options.threads > 0 ? options.threads : cpu::available_threads();
  try {
    return std::shared_ptr<Impl>(std::make_shared<CpuImpl>(threads, std::string(options.kernel)));
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "threads", "memory for " + text(threads) + " threads", "none");
  } catch (const std::system_error& error) {
    return Status(Code::out_of_memory, "threads", text(threads) + " threads from the system", error.what());
  }
}

Result<KernelChoice> choose_for_cpu(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                                    std::int32_t threads) {
  return choose_kernel("auto", problem, limits, policy, threads);
}

}  // namespace latte::backend
