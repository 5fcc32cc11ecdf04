// The prefill builder's insides: one slot per step in flight, every buffer sized from the limits and never moved.
//
// A slot plans the new tokens with one of two steps: `direct` writes the caller's output; `joined` writes fp32 into the
// workspace, for a step whose context is joined to it chunk by chunk. Each chunk has a step of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/impl.hpp"
#include "backend/prefill_chunks.hpp"
#include "backend/validate/validate.hpp"
#include "latte/device.hpp"
#include "latte/prefill.hpp"

namespace latte::backend {

struct ChunkSlot {
  std::unique_ptr<PrefillStep> step;
  // Of the last step that had this chunk.
  Plan plan;
  std::int32_t begin = 0;  // first token position
  std::span<const std::int32_t> kv_start;
};

struct PrefillSlot {
  const PrefillBuilderImpl* builder = nullptr;
  // Matches the metadata of the last build. 0 = never built, or being built right now.
  std::atomic<std::uint64_t> generation{0};
  std::uint64_t builds = 0;
  std::unique_ptr<PrefillStep> direct, joined;  // joined: only with context
  std::vector<ChunkSlot> chunk_slots;           // as many as a step can have
  DeviceMemory workspace;                       // empty when the caller brings one
  // Of the last build.
  Plan plan;
  std::span<const std::int32_t> query_start, kv_start, context_lens;
  std::int32_t chunks = 0;
};

class PrefillBuilderImpl {
 public:
  // All that follows from the arguments; there are no slots yet.
  static Result<std::unique_ptr<PrefillBuilderImpl>> describe(const Backend& backend, const PrefillProblem& problem,
                                                              const Limits& limits, const BuilderOptions& options);
  Status make_slots(const BuilderOptions& options);
  BuilderNeeds needs() const;

  Result<PrefillMetadata> build(std::int32_t slot_index, const PrefillLengths& lengths, Stream stream);
  Status init_workspace(std::byte* workspace, Stream stream) const;

  // Metadata taken apart and put together, for the C ABI.
  static PrefillSlot* slot_of(const PrefillMetadata& metadata) { return metadata.slot_; }
  static PrefillMetadata metadata_of(PrefillSlot* slot, std::uint64_t generation);

  PlannedPrefill planned_step(const PrefillSlot& slot) const;
  // What validation kernels have found in any slot since this was last asked.
  Status take_finding() const;

  std::optional<Backend> backend;  // outlives the slots; none only in the builder that stands for no builder
  PrefillProblem problem;          // with the context's defaults filled in
  Limits limits;                   // resolved
  PrefillSetup direct;
  PrefillSetup joined, chunk;  // only with context
  ContextSizes context;
  // Parts of a slot's workspace. The kernels' own ones do not share memory: each leaves its counters ready for its next
  // launch.
  struct Workspaces {
    std::size_t direct = 0, joined = 0, chunk = 0;
    std::array<std::size_t, kContextNeeds> parts{};
    std::size_t bytes = 0;
  } workspaces;
  std::size_t plan_bytes = 0;  // of all slots

 private:
  Status choose_context(const Backend& machine, const Policy& policy);
  Status lay_out();
  Status make_slot(PrefillSlot& slot, const BuilderOptions& options);
  struct Planned {
    Plan plan;
    PrefillLengths lengths;  // as the step keeps them
  };
  // Plans into what step.stage() returned.
  Result<Planned> plan_into(PrefillStep& step, const PrefillWords::Parts& staging, const PrefillSetup& setup,
                            const PrefillLengths& lengths, Stream stream) const;
  Status build_chunks(PrefillSlot& slot, Stream stream) const;

  PlanMemory plan_memory_;
  std::unique_ptr<PrefillSlot[]> slots_;
  std::int32_t slot_count_ = 0;
};

// An error when the metadata was never built, or its slot holds another step by now.
Status check_current(const PrefillMetadata& metadata);

}  // namespace latte::backend
