// A decode call in a .safetensors file: what `latte run` replays and `latte capture` writes.
//
//   q [T, H, latent + rope], or q_nope [T, H, latent] and q_pe [T, H, rope]      BF16, F16, F32 or F8_E4M3
//   kv_cache [pages, page_size, W] (or [pages, page_size, 1, W])                 as kv_format says; U8 serves for fp8
//   block_table [B, max_pages], seq_lens [B], query_start [B + 1]                I32 or I64
//   kv_scale, q_scale            optional, one F32
//   expect.out [T, H, latent], expect.lse [T, H]   optional, BF16, F16 or F32
// Metadata: op=decode, scale (required), mask=causal|none, kv_format, latent, rope. Without them: causal, the cache's
// dtype, and 512 + 64 or the widths of the pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/safetensors.hpp"
#include "latte/decode.hpp"
#include "testkit/batch.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {

struct CapturedCall {
  DecodeProblem problem;
  std::int64_t rows = 0;  // T
  std::vector<std::int32_t> seq_lens, query_start, block_table;
  DecodeArgs args;  // inputs only; views into the file's tensors and into block_table
  const FileTensor* expect_out = nullptr;
  const FileTensor* expect_lse = nullptr;

  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = {}}; }
  Limits limits() const;
};

// `file` must outlive the call. Checks what is needed to hand the call to the library, which checks the rest.
Result<CapturedCall> read_captured(const Safetensors& file);

// `batch` must have a dense cache and joined q. `expect` may be null.
Status save_captured(const std::string& path, const testkit::DecodeBatch& batch, const testkit::OracleResult* expect);

}  // namespace latte::cli
