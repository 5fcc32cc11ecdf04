#include "backend/prefill_builder.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "backend/errors.hpp"
#include "backend/slots.hpp"
#include "core/checked.hpp"
#include "plan/layout.hpp"

namespace latte::backend {
namespace {

Result<PrefillSetup> make_setup(const Backend& backend, const PrefillProblem& problem, const Limits& limits,
                                const Policy& policy) {
  auto choice = backend.choose(problem, limits, policy);
  if (!choice.ok()) return choice.status();
  const auto sizes = latte::plan_sizes(choice->plan);
  if (!sizes.ok()) return sizes.status();
  const PrefillWords words(choice->plan, *sizes);
  return PrefillSetup{.problem = problem, .choice = std::move(*choice), .sizes = *sizes, .words = words};
}

}  // namespace

Result<std::unique_ptr<PrefillBuilderImpl>> PrefillBuilderImpl::describe(const Backend& backend,
                                                                         const PrefillProblem& problem,
                                                                         const Limits& limits,
                                                                         const BuilderOptions& options) {
  LATTE_RETURN_IF_ERROR(check_slot_count(options.slots));
  auto builder = std::make_unique<PrefillBuilderImpl>();
  auto direct = make_setup(backend, problem, limits, options.policy);
  if (!direct.ok()) return direct.status();
  builder->backend = backend;
  builder->direct = std::move(*direct);
  builder->problem = problem;
  builder->limits = plan::resolve(limits);
  builder->slot_count_ = options.slots;
  if (problem.context) LATTE_RETURN_IF_ERROR(builder->choose_context(backend, options.policy));
  LATTE_RETURN_IF_ERROR(builder->lay_out());
  return builder;
}

BuilderNeeds PrefillBuilderImpl::needs() const {
  return {.plan = {.name = "prefill plan", .bytes = plan_bytes, .alignment = kPlanAlignment},
          .workspace = {.name = "prefill", .bytes = workspaces.bytes, .alignment = kPrefillWorkspaceAlignment}};
}

Status PrefillBuilderImpl::make_slots(const BuilderOptions& options) {
  auto memory = PlanMemory::make(*backend, options.plan_memory, plan_bytes);
  if (!memory.ok()) return memory.status();
  plan_memory_ = std::move(*memory);
  try {
    slots_ = std::make_unique<PrefillSlot[]>(static_cast<std::size_t>(slot_count_));
    for (std::int32_t i = 0; i < slot_count_; ++i)
      LATTE_RETURN_IF_ERROR(make_slot(slots_[static_cast<std::size_t>(i)], options));
    return {};
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, "limits", "buffers that fit this machine's memory",
            text(slot_count_) + " slots of what these limits need"};
  }
}

Status PrefillBuilderImpl::choose_context(const Backend& machine, const Policy& policy) {
  problem.context = resolve(*problem.context, limits);
  // What is joined is fp32 until the last chunk is in.
  PrefillProblem partial = problem;
  partial.context.reset();
  partial.out_dtype = Dtype::f32;
  auto made = make_setup(machine, partial, limits, policy);
  if (!made.ok()) return made.status();
  joined = std::move(*made);

  const ChunkEntry entry = machine.impl().chunk_entry(partial, joined.choice.math, limits.max_requests);
  const auto sizes = size_context(problem, *problem.context, limits, policy.kind, entry);
  if (!sizes.ok()) return sizes.status();
  context = *sizes;

  partial.mask = Mask::none;
  Limits bounds = limits;
  bounds.max_kv_tokens = std::min(problem.context->max_tokens, context.chunk_tokens);
  bounds.max_total_kv_tokens = context.chunk_tokens;
  made = make_setup(machine, partial, bounds, policy);
  if (!made.ok()) return made.status();
  chunk = std::move(*made);
  return {};
}

Status PrefillBuilderImpl::lay_out() {
  // joined and chunk have no words where there is no context.
  const auto words = static_cast<std::int64_t>(direct.words.count + joined.words.count);
  std::int64_t bytes = 0;
  if (!checked_mul(static_cast<std::int64_t>(chunk.words.count), context.max_chunks, bytes) ||
      !checked_add(bytes, words, bytes) ||
      !checked_mul(bytes, std::int64_t{slot_count_} * std::int64_t{sizeof(std::int32_t)}, bytes))
    return {Code::out_of_limits, "context.max_total_tokens", "plans of all chunks below 2^63 bytes", "more"};
  plan_bytes = static_cast<std::size_t>(bytes);

  const Impl& impl = backend->impl();
  std::vector<WorkspaceNeed> needs = {{.name = "direct", .bytes = impl.prefill_workspace_bytes(direct)}};
  if (problem.context) {
    needs.push_back({.name = "joined", .bytes = impl.prefill_workspace_bytes(joined)});
    needs.push_back({.name = "chunk", .bytes = impl.prefill_workspace_bytes(chunk)});
    const auto parts = context_needs(problem, limits.max_total_query_tokens, context.chunk_tokens);
    needs.insert(needs.end(), parts.begin(), parts.end());
  }
  const auto layout = lay_out_workspace(needs);
  if (!layout.ok()) return layout.status();
  workspaces.bytes = layout->bytes;
  workspaces.direct = layout->offsets[0];
  if (problem.context) {
    workspaces.joined = layout->offsets[1];
    workspaces.chunk = layout->offsets[2];
    std::copy(layout->offsets.begin() + 3, layout->offsets.end(), workspaces.parts.begin());
  }
  return {};
}

Status PrefillBuilderImpl::make_slot(PrefillSlot& slot, const BuilderOptions& options) {
  Impl& impl = backend->impl();
  const auto make = [&](const PrefillSetup& setup, std::unique_ptr<PrefillStep>& step,
                        const PrefillContext* validated = nullptr) -> Status {
    auto made = impl.make_prefill_step(setup, plan_memory_.take(setup.words.count), validated);
    if (!made.ok()) return made.status();
    step = std::move(*made);
    return {};
  };
  slot.builder = this;
  LATTE_RETURN_IF_ERROR(make(direct, slot.direct));
  if (problem.context) {
    // The first to run where there is context.
    LATTE_RETURN_IF_ERROR(make(joined, slot.joined, options.validate ? &*problem.context : nullptr));
    slot.chunk_slots.resize(static_cast<std::size_t>(context.max_chunks));
    for (ChunkSlot& chunk_slot : slot.chunk_slots) LATTE_RETURN_IF_ERROR(make(chunk, chunk_slot.step));
  }
  if (!options.own_workspace || workspaces.bytes == 0) return {};
  auto memory = DeviceMemory::allocate(*backend, workspaces.bytes);
  if (!memory.ok()) return memory.status();
  slot.workspace = std::move(*memory);
  LATTE_RETURN_IF_ERROR(init_workspace(slot.workspace.data(), nullptr));
  // The first prefill may come in any stream.
  return impl.device() != nullptr ? impl.device()->synchronize(nullptr) : Status();
}

Status PrefillBuilderImpl::init_workspace(std::byte* workspace, Stream stream) const {
  Impl& impl = backend->impl();
  LATTE_RETURN_IF_ERROR(impl.init_prefill_workspace(direct, workspace + workspaces.direct, stream));
  if (!problem.context) return {};
  LATTE_RETURN_IF_ERROR(impl.init_prefill_workspace(joined, workspace + workspaces.joined, stream));
  return impl.init_prefill_workspace(chunk, workspace + workspaces.chunk, stream);
}

PrefillMetadata PrefillBuilderImpl::metadata_of(PrefillSlot* slot, std::uint64_t generation) {
  PrefillMetadata metadata;
  metadata.slot_ = slot;
  metadata.generation_ = generation;
  return metadata;
}

PlannedPrefill PrefillBuilderImpl::planned_step(const PrefillSlot& slot) const {
  return {.problem = problem,
          .query_start = slot.query_start,
          .kv_start = slot.kv_start,
          .context_lens = slot.context_lens,
          .chunks = slot.chunks,
          .workspace_bytes = workspaces.bytes,
          .owns_workspace = slot.workspace.data() != nullptr,
          .place = backend->impl().place()};
}

Status PrefillBuilderImpl::take_finding() const {
  if (!problem.context) return {};
  for (std::int32_t i = 0; i < slot_count_; ++i)
    LATTE_RETURN_IF_ERROR(slots_[static_cast<std::size_t>(i)].joined->take_finding());
  return {};
}

Result<PrefillBuilderImpl::Planned> PrefillBuilderImpl::plan_into(PrefillStep& step, const PrefillWords::Parts& staging,
                                                                  const PrefillSetup& setup,
                                                                  const PrefillLengths& lengths, Stream stream) const {
  const std::span<std::int32_t> kv_lens(staging.kv_lens, lengths.query_start.size() - 1);
  for (std::size_t b = 0; b < kv_lens.size(); ++b) kv_lens[b] = lengths.kv_start[b + 1] - lengths.kv_start[b];
  const auto plan =
      make_plan(setup.choice.plan, {.seq_lens = kv_lens, .query_start = lengths.query_start}, staging.plan);
  if (!plan.ok()) return plan.status();
  const auto keep = [](std::span<const std::int32_t> values, std::int32_t* to) {
    if (values.data() != to) std::copy(values.begin(), values.end(), to);
    return std::span<const std::int32_t>(to, values.size());
  };
  const Planned planned{.plan = *plan,
                        .lengths = {.query_start = keep(lengths.query_start, staging.query_start),
                                    .kv_start = keep(lengths.kv_start, staging.kv_start),
                                    .context_lens = keep(lengths.context_lens, staging.context_lens)}};
  LATTE_RETURN_IF_ERROR(step.publish(planned.plan, planned.lengths, stream));
  return planned;
}

Status PrefillBuilderImpl::build_chunks(PrefillSlot& slot, Stream stream) const {
  for (std::int32_t begin = 0;;) {
    const std::int32_t end = chunk_end(slot.context_lens, begin, context);
    if (end == begin) return {};
    ChunkSlot& chunk_slot = slot.chunk_slots[static_cast<std::size_t>(slot.chunks)];
    const auto staging = chunk_slot.step->stage(stream);
    if (!staging.ok()) return staging.status();
    const std::span<std::int32_t> starts(staging->kv_start, slot.context_lens.size() + 1);
    chunk_starts(slot.context_lens, begin, end, starts);
    const auto planned =
        plan_into(*chunk_slot.step, *staging, chunk, {.query_start = slot.query_start, .kv_start = starts}, stream);
    if (!planned.ok()) return planned.status();
    chunk_slot.plan = planned->plan;
    chunk_slot.begin = begin;
    chunk_slot.kv_start = planned->lengths.kv_start;
    ++slot.chunks;
    begin = end;
  }
}

Result<PrefillMetadata> PrefillBuilderImpl::build(std::int32_t slot_index, const PrefillLengths& lengths,
                                                  Stream stream) {
  LATTE_RETURN_IF_ERROR(check_slot_index(slot_index, slot_count_));
  LATTE_RETURN_IF_ERROR(validate_stream(backend->impl().place(), stream));
  const PrefillContext* bounds = problem.context ? &*problem.context : nullptr;
  // Everything that lengths can be refused for is refused here, while the step planned before is still whole.
  LATTE_RETURN_IF_ERROR(validate_lengths(lengths, limits, problem.heads, bounds));
  LATTE_RETURN_IF_ERROR(take_finding());
  PrefillSlot& slot = slots_[static_cast<std::size_t>(slot_index)];
  const bool has_context = std::any_of(lengths.context_lens.begin(), lengths.context_lens.end(),
                                       [](std::int32_t tokens) { return tokens > 0; });
  PrefillStep& first = has_context ? *slot.joined : *slot.direct;
  const auto staging = first.stage(stream);
  if (!staging.ok()) return staging.status();

  // While the arrays change hands nobody may run them: a prefill of the old step now says stale_metadata.
  slot.generation.store(0);
  slot.chunks = 0;
  const auto planned = plan_into(first, *staging, has_context ? joined : direct, lengths, stream);
  if (!planned.ok()) return planned.status();
  slot.plan = planned->plan;
  slot.query_start = planned->lengths.query_start;
  slot.kv_start = planned->lengths.kv_start;
  slot.context_lens = planned->lengths.context_lens;
  if (has_context) LATTE_RETURN_IF_ERROR(build_chunks(slot, stream));
  slot.generation.store(++slot.builds);
  return metadata_of(&slot, slot.builds);
}

Status check_current(const PrefillMetadata& metadata) {
  return check_generation(PrefillBuilderImpl::slot_of(metadata), metadata);
}

}  // namespace latte::backend
