#include "backend/builder.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "backend/errors.hpp"
#include "backend/slots.hpp"
#include "plan/layout.hpp"

namespace latte::backend {

Result<std::unique_ptr<Builder>> Builder::describe(const Backend& backend, const DecodeProblem& problem,
                                                   const Limits& limits, const BuilderOptions& options) {
  const auto choice = backend.choose(problem, limits, options.policy);
  if (!choice.ok()) return choice.status();
  LATTE_RETURN_IF_ERROR(check_slot_count(options.slots));
  const auto sizes = latte::plan_sizes(choice->plan);
  if (!sizes.ok()) return sizes.status();
  auto builder = std::make_unique<Builder>();
  builder->backend = backend;
  builder->kernel_name = choice->kernel;
  builder->reason = choice->reason;
  builder->problem = problem;
  builder->limits = limits;
  builder->config = choice->plan;
  builder->sizes = *sizes;
  builder->words = DecodeWords(choice->plan, *sizes);
  builder->workspace_bytes = backend.impl().workspace_bytes(problem, choice->plan, *sizes);
  builder->slot_count_ = options.slots;
  return builder;
}

BuilderNeeds Builder::needs() const {
  // At most 1024 slots of less than 2^34 words: far from 2^64.
  const std::size_t plan_bytes = static_cast<std::size_t>(slot_count_) * words.count * sizeof(std::int32_t);
  return {.plan = {.name = "decode plan", .bytes = plan_bytes, .alignment = kPlanAlignment},
          .workspace = {.name = "decode", .bytes = workspace_bytes, .alignment = kWorkspaceAlignment}};
}

Status Builder::make_slots(const BuilderOptions& options) {
  auto memory = PlanMemory::make(*backend, options.plan_memory, needs().plan.bytes);
  if (!memory.ok()) return memory.status();
  plan_memory_ = std::move(*memory);
  try {
    slots_ = std::make_unique<Slot[]>(static_cast<std::size_t>(slot_count_));
    for (Slot& slot : std::span(slots_.get(), static_cast<std::size_t>(slot_count_))) {
      slot.builder = this;
      auto step = backend->impl().make_step(*this, options, plan_memory_.take(words.count));
      if (!step.ok()) return step.status();
      slot.memory = std::move(*step);
    }
    return {};
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, "limits", "buffers that fit this machine's memory",
            text(slot_count_) + " slots with a workspace of " + text(workspace_bytes) + " bytes"};
  }
}

DecodeMetadata Builder::metadata_of(Slot* slot, std::uint64_t generation) {
  DecodeMetadata metadata;
  metadata.slot_ = slot;
  metadata.generation_ = generation;
  return metadata;
}

PlannedStep Builder::planned_step(const Slot& slot) const {
  const bool on_device = slot.device_requests >= 0;
  return {.problem = problem,
          .seq_lens = slot.seq_lens,
          .query_start = slot.query_start,
          .visible = slot.visible,
          .workspace_bytes = workspace_bytes,
          .owns_workspace = slot.memory->owns_workspace(),
          .place = backend->impl().place(),
          .planned_on_device = on_device,
          .device_requests = on_device ? slot.device_requests : 0,
          .device_tokens = slot.device_tokens};
}

Status Builder::take_finding() const {
  for (std::int32_t i = 0; i < slot_count_; ++i)
    LATTE_RETURN_IF_ERROR(slots_[static_cast<std::size_t>(i)].memory->take_finding());
  return {};
}

Result<Slot*> Builder::find_slot(std::int32_t index) const {
  LATTE_RETURN_IF_ERROR(check_slot_index(index, slot_count_));
  return &slots_[static_cast<std::size_t>(index)];
}

Result<DecodeMetadata> Builder::build(std::int32_t slot_index, const StepLengths& lengths, Stream stream) {
  const auto found = find_slot(slot_index);
  if (!found.ok()) return found.status();
  LATTE_RETURN_IF_ERROR(validate_stream(backend->impl().place(), stream));
  LATTE_RETURN_IF_ERROR(validate_lengths(lengths));
  LATTE_RETURN_IF_ERROR(take_finding());
  Slot& slot = **found;
  const auto staging = slot.memory->stage(stream);
  if (!staging.ok()) return staging.status();

  // While the arrays change hands nobody may run them: a decode of the old step now says stale_metadata.
  const std::uint64_t before = slot.generation.exchange(0);
  const auto plan = make_plan(config, lengths, staging->plan);
  if (!plan.ok()) {
    // make_plan refuses before it writes, so the step planned before is still whole.
    slot.generation.store(before);
    return plan.status();
  }
  const auto keep = [](std::span<const std::int32_t> values, std::int32_t* to) {
    std::copy(values.begin(), values.end(), to);
    return std::span<const std::int32_t>(to, values.size());
  };
  slot.seq_lens = keep(lengths.seq_lens, staging->seq_lens);
  slot.query_start = keep(lengths.query_start, staging->query_start);
  slot.visible = keep(lengths.visible, staging->visible);
  slot.plan = *plan;
  slot.device_requests = -1;
  LATTE_RETURN_IF_ERROR(slot.memory->publish(
      slot.plan, {.seq_lens = slot.seq_lens, .query_start = slot.query_start, .visible = slot.visible}, stream));
  slot.generation.store(++slot.builds);
  return metadata_of(&slot, slot.builds);
}

Result<DecodeMetadata> Builder::build_on_device(std::int32_t slot_index, const DeviceLengths& lengths, Stream stream) {
  const auto found = find_slot(slot_index);
  if (!found.ok()) return found.status();
  if (backend->impl().place() == Place::host) return unsupported("backend", "one with a device", "cpu");
  LATTE_RETURN_IF_ERROR(validate_device_lengths(lengths, plan::resolve(config.limits)));
  LATTE_RETURN_IF_ERROR(take_finding());
  Slot& slot = **found;
  slot.generation.store(0);
  LATTE_RETURN_IF_ERROR(slot.memory->plan_on_device(lengths, stream));
  slot.plan = empty_plan();  // it is not on the host
  slot.seq_lens = slot.query_start = slot.visible = {};
  slot.device_requests = lengths.requests;
  slot.device_tokens = lengths.query_tokens;
  slot.generation.store(++slot.builds);
  return metadata_of(&slot, slot.builds);
}

Status check_current(const DecodeMetadata& metadata) { return check_generation(Builder::slot_of(metadata), metadata); }

}  // namespace latte::backend
