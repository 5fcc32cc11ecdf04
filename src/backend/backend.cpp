#include "latte/backend.hpp"

#include <algorithm>

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "backend/validate/validate.hpp"
#include "core/checked.hpp"
#include "core/within_memory.hpp"
#include "plan/layout.hpp"

namespace latte {
namespace backend {
namespace {

template <class Problem>
Status check_choice_arguments(const Problem& problem, const Limits& limits, const Policy& policy,
                              std::int32_t workers) {
  LATTE_RETURN_IF_ERROR(validate_problem(problem));
  LATTE_RETURN_IF_ERROR(validate_limits(limits, workers));
  return validate_policy(policy);
}

// The limits may still ask for more than a plan can number. Chunks are of whole blocks: the planner rounds them up, and
// whoever looks should see what is planned.
template <class Choice>
Result<Choice> completed(Result<Choice> choice) {
  if (!choice.ok()) return choice;
  PlanConfig& plan = choice->plan;
  if (const auto sizes = plan_sizes(plan); !sizes.ok()) return sizes.status();
  if (plan.policy.kind == PolicyKind::batch_invariant)
    plan.policy.n = static_cast<std::int32_t>(
        std::min<std::int64_t>(round_up(plan.policy.n, plan.kv_block), INT32_MAX / plan.kv_block * plan.kv_block));
  return choice;
}

// Limits decide which kernel runs, not whether one does.
template <class Problem>
Support support_of(const Backend& backend, const Problem& problem) {
  const auto choice = backend.choose(problem, {.max_requests = 1, .max_kv_tokens = 1});
  if (!choice.ok()) return {.ok = false, .kernel = {}, .reason = choice.status().message()};
  return {.ok = true, .kernel = choice->kernel, .reason = {}};
}

template <class Choice, class Problem>
Result<Choice> choose_anywhere(const PlanTarget& target, const Problem& problem, const Limits& limits,
                               const Policy& policy) {
  if (target.workers < 1 || target.workers > plan::kMaxWorkers)
    return invalid("workers", "1 to " + text(plan::kMaxWorkers), text(target.workers));
  LATTE_RETURN_IF_ERROR(check_choice_arguments(problem, limits, policy, target.workers));
  if (target.backend == "cuda") return completed(choose_for_cuda(problem, limits, policy, target.workers));
  if (target.backend == "cpu") return completed(choose_for_cpu(problem, limits, policy, target.workers));
  return unsupported("backend", "cpu or cuda", "\"" + std::string(target.backend) + "\"");
}

}  // namespace
}  // namespace backend

Result<Backend> Backend::open(const BackendOptions& options) {
  return within_memory([&]() -> Result<Backend> {
    if (options.name == "auto") {
      BackendOptions device = options, host = options;
      device.name = "cuda";
      device.threads = 0;
      host.name = "cpu";
      host.device = 0;
      auto opened = open(device);
      // No GPU is a reason to go on without one; a wrong number for one is an error.
      if (opened.ok() || opened.status().code() == Code::invalid_argument) return opened;
      auto instead = open(host);
      if (instead.ok()) instead->impl_->note = "cuda cannot be opened: " + opened.status().message();
      return instead;
    }
    const bool cuda = options.name == "cuda";
    if (!cuda && options.name != "cpu")
      return backend::unsupported("name", "cpu, cuda or auto", "\"" + std::string(options.name) + "\"");
    auto impl = cuda ? backend::open_cuda(options) : backend::open_cpu(options);
    if (!impl.ok()) return impl.status();
    return Backend(std::move(*impl));
  });
}

MachineInfo Backend::info() const {
  MachineInfo info = impl_->info();
  info.note = impl_->note;
  return info;
}

std::int32_t Backend::workers() const { return impl_->workers(); }

bool Backend::on_device() const { return impl_->place() == backend::Place::device; }

Support Backend::supports(const DecodeProblem& problem) const { return backend::support_of(*this, problem); }

Support Backend::supports(const PrefillProblem& problem) const { return backend::support_of(*this, problem); }

Result<KernelChoice> Backend::choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const {
  return within_memory([&]() -> Result<KernelChoice> {
    LATTE_RETURN_IF_ERROR(backend::check_choice_arguments(problem, limits, policy, workers()));
    return backend::completed(impl_->choose(problem, limits, policy));
  });
}

Result<PrefillChoice> Backend::choose(const PrefillProblem& problem, const Limits& limits, const Policy& policy) const {
  return within_memory([&]() -> Result<PrefillChoice> {
    LATTE_RETURN_IF_ERROR(backend::check_choice_arguments(problem, limits, policy, workers()));
    return backend::completed(impl_->choose(problem, limits, policy));
  });
}

Result<Ceilings> Backend::measure_ceilings(std::string_view kernel) const { return impl_->measure_ceilings(kernel); }

Status Backend::synchronize(Stream stream) const {
  LATTE_RETURN_IF_ERROR(backend::validate_stream(impl_->place(), stream));
  return impl_->synchronize(stream);
}

Result<KernelChoice> choose_for(const PlanTarget& target, const DecodeProblem& problem, const Limits& limits,
                                const Policy& policy) {
  return within_memory([&] { return backend::choose_anywhere<KernelChoice>(target, problem, limits, policy); });
}

Result<PrefillChoice> choose_for(const PlanTarget& target, const PrefillProblem& problem, const Limits& limits,
                                 const Policy& policy) {
  return within_memory([&] { return backend::choose_anywhere<PrefillChoice>(target, problem, limits, policy); });
}

}  // namespace latte
