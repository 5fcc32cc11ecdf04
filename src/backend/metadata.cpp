// The public faces of the decode builder and of what it builds.
#include <utility>

#include "backend/builder.hpp"
#include "backend/errors.hpp"
#include "backend/slots.hpp"
#include "core/within_memory.hpp"

namespace latte {
namespace {

const backend::Builder& empty_builder() {
  static const backend::Builder kEmpty;
  return kEmpty;
}

// What metadata that was never built shows: no requests, no work, and readable counts.
const backend::Slot& empty_slot() {
  static backend::Slot slot;
  static const bool filled = [] {
    slot.builder = &empty_builder();
    slot.plan = backend::empty_plan();
    return true;
  }();
  static_cast<void>(filled);
  return slot;
}

const backend::Slot& slot_or_empty(const backend::Slot* slot) { return slot != nullptr ? *slot : empty_slot(); }

}  // namespace

const DecodeProblem& DecodeMetadata::problem() const { return slot_or_empty(slot_).builder->problem; }
const Plan& DecodeMetadata::plan() const { return slot_or_empty(slot_).plan; }
const PlanConfig& DecodeMetadata::plan_config() const { return slot_or_empty(slot_).builder->config; }
std::span<const std::int32_t> DecodeMetadata::seq_lens() const { return slot_or_empty(slot_).seq_lens; }
std::span<const std::int32_t> DecodeMetadata::query_start() const { return slot_or_empty(slot_).query_start; }
std::span<const std::int32_t> DecodeMetadata::visible() const { return slot_or_empty(slot_).visible; }
bool DecodeMetadata::on_device() const { return slot_or_empty(slot_).device_requests >= 0; }
const char* DecodeMetadata::kernel() const { return slot_or_empty(slot_).builder->kernel_name.c_str(); }

Result<BuilderNeeds> MetadataBuilder::needs(const Backend& backend, const DecodeProblem& problem, const Limits& limits,
                                            const BuilderOptions& options) {
  return within_memory([&]() -> Result<BuilderNeeds> {
    const auto builder = backend::Builder::describe(backend, problem, limits, options);
    if (!builder.ok()) return builder.status();
    return (*builder)->needs();
  });
}

Result<MetadataBuilder> MetadataBuilder::create(const Backend& backend, const DecodeProblem& problem,
                                                const Limits& limits, const BuilderOptions& options) {
  return within_memory([&]() -> Result<MetadataBuilder> {
    auto builder = backend::Builder::describe(backend, problem, limits, options);
    if (!builder.ok()) return builder.status();
    LATTE_RETURN_IF_ERROR((*builder)->make_slots(options));
    return MetadataBuilder(std::move(*builder));
  });
}

MetadataBuilder::MetadataBuilder(std::unique_ptr<backend::Builder> impl) : impl_(std::move(impl)) {}
MetadataBuilder::MetadataBuilder(MetadataBuilder&&) noexcept = default;
MetadataBuilder& MetadataBuilder::operator=(MetadataBuilder&&) noexcept = default;
MetadataBuilder::~MetadataBuilder() = default;

Result<DecodeMetadata> MetadataBuilder::build(std::int32_t slot, const StepLengths& lengths, Stream stream) {
  return within_memory([&]() -> Result<DecodeMetadata> {
    if (impl_ == nullptr) return backend::moved_from();
    return impl_->build(slot, lengths, stream);
  });
}

Result<DecodeMetadata> MetadataBuilder::build_on_device(std::int32_t slot, const DeviceLengths& lengths,
                                                        Stream stream) {
  return within_memory([&]() -> Result<DecodeMetadata> {
    if (impl_ == nullptr) return backend::moved_from();
    return impl_->build_on_device(slot, lengths, stream);
  });
}

Result<OwnedPlan> MetadataBuilder::copy_plan(const DecodeMetadata& metadata, Stream stream) const {
  return within_memory([&]() -> Result<OwnedPlan> {
    LATTE_RETURN_IF_ERROR(backend::check_current(metadata));
    const backend::Slot& slot = *metadata.slot_;
    LATTE_RETURN_IF_ERROR(backend::validate_stream(slot.builder->backend->impl().place(), stream));
    auto words = slot.memory->copy_words(stream);
    if (!words.ok()) return words.status();
    return OwnedPlan::take(std::move(*words));
  });
}

Status MetadataBuilder::init_workspace(std::span<std::byte> workspace, Stream stream) const {
  if (impl_ == nullptr) return backend::moved_from();
  backend::Impl& impl = impl_->backend->impl();
  LATTE_RETURN_IF_ERROR(backend::validate_stream(impl.place(), stream));
  LATTE_RETURN_IF_ERROR(backend::validate_workspace(workspace, impl_->workspace_bytes));
  return impl.init_workspace(*impl_, workspace, stream);
}

std::size_t MetadataBuilder::workspace_bytes() const { return impl_ ? impl_->workspace_bytes : 0; }
const PlanConfig& MetadataBuilder::plan_config() const { return (impl_ ? *impl_ : empty_builder()).config; }
const PlanSizes& MetadataBuilder::plan_sizes() const { return (impl_ ? *impl_ : empty_builder()).sizes; }
const std::string& MetadataBuilder::reason() const { return (impl_ ? *impl_ : empty_builder()).reason; }
const char* MetadataBuilder::kernel() const { return (impl_ ? *impl_ : empty_builder()).kernel_name.c_str(); }

}  // namespace latte
