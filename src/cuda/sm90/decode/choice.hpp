// Which decode kernel serves a problem on Hopper, and how it is planned. Plain C++: works without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cuda/call.hpp"
#include "latte/status.hpp"

namespace latte::cuda {

inline constexpr std::int32_t kHopperMultiprocessors = 132;       // of an H100 or H200
inline constexpr std::int64_t kHopperL2Bytes = 50 * 1024 * 1024;  // of an H100; an H200 has a little more

struct DecodeKernelChoice {
  DecodeKernel kernel;
  PlanConfig config;
  std::string reason;  // for people: what was chosen and why
};

// `multiprocessors` is how many the machine has. Unsupported problems give a Status that says why.
Result<DecodeKernelChoice> choose_decode(const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                                         std::int32_t multiprocessors);

const char* kernel_name(const DecodeKernel& kernel);
// Of all there are; those for the smallest tiles first.
std::array<const char*, 5> decode_kernel_names();

}  // namespace latte::cuda
