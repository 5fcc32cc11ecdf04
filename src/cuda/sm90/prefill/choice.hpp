// Which prefill kernel serves a problem on Hopper, and how it is planned. Plain C++: works without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/sm90/prefill/call.hpp"
#include "latte/backend.hpp"
#include "latte/status.hpp"

namespace latte::cuda {

struct PrefillKernelChoice {
  PrefillKernel kernel;
  PrefillMath math = PrefillMath::half;  // what runs
  PlanConfig config;
  std::string reason;
};

// `multiprocessors` is how many the machine has. Unsupported problems give a Status that says why.
Result<PrefillKernelChoice> choose_prefill(const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                                           std::int32_t multiprocessors);

const char* kernel_name(const PrefillKernel& kernel);

}  // namespace latte::cuda
