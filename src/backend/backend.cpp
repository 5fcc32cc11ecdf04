#include "latte/backend.hpp"

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "backend/validate.hpp"

namespace latte {
namespace backend {
namespace {

Status check_choice_arguments(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                              std::int32_t workers) {
  LATTE_RETURN_IF_ERROR(validate_problem(problem));
  LATTE_RETURN_IF_ERROR(validate_limits(limits, workers));
  return validate_policy(policy);
}

// The limits may still ask for more than a plan can number.
Result<KernelChoice> with_checked_sizes(Result<KernelChoice> choice) {
  if (!choice.ok()) return choice;
  if (const auto sizes = plan_sizes(choice->plan); !sizes.ok()) return sizes.status();
  return choice;
}

}  // namespace
}  // namespace backend

Result<Backend> Backend::open(const BackendOptions& options) {
  const bool cuda = options.name == "cuda";
  if (!cuda && options.name != "cpu")
    return backend::unsupported("name", "cpu or cuda", "\"" + std::string(options.name) + "\"");
  auto impl = cuda ? backend::open_cuda(options) : backend::open_cpu(options);
  if (!impl.ok()) return impl.status();
  return Backend(std::move(*impl));
}

MachineInfo Backend::info() const { return impl_->info(); }

std::int32_t Backend::workers() const { return impl_->workers(); }

bool Backend::on_device() const { return impl_->place() == backend::Place::device; }

Support Backend::supports(const DecodeProblem& problem) const {
  // Limits decide which kernel runs, not whether one does.
  const auto choice = choose(problem, {.max_requests = 1, .max_kv_tokens = 1});
  if (!choice.ok()) return {.ok = false, .kernel = {}, .reason = choice.status().message()};
  return {.ok = true, .kernel = choice->kernel, .reason = {}};
}

Result<KernelChoice> Backend::choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const {
  LATTE_RETURN_IF_ERROR(backend::check_choice_arguments(problem, limits, policy, workers()));
  return backend::with_checked_sizes(impl_->choose(problem, limits, policy));
}

Result<PlanConfig> Backend::plan_config(const DecodeProblem& problem, const Limits& limits,
                                        const Policy& policy) const {
  const auto choice = choose(problem, limits, policy);
  if (!choice.ok()) return choice.status();
  return choice->plan;
}

Result<Ceilings> Backend::measure_ceilings(std::string_view kernel) const { return impl_->measure_ceilings(kernel); }

Status Backend::synchronize(Stream stream) const {
  LATTE_RETURN_IF_ERROR(backend::validate_stream(impl_->place(), stream));
  return impl_->synchronize(stream);
}

Result<KernelChoice> choose_for(const PlanTarget& target, const DecodeProblem& problem, const Limits& limits,
                                const Policy& policy) {
  if (target.workers < 1) return backend::invalid("workers", ">= 1", backend::text(target.workers));
  LATTE_RETURN_IF_ERROR(backend::check_choice_arguments(problem, limits, policy, target.workers));
  if (target.backend == "cuda")
    return backend::with_checked_sizes(backend::choose_for_cuda(problem, limits, policy, target.workers));
  if (target.backend == "cpu")
    return backend::with_checked_sizes(backend::choose_for_cpu(problem, limits, policy, target.workers));
  return backend::unsupported("backend", "cpu or cuda", "\"" + std::string(target.backend) + "\"");
}

}  // namespace latte
