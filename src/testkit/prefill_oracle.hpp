// The reference for prefill, in fp64 over the same quantised inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "latte/prefill.hpp"
#include "testkit/oracle.hpp"

namespace latte::testkit {

// Keys and values of the context as the caller's hook stored them, before any scale.
struct ExpandedContext {
  struct Request {
    std::int32_t tokens = 0;
    std::vector<double> k{};  // [tokens, heads, qk_width]
    std::vector<double> v{};  // [tokens, heads, v_width]
  };
  std::vector<Request> requests;
};

// Reads q, k, v and the scales of `args`; rows [0, query_start[B]). `ran`: with fp8 16-bit tensors are rounded to fp8
// first, as the call does it on entry. Every query token sees all of its request's context.
OracleResult prefill_oracle(const PrefillProblem& problem, const PrefillLengths& lengths, const PrefillArgs& args,
                            PrefillMath ran, const ExpandedContext& context = {});

}  // namespace latte::testkit
