#include <algorithm>
#include <array>
#include <utility>

#include "backend/builder.hpp"
#include "backend/errors.hpp"
#include "plan/layout.hpp"

namespace latte {
namespace backend {
namespace {

constexpr std::int32_t kMaxSlots = 1024;

void allocate(Slot& slot, const Builder& builder, bool own_workspace) {
  const Limits limits = plan::resolve(builder.config.limits);
  const std::int64_t lengths = 2 * std::int64_t{limits.max_requests} + 1 + limits.max_total_query_tokens;
  slot.builder = &builder;
  // Not filled: large limits cost address space, not memory.
  slot.plan_words = std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(builder.sizes.words));
  slot.length_words = std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(lengths));
  if (own_workspace)
    slot.workspace.reset(new (std::align_val_t{kWorkspaceAlignment}) std::byte[builder.workspace_bytes]);
}

}  // namespace

Result<std::unique_ptr<Builder>> Builder::create(const Backend& backend, const PlanConfig& config,
                                                 const DecodeProblem& problem, const BuilderOptions& options) {
  if (options.slots < 1 || options.slots > kMaxSlots)
    return invalid("options.slots", "1 .. " + text(kMaxSlots), text(options.slots));
  const auto kernel = find_kernel(backend.impl(), problem);
  if (!kernel.ok()) return kernel.status();
  const auto sizes = latte::plan_sizes(config);
  if (!sizes.ok()) return sizes.status();
  try {
    auto builder = std::make_unique<Builder>();
    builder->backend = backend;
    builder->kernel = *kernel;
    builder->kernel_name = cpu::kernel_name(**kernel);
    builder->problem = problem;
    builder->config = config;
    builder->sizes = *sizes;
    builder->workspace_bytes = cpu::workspace_bytes(**kernel, problem, config, *sizes);
    builder->slot_count_ = options.slots;
    builder->slots_ = std::make_unique<Slot[]>(static_cast<std::size_t>(options.slots));
    for (std::int32_t i = 0; i < options.slots; ++i)
      allocate(builder->slots_[static_cast<std::size_t>(i)], *builder, options.own_workspace);
    return builder;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "limits", "buffers that fit this machine's memory",
                  text(options.slots) + " slots of " + text(sizes->words) + " plan words and their workspace");
  }
}

DecodeMetadata Builder::metadata_of(Slot* slot, std::uint64_t generation) {
  DecodeMetadata metadata;
  metadata.slot_ = slot;
  metadata.generation_ = generation;
  return metadata;
}

PlannedStep Builder::planned_step(const Slot& slot) const {
  return {.problem = problem,
          .seq_lens = slot.seq_lens,
          .query_start = slot.query_start,
          .visible = slot.visible,
          .workspace_bytes = workspace_bytes,
          .owns_workspace = slot.workspace != nullptr};
}

void Builder::copy_lengths(Slot& slot, const StepLengths& lengths) const {
  std::int32_t* at = slot.length_words.get();
  const auto keep = [&](std::span<const std::int32_t> values) {
    std::int32_t* begin = at;
    at = std::copy(values.begin(), values.end(), begin);
    return std::span<const std::int32_t>(begin, values.size());
  };
  slot.seq_lens = keep(lengths.seq_lens);
  slot.query_start = keep(lengths.query_start);
  slot.visible = keep(lengths.visible);
}

Result<DecodeMetadata> Builder::build(std::int32_t slot_index, const StepLengths& lengths) {
  if (slot_index < 0 || slot_index >= slot_count_)
    return invalid("slot", "0 .. " + text(slot_count_ - 1), text(slot_index));
  LATTE_RETURN_IF_ERROR(validate_lengths(lengths));
  Slot& slot = slots_[static_cast<std::size_t>(slot_index)];

  // While the arrays change hands nobody may run them: a decode of the old step now says stale_metadata.
  const std::uint64_t before = slot.generation.exchange(0);
  const auto plan = make_plan(config, lengths, {slot.plan_words.get(), static_cast<std::size_t>(sizes.words)});
  if (!plan.ok()) {
    // make_plan refuses before it writes, so the step planned before is still whole.
    slot.generation.store(before);
    return plan.status();
  }
  copy_lengths(slot, lengths);
  slot.plan = *plan;
  slot.generation.store(++slot.builds);
  return metadata_of(&slot, slot.builds);
}

Status check_current(const DecodeMetadata& metadata) {
  const Slot* slot = Builder::slot_of(metadata);
  if (slot == nullptr) return invalid("metadata", "what a builder's build() returned", "one that was never built");
  const std::uint64_t current = slot->generation.load();
  if (current == metadata.generation() && current != 0) return {};
  return {Code::stale_metadata, "metadata", "generation " + text(current) + ", which its slot holds now",
          "generation " + text(metadata.generation())};
}

}  // namespace backend

namespace {

const backend::Builder& empty_builder() {
  static const backend::Builder kEmpty;
  return kEmpty;
}

// What metadata that was never built shows: no requests, no work, and readable counts.
const backend::Slot& empty_slot() {
  static const std::array<std::int32_t, kMetaFields> kZeros{};
  static backend::Slot slot;
  static const bool filled = [] {
    slot.builder = &empty_builder();
    slot.plan.work_meta_data = kZeros;
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
const char* DecodeMetadata::kernel() const { return slot_or_empty(slot_).builder->kernel_name.c_str(); }

Result<MetadataBuilder> MetadataBuilder::create(const Backend& backend, const DecodeProblem& problem,
                                                const Limits& limits, const BuilderOptions& options) {
  const auto config = backend.plan_config(problem, limits, options.policy);
  if (!config.ok()) return config.status();
  auto builder = backend::Builder::create(backend, *config, problem, options);
  if (!builder.ok()) return builder.status();
  return MetadataBuilder(std::move(*builder));
}

MetadataBuilder::MetadataBuilder(std::unique_ptr<backend::Builder> impl) : impl_(std::move(impl)) {}
MetadataBuilder::MetadataBuilder(MetadataBuilder&&) noexcept = default;
MetadataBuilder& MetadataBuilder::operator=(MetadataBuilder&&) noexcept = default;
MetadataBuilder::~MetadataBuilder() = default;

Result<DecodeMetadata> MetadataBuilder::build(std::int32_t slot, const StepLengths& lengths) {
  if (impl_ == nullptr)
    return backend::invalid("builder", "a builder that owns its buffers", "one that was moved from");
  return impl_->build(slot, lengths);
}

std::size_t MetadataBuilder::workspace_bytes() const { return impl_ ? impl_->workspace_bytes : 0; }
const PlanConfig& MetadataBuilder::plan_config() const { return (impl_ ? *impl_ : empty_builder()).config; }
const PlanSizes& MetadataBuilder::plan_sizes() const { return (impl_ ? *impl_ : empty_builder()).sizes; }
const char* MetadataBuilder::kernel() const { return (impl_ ? *impl_ : empty_builder()).kernel_name.c_str(); }

}  // namespace latte
