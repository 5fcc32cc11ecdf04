#include <cstddef>
#include <utility>

#include "cuda/plan/block.cuh"
#include "cuda/plan/device_plan.hpp"
#include "cuda/prim/launch.cuh"
#include "plan/layout.hpp"

namespace latte::cuda {
namespace {

struct Storage {
  planner::BlockStorage block;
  planner::SharedScratch<> scratch;
};

template <PolicyKind kind>
__global__ void __launch_bounds__(planner::kThreads, 1) plan_kernel(const __grid_constant__ planner::Task task) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& storage = *reinterpret_cast<Storage*>(memory);
  // A kernel that waits for this one by itself may get ready while it runs.
  cudaTriggerProgrammaticLaunchCompletion();
  planner::DeviceBlock block(storage.block);
  planner::make_plan<kind>(block, task, storage.scratch);
}

template <PolicyKind kind>
cudaError_t prepare() {
  // Decode wants all of the shared memory; asking for the same split spares the multiprocessor a change.
  for (const auto& [attribute, value] : {std::pair{cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Storage)}},
                                         std::pair{cudaFuncAttributePreferredSharedMemoryCarveout, 100}})
    if (const cudaError_t error = cudaFuncSetAttribute(plan_kernel<kind>, attribute, value); error != cudaSuccess)
      return error;
  return cudaSuccess;
}

template <PolicyKind kind>
cudaError_t launch(const planner::Task& task, cudaStream_t stream) {
  return prim::launch(plan_kernel<kind>, 1, planner::kThreads, sizeof(Storage), stream, task);
}

}  // namespace

cudaError_t prepare_plan() {
  cudaError_t error = prepare<PolicyKind::balanced>();
  if (error == cudaSuccess) error = prepare<PolicyKind::uniform>();
  if (error == cudaSuccess) error = prepare<PolicyKind::batch_invariant>();
  return error;
}

cudaError_t launch_plan(const PlanCall& call, cudaStream_t stream) {
  PlanConfig config = call.config;
  config.workers = plan::worker_count(call.config);
  config.limits = plan::resolve(call.config.limits);
  if (call.requests < 0 || call.requests > config.limits.max_requests) return cudaErrorInvalidValue;
  if (reinterpret_cast<std::uintptr_t>(call.words) % sizeof(std::int64_t) != 0) return cudaErrorMisalignedAddress;
  const planner::Task task =
      planner::make_task(config, call.sizes, call.requests, call.query_tokens, call.lengths, call.words);
  switch (config.policy.kind) {
    case PolicyKind::balanced: return launch<PolicyKind::balanced>(task, stream);
    case PolicyKind::uniform: return launch<PolicyKind::uniform>(task, stream);
    case PolicyKind::batch_invariant: return launch<PolicyKind::batch_invariant>(task, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace latte::cuda
