// The public faces of the prefill builder and of what it builds.
#include <utility>

#include "backend/errors.hpp"
#include "backend/prefill_builder.hpp"
#include "backend/slots.hpp"
#include "core/within_memory.hpp"

namespace latte {
namespace {

const backend::PrefillBuilderImpl& empty_builder() {
  static const backend::PrefillBuilderImpl kEmpty;
  return kEmpty;
}

}  // namespace

// What metadata that was never built shows: no requests, no work, and readable counts.
const Plan& PrefillMetadata::plan() const { return slot_ ? slot_->plan : backend::empty_plan(); }
std::span<const std::int32_t> PrefillMetadata::query_start() const {
  return slot_ ? slot_->query_start : std::span<const std::int32_t>();
}
std::span<const std::int32_t> PrefillMetadata::kv_start() const {
  return slot_ ? slot_->kv_start : std::span<const std::int32_t>();
}
std::int32_t PrefillMetadata::chunks() const { return slot_ ? slot_->chunks : 0; }
const Plan& PrefillMetadata::chunk_plan(std::int32_t index) const {
  if (index < 0 || index >= chunks()) return backend::empty_plan();
  return slot_->chunk_slots[static_cast<std::size_t>(index)].plan;
}
const char* PrefillMetadata::kernel() const {
  return (slot_ ? *slot_->builder : empty_builder()).direct.choice.kernel.c_str();
}
PrefillMath PrefillMetadata::math() const { return (slot_ ? *slot_->builder : empty_builder()).direct.choice.math; }

Result<BuilderNeeds> PrefillBuilder::needs(const Backend& backend, const PrefillProblem& problem, const Limits& limits,
                                           const BuilderOptions& options) {
  return within_memory([&]() -> Result<BuilderNeeds> {
    const auto builder = backend::PrefillBuilderImpl::describe(backend, problem, limits, options);
    if (!builder.ok()) return builder.status();
    return (*builder)->needs();
  });
}

Result<PrefillBuilder> PrefillBuilder::create(const Backend& backend, const PrefillProblem& problem,
                                              const Limits& limits, const BuilderOptions& options) {
  return within_memory([&]() -> Result<PrefillBuilder> {
    auto builder = backend::PrefillBuilderImpl::describe(backend, problem, limits, options);
    if (!builder.ok()) return builder.status();
    LATTE_RETURN_IF_ERROR((*builder)->make_slots(options));
    return PrefillBuilder(std::move(*builder));
  });
}

PrefillBuilder::PrefillBuilder(std::unique_ptr<backend::PrefillBuilderImpl> impl) : impl_(std::move(impl)) {}
PrefillBuilder::PrefillBuilder(PrefillBuilder&&) noexcept = default;
PrefillBuilder& PrefillBuilder::operator=(PrefillBuilder&&) noexcept = default;
PrefillBuilder::~PrefillBuilder() = default;

Result<PrefillMetadata> PrefillBuilder::build(std::int32_t slot, const PrefillLengths& lengths, Stream stream) {
  return within_memory([&]() -> Result<PrefillMetadata> {
    if (impl_ == nullptr) return backend::moved_from();
    return impl_->build(slot, lengths, stream);
  });
}

Status PrefillBuilder::init_workspace(std::span<std::byte> workspace, Stream stream) const {
  if (impl_ == nullptr) return backend::moved_from();
  LATTE_RETURN_IF_ERROR(backend::validate_stream(impl_->backend->impl().place(), stream));
  LATTE_RETURN_IF_ERROR(
      backend::validate_workspace(workspace, impl_->workspaces.bytes, backend::kPrefillWorkspaceAlignment));
  return impl_->init_workspace(workspace.data(), stream);
}

std::size_t PrefillBuilder::workspace_bytes() const { return impl_ ? impl_->workspaces.bytes : 0; }
const PlanConfig& PrefillBuilder::plan_config() const { return (impl_ ? *impl_ : empty_builder()).direct.choice.plan; }
const PlanSizes& PrefillBuilder::plan_sizes() const { return (impl_ ? *impl_ : empty_builder()).direct.sizes; }
const char* PrefillBuilder::kernel() const { return (impl_ ? *impl_ : empty_builder()).direct.choice.kernel.c_str(); }
PrefillMath PrefillBuilder::math() const { return (impl_ ? *impl_ : empty_builder()).direct.choice.math; }
const std::string& PrefillBuilder::reason() const { return (impl_ ? *impl_ : empty_builder()).direct.choice.reason; }
std::int32_t PrefillBuilder::chunk_tokens() const { return impl_ ? impl_->context.chunk_tokens : 0; }

}  // namespace latte
