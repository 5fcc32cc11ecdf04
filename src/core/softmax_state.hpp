// Online softmax of one row as a state that can absorb blocks and be merged. Scores are in log2 units: score * log2(e).
// Empty = (-inf, 0). `max_log2` is the reference the sum and the accumulated output are relative to; it may lag behind
// the true maximum by up to kMaxLag, which saves most rescales and costs no accuracy (sums stay below 2^kMaxLag *
// tokens).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace latte {

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMaxLag = 8.0f;

struct RowState {
  float max_log2 = kNegInf;
  float sum = 0;
};

// Natural log of the sum of exponentials; empty -> -inf. A NaN that came in as a score goes out again.
inline float log_sum_exp(const RowState& state) {
  return state.sum == 0 ? kNegInf : (state.max_log2 + std::log2(state.sum)) * kLn2;
}

// The same for a row that will be joined with others, whose weights are differences of it: fp32 would round it by as
// much as a score of its size.
inline double precise_log_sum_exp(const RowState& state) {
  return state.sum == 0 ? kNegInf : (double{state.max_log2} + std::log2(state.sum)) * std::numbers::ln2;
}

}  // namespace latte
