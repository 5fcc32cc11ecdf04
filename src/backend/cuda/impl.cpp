#include "backend/cuda/impl.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "backend/errors.hpp"
#include "backend/views.hpp"
#include "core/checked.hpp"
#include "cuda/sm90/decode/choice.hpp"
#include "cuda/sm90/prefill/choice.hpp"

namespace latte::backend {
namespace {

std::vector<KernelInfo> list_kernels() {
  std::vector<KernelInfo> kernels;
  for (const char* name : cuda::decode_kernel_names())
    kernels.push_back({.name = name, .usable = true, .reason = {}, .serves = "bf16, f16"});
  for (Dtype dtype : {Dtype::fp8_e4m3, Dtype::bf16, Dtype::f16})
    kernels.push_back({.name = cuda::kernel_name(cuda::PrefillKernel{dtype}),
                       .usable = true,
                       .reason = {},
                       .serves = "prefill, " + std::string(dtype_name(dtype))});
  return kernels;
}

}  // namespace

MachineInfo CudaImpl::info() const {
  const cuda::DeviceInfo& gpu = device_->info();
  return {.backend = "cuda",
          .processor = gpu.name,
          .threads = gpu.multiprocessors,
          .features = gpu.features,
          .kernels = list_kernels(),
          .device = gpu.name,
          .driver = gpu.driver};
}

Result<KernelChoice> choose_for_cuda(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                                     std::int32_t multiprocessors) {
  auto choice = cuda::choose_decode(problem, limits, policy, multiprocessors);
  if (!choice.ok()) return choice.status();
  return KernelChoice{
      .kernel = cuda::kernel_name(choice->kernel), .reason = std::move(choice->reason), .plan = choice->config};
}

Result<KernelChoice> CudaImpl::choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const {
  return choose_for_cuda(problem, limits, policy, workers());
}

std::size_t arrived_bytes(const PlanSizes& sizes) {
  return static_cast<std::size_t>(round_up(2 * sizes.tiles * static_cast<std::int64_t>(sizeof(std::uint32_t)), 256));
}

cuda::DecodeWorkspace carve_workspace(const PlanSizes& sizes, std::int32_t latent, std::byte* base) {
  std::byte* const values = base + arrived_bytes(sizes);
  return {.arrived = reinterpret_cast<std::uint32_t*>(base),
          .values = values,
          .tails = values + sizes.partial_rows * 2 * latent};
}

std::size_t CudaImpl::workspace_bytes(const DecodeProblem& problem, const PlanConfig& /*config*/,
                                      const PlanSizes& sizes) const {
  const std::int64_t partial_bytes = sizes.partial_rows * cuda::DecodeWorkspace::row_bytes(problem.latent);
  return arrived_bytes(sizes) + static_cast<std::size_t>(round_up(partial_bytes, 256));
}

Result<std::unique_ptr<DecodeStep>> CudaImpl::make_step(const Builder& builder, const BuilderOptions& options,
                                                        std::int32_t* words) {
  auto choice = cuda::choose_decode(builder.problem, builder.limits, builder.config.policy, workers());
  if (!choice.ok()) return choice.status();
  if (serial_launches_) choice->kernel.dependent_launch = false;
  LATTE_RETURN_IF_ERROR(device_->prepare(choice->kernel));
  auto step = std::make_unique<CudaStep>(*this, builder, choice->kernel);
  LATTE_RETURN_IF_ERROR(step->allocate(words, options));
  return std::unique_ptr<DecodeStep>(std::move(step));
}

Status CudaImpl::init_workspace(const Builder& builder, std::span<std::byte> workspace, Stream stream) {
  return device_->clear(workspace.data(), arrived_bytes(builder.sizes), stream);
}

Status CudaImpl::merge(const MergeArgs& args) {
  std::array<cuda::MergePart, cuda::kMaxMergeParts> parts;
  std::transform(args.partials.begin(), args.partials.end(), parts.begin(), merge_part<cuda::MergePart>);
  return device_->merge({.parts = std::span(parts).first(args.partials.size()),
                         .tokens = args.out.shape[0],
                         .heads = static_cast<std::int32_t>(args.out.shape[1]),
                         .latent = static_cast<std::int32_t>(args.out.shape[2]),
                         .out = output_view<cuda::OutputView>(args.out, args.lse)},
                        args.stream);
}

Status CudaImpl::write_kv(const WriteKvArgs& args) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
  return device_->write_kv({.kv_c = args.kv_c.data,
                            .k_pe = args.k_pe.data,
                            .kv_c_stride = args.kv_c.stride[0],
                            .k_pe_stride = args.k_pe.stride[0],
                            .dtype = args.kv_c.dtype,
                            .slots = args.slot_mapping.data(),
                            .tokens = static_cast<std::int64_t>(args.slot_mapping.size()),
                            .cache = args.kv_cache.data,
                            .page_stride_bytes = args.kv_cache.stride[0] * element_bytes,
                            .token_stride_bytes = args.kv_cache.stride[1] * element_bytes,
                            .page_count = args.kv_cache.shape[0],
                            .page_size = static_cast<std::int32_t>(args.kv_cache.shape[1]),
                            .latent = static_cast<std::int32_t>(args.kv_c.shape[1]),
                            .rope = static_cast<std::int32_t>(args.k_pe.shape[1]),
                            .format = args.kv_format,
                            .kv_scale = args.kv_scale},
                           args.stream);
}

Result<Ceilings> CudaImpl::measure_ceilings(std::string_view kernel) {
  std::string names;
  for (const KernelInfo& known : list_kernels()) {
    if (known.name == kernel)
      return device_->measure_ceilings(kernel == cuda::kernel_name(cuda::PrefillKernel{Dtype::fp8_e4m3}));
    names += (names.empty() ? "" : ", ") + known.name;
  }
  return invalid("kernel", "one of " + names, "\"" + std::string(kernel) + "\"");
}

Status CudaImpl::synchronize(Stream stream) {
  LATTE_RETURN_IF_ERROR(device_->synchronize(stream));
  const std::lock_guard<std::mutex> lock(findings_mutex_);
  for (Findings* findings : findings_) LATTE_RETURN_IF_ERROR(findings->take());
  return {};
}

Result<std::shared_ptr<Impl>> open_cuda(const BackendOptions& options) {
  if (options.threads != 0) return invalid("threads", "0, as the cuda backend has none", text(options.threads));
  if (options.kernel != "auto")
    return unsupported("kernel", "auto: heads and limits choose the cuda kernel",
                       "\"" + std::string(options.kernel) + "\"");
  auto device = cuda::open_device(options.device);
  if (!device.ok()) return device.status();
  return std::shared_ptr<Impl>(std::make_shared<CudaImpl>(std::move(*device), options.serial_launches));
}

Status DeviceBuffer::allocate(cuda::Device& device, std::size_t bytes, cuda::Memory where) {
  auto memory = device.allocate(bytes, where);
  if (!memory.ok()) return memory.status();
  device_ = &device;
  data_ = *memory;
  where_ = where;
  return {};
}

}  // namespace latte::backend
