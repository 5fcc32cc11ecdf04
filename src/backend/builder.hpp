// The builder's insides: one Slot per step in flight, every buffer sized from the limits and never moved.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "backend/impl.hpp"
#include "backend/validate/validate.hpp"
#include "latte/decode.hpp"

namespace latte::backend {

struct Slot {
  const Builder* builder = nullptr;
  // Matches the metadata of the last build. 0 = never built, or being built right now.
  std::atomic<std::uint64_t> generation{0};
  std::uint64_t builds = 0;
  std::unique_ptr<DecodeStep> memory;
  // Of a step that was planned on the host.
  Plan plan;
  std::span<const std::int32_t> seq_lens, query_start, visible;
  // Of a step that was planned on the device; -1 requests: the last one was not.
  std::int32_t device_requests = -1, device_tokens = 0;
};

class Builder {
 public:
  // All that follows from the arguments; there are no slots yet.
  static Result<std::unique_ptr<Builder>> describe(const Backend& backend, const DecodeProblem& problem,
                                                   const Limits& limits, const BuilderOptions& options);
  Status make_slots(const BuilderOptions& options);
  BuilderNeeds needs() const;

  Result<DecodeMetadata> build(std::int32_t slot_index, const StepLengths& lengths, Stream stream);
  Result<DecodeMetadata> build_on_device(std::int32_t slot_index, const DeviceLengths& lengths, Stream stream);

  // Metadata taken apart and put together, for the C ABI.
  static Slot* slot_of(const DecodeMetadata& metadata) { return metadata.slot_; }
  static DecodeMetadata metadata_of(Slot* slot, std::uint64_t generation);

  PlannedStep planned_step(const Slot& slot) const;
  // What validation kernels have found in any slot since this was last asked.
  Status take_finding() const;

  std::optional<Backend> backend;  // outlives the slots; none only in the builder that stands for no builder
  std::string kernel_name, reason;
  DecodeProblem problem;
  Limits limits;  // as they were given
  PlanConfig config;
  PlanSizes sizes;
  DecodeWords words;
  std::size_t workspace_bytes = 0;

 private:
  Result<Slot*> find_slot(std::int32_t index) const;

  PlanMemory plan_memory_;
  std::unique_ptr<Slot[]> slots_;
  std::int32_t slot_count_ = 0;
};

// An error when the metadata was never built, or its slot holds another step by now.
Status check_current(const DecodeMetadata& metadata);

}  // namespace latte::backend
