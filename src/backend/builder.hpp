// The builder's insides: one Slot per step in flight, every buffer sized from the limits and never moved.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "backend/impl.hpp"
#include "backend/validate.hpp"
#include "latte/decode.hpp"

namespace latte::backend {

struct WorkspaceDelete {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{kWorkspaceAlignment}); }
};
using Workspace = std::unique_ptr<std::byte[], WorkspaceDelete>;

struct Slot {
  const Builder* builder = nullptr;
  // Matches the metadata of the last build. 0 = never built, or being built right now.
  std::atomic<std::uint64_t> generation{0};
  std::uint64_t builds = 0;
  std::unique_ptr<std::int32_t[]> plan_words;
  std::unique_ptr<std::int32_t[]> length_words;  // seq_lens, query_start, visible at their largest
  Workspace workspace;                           // null when the caller brings one
  Plan plan;
  std::span<const std::int32_t> seq_lens, query_start, visible;
};

class Builder {
 public:
  static Result<std::unique_ptr<Builder>> create(const Backend& backend, const PlanConfig& config,
                                                 const DecodeProblem& problem, const BuilderOptions& options);

  Result<DecodeMetadata> build(std::int32_t slot_index, const StepLengths& lengths);

  // Metadata taken apart and put together, for the C ABI.
  static Slot* slot_of(const DecodeMetadata& metadata) { return metadata.slot_; }
  static DecodeMetadata metadata_of(Slot* slot, std::uint64_t generation);

  PlannedStep planned_step(const Slot& slot) const;

  std::optional<Backend> backend;  // keeps the threads alive; none only in the builder that stands for no builder
  const cpu::Kernel* kernel = nullptr;
  std::string kernel_name;
  DecodeProblem problem;
  PlanConfig config;
  PlanSizes sizes;
  std::size_t workspace_bytes = 0;

 private:
  void copy_lengths(Slot& slot, const StepLengths& lengths) const;

  std::unique_ptr<Slot[]> slots_;
  std::int32_t slot_count_ = 0;
};

// An error when the metadata was never built, or its slot holds another step by now.
Status check_current(const DecodeMetadata& metadata);

}  // namespace latte::backend
