// A prefill call in a .safetensors file: what `latte run` replays and `latte capture --op prefill` writes.
//
//   q [Tq, H, qk], k [Tk, H, qk], v [Tk, H, v]        BF16, F16, F32 or F8_E4M3, all three the same
//   query_start [B + 1], kv_start [B + 1]             I32 or I64
//   q_scale, k_scale, v_scale     optional, F32, one number or [H]
//   expect.out [Tq, H, v], expect.lse [Tq, H]         optional, BF16, F16 or F32
// Metadata: op=prefill, scale (required), mask=causal|none, math=auto|half|fp8. Without them: causal, auto.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/safetensors.hpp"
#include "latte/prefill.hpp"
#include "testkit/oracle.hpp"
#include "testkit/prefill_batch.hpp"

namespace latte::cli {

struct CapturedPrefill {
  PrefillProblem problem;
  std::vector<std::int32_t> query_start, kv_start;
  PrefillArgs args;  // inputs only; views into the file's tensors
  const FileTensor* expect_out = nullptr;
  const FileTensor* expect_lse = nullptr;

  std::int64_t rows() const { return args.q.shape[0]; }
  PrefillLengths lengths() const { return {.query_start = query_start, .kv_start = kv_start}; }
  Limits limits() const;
};

// `file` must outlive the call. Checks what is needed to hand the call to the library, which checks the rest.
Result<CapturedPrefill> read_captured_prefill(const Safetensors& file);

// `batch` must be dense and without context. `expect` may be null.
Status save_captured(const std::string& path, const testkit::PrefillBatch& batch, const testkit::OracleResult* expect);

}  // namespace latte::cli
