// What an open backend is to the rest of this room. cpu/ and cuda/ have the two there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/plan_memory.hpp"
#include "backend/prefill_chunks.hpp"
#include "backend/validate/validate.hpp"
#include "cuda/host/cuda.hpp"
#include "latte/backend.hpp"
#include "latte/decode.hpp"
#include "latte/ops.hpp"
#include "latte/prefill.hpp"

namespace latte::backend {

// The buffers of one slot, of fixed size and address, and what runs from them.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;

  // Host memory for the next plan and its lengths. The step planned before must not need it any more.
  virtual Result<DecodeWords::Parts> stage(Stream stream) = 0;
  // The staged step is complete: bring it to where decode reads it.
  virtual Status publish(const Plan& plan, const StepLengths& lengths, Stream stream) = 0;
  virtual Status plan_on_device(const DeviceLengths& lengths, Stream stream) = 0;
  // The published plan's words, from where decode reads them.
  virtual Result<std::vector<std::int32_t>> copy_words(Stream stream) = 0;

  // Arguments are valid and there are rows to compute.
  virtual Status run(const PlannedStep& step, const DecodeArgs& args) = 0;
  virtual bool owns_workspace() const = 0;
  // What a validation kernel has found since this was last asked.
  virtual Status take_finding() = 0;
};

// What a prefill plan runs from: one for the new tokens of a slot, one for each chunk of its context.
class PrefillStep {
 public:
  virtual ~PrefillStep() = default;

  // Host memory for the next plan and its lengths. The step planned before must not need it any more.
  virtual Result<PrefillWords::Parts> stage(Stream stream) = 0;
  // The staged step is complete, its spans are the staged ones: bring it to where prefill reads it.
  virtual Status publish(const Plan& plan, const PrefillLengths& lengths, Stream stream) = 0;
  // Where the published step's kv_start lies, for gather_kv.
  virtual const std::int32_t* kv_start() const = 0;
  // Arguments are valid and there are rows to compute. `workspace` has prefill_workspace_bytes(), initialised.
  virtual Status run(const PrefillArgs& args, std::byte* workspace) = 0;
  // What a validation kernel has found since this was last asked.
  virtual Status take_finding() = 0;
};

// All that steps of one kind share.
struct PrefillSetup {
  PrefillProblem problem;
  PrefillChoice choice;
  PlanSizes sizes;
  PrefillWords words;
};

class Impl {
 public:
  virtual ~Impl() = default;
  virtual MachineInfo info() const = 0;
  virtual std::int32_t workers() const = 0;
  virtual Place place() const = 0;
  virtual cuda::Device* device() { return nullptr; }

  // The kernel for a valid problem, limits and policy, or why there is none.
  virtual Result<KernelChoice> choose(const DecodeProblem& problem, const Limits& limits,
                                      const Policy& policy) const = 0;
  virtual std::size_t workspace_bytes(const DecodeProblem& problem, const PlanConfig& config,
                                      const PlanSizes& sizes) const = 0;
  // `words`: builder.words.count of them, for the step's lengths and plan. May throw std::bad_alloc.
  virtual Result<std::unique_ptr<DecodeStep>> make_step(const Builder& builder, const BuilderOptions& options,
                                                        std::int32_t* words) = 0;
  virtual Status init_workspace(const Builder& builder, std::span<std::byte> workspace, Stream stream) = 0;

  virtual Result<PrefillChoice> choose(const PrefillProblem& problem, const Limits& limits,
                                       const Policy& policy) const = 0;
  // Of one run: partials, counters, converted and transposed tensors. Multiples of 256.
  virtual std::size_t prefill_workspace_bytes(const PrefillSetup& setup) const = 0;
  // Of that what grows with the tokens of a step's keys and values.
  virtual ChunkEntry chunk_entry(const PrefillProblem& /*problem*/, PrefillMath /*math*/,
                                 std::int32_t /*max_requests*/) const {
    return {};
  }
  // `words`: setup.words.count of them. `validated`: not null for a step whose runs look at the pages of its context
  // first, where the host cannot. May throw std::bad_alloc. The setup outlives the step.
  virtual Result<std::unique_ptr<PrefillStep>> make_prefill_step(const PrefillSetup& setup, std::int32_t* words,
                                                                 const PrefillContext* validated) = 0;
  virtual Status init_prefill_workspace(const PrefillSetup& setup, std::byte* workspace, Stream stream) = 0;
  virtual Status gather_kv(const GatherKvArgs& args) = 0;

  // Arguments are valid and there is something to do.
  virtual Status merge(const MergeArgs& args) = 0;
  virtual Status write_kv(const WriteKvArgs& args) = 0;

  virtual Result<Ceilings> measure_ceilings(std::string_view kernel) = 0;
  virtual Status synchronize(Stream stream) = 0;

  std::string note;  // MachineInfo::note
};

Result<std::shared_ptr<Impl>> open_cpu(const BackendOptions& options);
Result<std::shared_ptr<Impl>> open_cuda(const BackendOptions& options);

// The choices of machines that are not at hand.
Result<KernelChoice> choose_for_cpu(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                                    std::int32_t threads);
Result<KernelChoice> choose_for_cuda(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                                     std::int32_t multiprocessors);

Result<PrefillChoice> choose_for_cpu(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                     std::int32_t threads);
Result<PrefillChoice> choose_for_cuda(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                      std::int32_t multiprocessors);

}  // namespace latte::backend
