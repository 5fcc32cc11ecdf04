// The CUDA backend: a device, and slots whose plans and partial results lie in its memory.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend/builder.hpp"
#include "backend/impl.hpp"
#include "cuda/host/cuda.hpp"

namespace latte::backend {

class Findings;

class CudaImpl final : public Impl {
 public:
  CudaImpl(std::unique_ptr<cuda::Device> gpu, bool serial_launches)
      : device_(std::move(gpu)), serial_launches_(serial_launches) {}

  MachineInfo info() const override;
  std::int32_t workers() const override { return device_->info().multiprocessors; }
  Place place() const override { return Place::device; }
  cuda::Device* device() override { return device_.get(); }
  bool serial_launches() const { return serial_launches_; }

  Result<KernelChoice> choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const override;
  std::size_t workspace_bytes(const DecodeProblem& problem, const PlanConfig& config,
                              const PlanSizes& sizes) const override;
  Result<std::unique_ptr<DecodeStep>> make_step(const Builder& builder, const BuilderOptions& options,
                                                std::int32_t* words) override;
  Status init_workspace(const Builder& builder, std::span<std::byte> workspace, Stream stream) override;

  Result<PrefillChoice> choose(const PrefillProblem& problem, const Limits& limits,
                               const Policy& policy) const override;
  std::size_t prefill_workspace_bytes(const PrefillSetup& setup) const override;
  ChunkEntry chunk_entry(const PrefillProblem& problem, PrefillMath math, std::int32_t max_requests) const override;
  Result<std::unique_ptr<PrefillStep>> make_prefill_step(const PrefillSetup& setup, std::int32_t* words,
                                                         const PrefillContext* validated) override;
  Status init_prefill_workspace(const PrefillSetup& setup, std::byte* workspace, Stream stream) override;
  Status gather_kv(const GatherKvArgs& args) override;

  Status merge(const MergeArgs& args) override;
  Status write_kv(const WriteKvArgs& args) override;

  Result<Ceilings> measure_ceilings(std::string_view kernel) override;
  Status synchronize(Stream stream) override;

 private:
  friend class Findings;

  std::unique_ptr<cuda::Device> device_;
  const bool serial_launches_;
  // Of the living steps, asked when someone synchronizes.
  std::mutex findings_mutex_;
  std::vector<Findings*> findings_;
};

// Memory of a device, given back at the end.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (device_ != nullptr) device_->release(data_, where_);
  }
  Status allocate(cuda::Device& device, std::size_t bytes, cuda::Memory where);
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  cuda::Device* device_ = nullptr;
  void* data_ = nullptr;
  cuda::Memory where_ = cuda::Memory::device;
};

// What the validation kernel finds in the lengths and pages of a step: in pinned memory, until somebody asks the
// builder or the backend. Without allocate() nobody looks and nothing is found.
class Findings {
 public:
  // `lengths`: what the caller calls the KV tokens of a request. `limits` are resolved.
  Findings(CudaImpl& impl, const char* lengths, const Limits& limits)
      : impl_(impl), lengths_(lengths), limits_(limits) {}
  Findings(const Findings&) = delete;
  Findings& operator=(const Findings&) = delete;
  ~Findings();
  Status allocate();

  // Queues a look; limits and report are filled in.
  Status look(cuda::ValidateCall call, Stream stream);
  // What has been found since this was last asked.
  Status take();

 private:
  std::optional<cuda::ValidationReport> take_report();

  CudaImpl& impl_;
  const char* const lengths_;
  const Limits limits_;
  DeviceBuffer report_;
  std::mutex taking_;  // held by whoever takes the report
};

// Words that the host writes and the device reads: the same places in pinned and in device memory. There are two pinned
// halves that take turns, as an upload may still be reading one.
class StagedWords {
 public:
  explicit StagedWords(cuda::Device& device) : device_(device) {}
  StagedWords(const StagedWords&) = delete;
  StagedWords& operator=(const StagedWords&) = delete;
  ~StagedWords();
  // The words on the device are there already; these are the pinned ones.
  Status allocate(std::int32_t* on_device, std::size_t words);

  // Turns to the other half; waits if the upload before the last has not ended. An error when the stream is captured.
  Status stage(Stream stream);
  // Uploads the staged words that these spans lie in, which come in the order of their places.
  template <class... Spans>
  Status upload(Stream stream, const Spans&... spans) {
    const Range ranges[] = {range(spans)...};
    return upload(ranges, stream);
  }

  std::int32_t* staged() const { return reinterpret_cast<std::int32_t*>(halves_[half_].words.data()); }
  std::int32_t* on_device() const { return on_device_; }

 private:
  struct Half {
    DeviceBuffer words;
    void* uploaded = nullptr;  // an event
    bool in_flight = false;
  };
  struct Range {
    std::size_t first, last;
  };

  template <class Span>
  Range range(const Span& values) const {
    const auto first = static_cast<std::size_t>(reinterpret_cast<const std::int32_t*>(values.data()) - staged());
    return values.empty() ? Range{0, 0} : Range{first, first + values.size_bytes() / sizeof(std::int32_t)};
  }
  Status upload(std::span<const Range> ranges, Stream stream);

  cuda::Device& device_;
  Half halves_[2];
  std::size_t half_ = 0;
  std::int32_t* on_device_ = nullptr;
};

// How a workspace is divided; the places follow from the limits, so that graphs keep them.
cuda::DecodeWorkspace carve_workspace(const PlanSizes& sizes, std::int32_t latent, std::byte* base);
std::size_t arrived_bytes(const PlanSizes& sizes);

// Tensors and plans as kernels take them. Where the arrays of a plan lie does not depend on the step.
cuda::PlanView device_plan(const PlanSizes& sizes, std::int32_t workers, const std::int32_t* words);
cuda::CacheView cache_view(const ConstTensorView& cache, const PageTable& pages);

// One slot. The plan is staged in pinned memory and uploaded, or made in place by a kernel.
class CudaStep final : public DecodeStep {
 public:
  CudaStep(CudaImpl& impl, const Builder& builder, const cuda::DecodeKernel& kernel);
  Status allocate(std::int32_t* words, const BuilderOptions& options);

  Result<DecodeWords::Parts> stage(Stream stream) override;
  Status publish(const Plan& plan, const StepLengths& lengths, Stream stream) override;
  Status plan_on_device(const DeviceLengths& lengths, Stream stream) override;
  Result<std::vector<std::int32_t>> copy_words(Stream stream) override;
  Status run(const PlannedStep& step, const DecodeArgs& args) override;
  bool owns_workspace() const override { return workspace_.data() != nullptr; }
  Status take_finding() override { return findings_.take(); }

 private:
  DecodeWords::Parts on_device() const { return builder_.words.at(words_.on_device()); }

  cuda::Device& device_;
  const Builder& builder_;
  const cuda::DecodeKernel kernel_;
  const std::int32_t workers_;  // that get work: one launch's size
  const bool may_overlap_;
  // A plan that a kernel makes, and that no decode in its stream has waited for. Captured or not, as the plan was.
  struct PlanUnderWay {
    Stream stream;
    bool captured;
  };
  std::optional<PlanUnderWay> plan_under_way_;
  StagedWords words_;
  DeviceBuffer workspace_;
  Findings findings_;
  cuda::LengthsView lengths_;  // of the last step
  cuda::PlanView plan_;
};

}  // namespace latte::backend
