// Planning on the device: one small kernel reads the lengths there and fills the same words as latte::make_plan, bit
// for bit, in a buffer of the same size. Nothing is copied, nothing waits, and every address comes from the caller, so
// that a graph can hold it.
//
// Defined words are those that Plan's views cover: work_meta_data, work_indptr, and the parts of the other four arrays
// that are in use. The scratch behind them, and the unused ends of the arrays, may differ from the host's.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/cuda.hpp"

namespace latte::cuda {

// Of the current device; once, before the first launch.
cudaError_t prepare_plan();

// `sizes` are plan_sizes(config)'s; `words` has as many as they say and is 8-byte aligned. Lengths are clamped to the
// limits and to `query_tokens`; where `visible` is given it has that many entries. More requests than the limits allow:
// cudaErrorInvalidValue.
cudaError_t launch_plan(const PlanCall& call, cudaStream_t stream);

}  // namespace latte::cuda
