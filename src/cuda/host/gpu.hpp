// The front door's one implementation. Declared here because two files define it.
#pragma once

#include <cuda_runtime_api.h>
#include <utility>

#include "cuda/host/context.hpp"
#include "cuda/host/cuda.hpp"
#include "cuda/host/errors.hpp"

// The rest of a function of Gpu runs with its device current, or is not reached.
#define LATTE_USE_DEVICE()          \
  const Context::Use use(context_); \
  LATTE_RETURN_IF_CUDA_ERROR(use.error(), "a device that can be used")

namespace latte::cuda {

inline cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

class Gpu final : public Device {
 public:
  Gpu(int ordinal, DeviceInfo info) : context_(ordinal), info_(std::move(info)) {}
  const DeviceInfo& info() const override { return info_; }
  cudaError_t start();  // makes the driver's state for this process, which all else needs

  Result<void*> allocate(std::size_t bytes, Memory where) override;
  void release(void* memory, Memory where) noexcept override;
  Result<std::size_t> free_memory() override;
  Status copy(void* to, const void* from, std::size_t bytes, Copy direction, Stream stream) override;
  Status clear(void* memory, std::size_t bytes, Stream stream) override;
  Status fill_random(const RandomFill& fill, Stream stream) override;

  Result<void*> make_stream() override;
  void release_stream(void* stream) noexcept override;
  Status synchronize(Stream stream) override;
  Result<void*> make_event(bool timed) override;
  void release_event(void* event) noexcept override;
  Status record(void* event, Stream stream) override;
  Status wait(void* event) override;
  Result<double> elapsed_us(void* begin, void* end) override;

  Result<bool> capturing(Stream stream) override;
  Status begin_capture(Stream stream) override;
  Result<void*> end_capture(Stream stream) override;
  Status launch_graph(void* graph, Stream stream) override;
  void release_graph(void* graph) noexcept override;

  Status prepare(const DecodeKernel& kernel) override;
  Status decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers, bool overlap_previous,
                Stream stream) override;
  Status plan(const PlanCall& call, Stream stream) override;
  Status merge(const MergeCall& call, Stream stream) override;
  Status write_kv(const WriteKvCall& call, Stream stream) override;
  Status validate(const ValidateCall& call, Stream stream) override;

  Status prepare(const PrefillKernel& kernel) override;
  Status convert(const ConvertCall& call, Stream stream) override;
  Status prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers, Stream stream) override;
  Status gather_kv(const GatherKvCall& call, Stream stream) override;

  Result<Ceilings> measure_ceilings(bool fp8) override;

 private:
  Context context_;
  const DeviceInfo info_;
};

}  // namespace latte::cuda
