// The kernels' launches behind the front door.
#include "cuda/host/gpu.hpp"
#include "cuda/host/measure.hpp"
#include "cuda/ops/ops.hpp"
#include "cuda/plan/device_plan.hpp"
#include "cuda/sm90/decode/launch.hpp"
#include "cuda/sm90/prefill/entry.hpp"
#include "cuda/sm90/prefill/launch.hpp"

namespace latte::cuda {
Status Gpu::prepare(const DecodeKernel& kernel) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(prepare_decode(kernel), "a decode kernel for this device");
  LATTE_RETURN_IF_CUDA_ERROR(prepare_plan(), "a planner for this device");
  return {};
}

Status Gpu::decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers, bool overlap_previous,
                   Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_decode(kernel, call, workers, overlap_previous, as_stream(stream)),
                             "a decode launch");
  return {};
}

Status Gpu::plan(const PlanCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_plan(call, as_stream(stream)), "a planning launch");
  return {};
}

Status Gpu::merge(const MergeCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_merge(call, as_stream(stream)), "a merge launch");
  return {};
}

Status Gpu::write_kv(const WriteKvCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_write_kv(call, as_stream(stream)), "a cache write launch");
  return {};
}

Status Gpu::validate(const ValidateCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_validate(call, as_stream(stream)), "a validation launch");
  return {};
}

Status Gpu::prepare(const PrefillKernel& kernel) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(prepare_prefill(kernel), "a prefill kernel for this device");
  return {};
}

Status Gpu::convert(const ConvertCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_convert(call, as_stream(stream)), "a launch that converts a tensor");
  return {};
}

Status Gpu::prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_prefill(kernel, call, workers, as_stream(stream)), "a prefill launch");
  return {};
}

Status Gpu::gather_kv(const GatherKvCall& call, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_gather_kv(call, as_stream(stream)), "a gathering launch");
  return {};
}

Status Gpu::fill_random(const RandomFill& fill, Stream stream) {
  LATTE_USE_DEVICE();
  LATTE_RETURN_IF_CUDA_ERROR(launch_fill_random(fill, as_stream(stream)), "a launch that fills memory");
  return {};
}

Result<Ceilings> Gpu::measure_ceilings(bool fp8) {
  LATTE_USE_DEVICE();
  Ceilings ceilings;
  LATTE_RETURN_IF_CUDA_ERROR(cuda::measure_ceilings(info_.multiprocessors, fp8, ceilings), "the device's ceilings");
  return ceilings;
}

}  // namespace latte::cuda
