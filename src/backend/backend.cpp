#include "latte/backend.hpp"

#include <new>
#include <system_error>

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "backend/validate.hpp"

namespace latte {
namespace backend {
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

}  // namespace

Result<const cpu::Kernel*> find_kernel(const Impl& impl, const DecodeProblem& problem) {
  std::string reason;
  const cpu::Kernel* kernel = cpu::choose_kernel(problem, impl.kernel, reason);
  if (kernel == nullptr) return unsupported("problem", "one that kernel " + impl.kernel + " serves", reason);
  return kernel;
}

}  // namespace backend

Result<Backend> Backend::open(const BackendOptions& options) {
  if (options.name == "cuda") return backend::unsupported("name", "cpu", "cuda, which is not in this build");
  if (options.name != "cpu") return backend::unsupported("name", "cpu", "\"" + std::string(options.name) + "\"");
  if (options.threads < 0 || options.threads > backend::kMaxThreads)
    return backend::invalid("threads", "0 .. " + backend::text(backend::kMaxThreads), backend::text(options.threads));
  if (options.kernel != "auto")
    if (auto listing = backend::usable_kernel(options.kernel); !listing.ok()) return listing.status();

  const std::int32_t threads = options.threads > 0 ? options.threads : cpu::available_threads();
  try {
    return Backend(std::make_shared<backend::Impl>(threads, std::string(options.kernel)));
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "threads", "memory for " + backend::text(threads) + " threads", "none");
  } catch (const std::system_error& error) {
    return Status(Code::out_of_memory, "threads", backend::text(threads) + " threads from the system", error.what());
  }
}

MachineInfo Backend::info() const {
  MachineInfo info{
      .backend = "cpu", .cpu = cpu::cpu_name(), .threads = workers(), .features = cpu::feature_text(), .kernels = {}};
  for (const cpu::KernelListing& listing : cpu::kernels())
    info.kernels.push_back({.name = std::string(listing.name),
                            .usable = listing.usable,
                            .reason = listing.reason,
                            .serves = std::string(listing.serves)});
  return info;
}

std::int32_t Backend::workers() const { return impl_->workers.count(); }

Support Backend::supports(const DecodeProblem& problem) const {
  const auto no = [](const Status& why) { return Support{.ok = false, .kernel = {}, .reason = why.message()}; };
  if (const Status status = backend::validate_problem(problem); !status.ok()) return no(status);
  const auto kernel = backend::find_kernel(*impl_, problem);
  if (!kernel.ok()) return no(kernel.status());
  return {.ok = true, .kernel = std::string(cpu::kernel_name(**kernel)), .reason = {}};
}

Result<PlanConfig> Backend::plan_config(const DecodeProblem& problem, const Limits& limits,
                                        const Policy& policy) const {
  LATTE_RETURN_IF_ERROR(backend::validate_problem(problem));
  LATTE_RETURN_IF_ERROR(backend::validate_limits(limits, workers()));
  LATTE_RETURN_IF_ERROR(backend::validate_policy(policy));
  const auto kernel = backend::find_kernel(*impl_, problem);
  if (!kernel.ok()) return kernel.status();
  const std::int32_t planned_workers = limits.workers > 0 ? limits.workers : workers();
  const PlanConfig config = cpu::plan_config(**kernel, problem, limits, policy, planned_workers);
  // The limits may still ask for more than a plan can number.
  if (const auto sizes = plan_sizes(config); !sizes.ok()) return sizes.status();
  return config;
}

Result<Ceilings> Backend::measure_ceilings(std::string_view kernel) const {
  const auto listing = backend::usable_kernel(kernel);
  if (!listing.ok()) return listing.status();
  const cpu::MeasuredCeilings measured = cpu::measure_ceilings(impl_->workers, *(*listing)->kernel);
  return Ceilings{.read_gbps = measured.read_gbps, .tflops = measured.tflops};
}

}  // namespace latte
