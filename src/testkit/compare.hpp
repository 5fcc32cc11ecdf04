// Results against the oracle.
#pragma once

#include <cstdint>
#include <string>

#include "latte/tensor.hpp"
#include "testkit/case.hpp"
#include "testkit/oracle.hpp"

namespace latte::testkit {

// The place that differs most, measured against what is allowed there.
struct Worst {
  std::int64_t token = 0;
  std::int32_t head = 0;
  std::int32_t column = -1;  // -1: the LSE
  double got = 0;
  double want = 0;
};

struct Comparison {
  bool ok = true;
  double out_error = 0;  // |out - oracle| / |oracle| over the whole batch
  double row_error = 0;  // the same for the worst (token, head) row
  double lse_error = 0;  // largest absolute difference
  Tolerance tolerance;
  double out_allowed = 0;  // what out_error may be: batch_factor() times the tolerance
  Worst worst;
  std::string message;  // empty when ok, otherwise one line: what failed, where, got and want
};

// A single row may be off by this many times the batch's tolerance: rounding is not spread evenly over rows, and yet
// one wrong row must not hide among thousands of good ones.
inline constexpr double kRowFactor = 4;
// What a batch may be off by, in terms of the tolerance: one row alone has nothing to average its rounding with. One in
// some thousands of bf16 rows is above its tolerance, by up to a quarter.
constexpr double batch_factor(double rows) { return 1 + 0.5 / rows; }

// `out` [T, H, latent] and `lse` (fp32 [T, H], may be empty); rows [0, oracle.tokens) are looked at.
Comparison compare(const ConstTensorView& out, const ConstTensorView& lse, const OracleResult& oracle,
                   const Tolerance& tolerance);

// What a call wrote, to hold another one against. `lse` may be empty.
OracleResult written(const ConstTensorView& out, const ConstTensorView& lse);

}  // namespace latte::testkit
