// What a decode launch is told: addresses on the device, strides, and the plan. Plain data, the same for host and
// device code; validated already.
#pragma once

#include <cstdint>

#include "latte/plan.hpp"
#include "latte/problem.hpp"

namespace latte::cuda {

// Strides in elements of the query's dtype. With one tensor, rope = nope + latent.
struct QueryView {
  const void* nope = nullptr;
  const void* rope = nullptr;
  std::int64_t nope_token_stride = 0, nope_head_stride = 0;
  std::int64_t rope_token_stride = 0, rope_head_stride = 0;
};

// Where a token lies in the paged cache. Page p of request b is pages[b * row_stride + p], or, when indptr is set,
// pages[indptr[b] + p].
struct CacheView {
  const void* data = nullptr;
  std::int64_t page_stride_bytes = 0, token_stride_bytes = 0;
  std::int64_t page_count = 0;  // pages of the cache: ids are clamped to it
  std::int32_t page_size = 1;
  const std::int32_t* pages = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t list_pages = 0;  // entries a block table row, or of the whole list: positions are clamped to it
  const std::int32_t* indptr = nullptr;
};

// Strides in elements.
struct OutputView {
  void* out = nullptr;
  std::int64_t out_token_stride = 0, out_head_stride = 0;
  Dtype dtype = Dtype::bf16;
  float* lse = nullptr;  // may be null
  std::int64_t lse_token_stride = 0, lse_head_stride = 0;
};

// The lengths of a step, on the device.
struct LengthsView {
  const std::int32_t* seq_lens = nullptr;
  const std::int32_t* query_start = nullptr;
  const std::int32_t* visible = nullptr;  // may be null
};

// The plan's arrays on the device, at the places plan::carve() gives them.
struct PlanView {
  const std::int32_t* indptr = nullptr;
  const WorkRecord* records = nullptr;
  const std::int32_t* reduce_indptr = nullptr;
  const std::int32_t* reduce_partial_map = nullptr;
};

// Scratch of one slot of prefill, on the device. `arrived` is zero before the first launch and after every launch.
struct PrefillWorkspace {
  std::uint32_t* arrived = nullptr;  // [2 * tiles] of the plan's limits: one for each half of a tile
  float* partial_lse = nullptr;      // [partial rows]
  float* partial_out = nullptr;      // [partial rows][width of v]
};

// The same of decode. Values of partials are of 16 bits; what belongs to a row of them stands apart, so that rows are
// whole lines of the cache, if the workspace begins with one.
struct DecodeWorkspace {
  static constexpr std::int32_t kTailBytes = 16;
  static constexpr std::int64_t row_bytes(std::int32_t latent) { return 2 * latent + kTailBytes; }

  std::uint32_t* arrived = nullptr;
  std::byte* values = nullptr;  // [partial rows][latent]
  std::byte* tails = nullptr;   // [partial rows][kTailBytes]
};

struct DecodeCall {
  std::int32_t heads = 1;
  Mask mask = Mask::causal;
  float scale = 1;
  std::int32_t query_tokens = 0;  // rows of q and out: T
  QueryView q;
  CacheView kv;
  OutputView out;
  LengthsView lengths;
  PlanView plan;
  DecodeWorkspace workspace;
};

// Which kernel serves a problem: follows from problem and limits alone, never from lengths.
struct DecodeKernel {
  std::int32_t rows = 16;            // query rows a thread block computes: 16, 32, 48 or 64
  std::int32_t blocks_a_worker = 1;  // 2: a pair of thread blocks shares a tile, each takes half of its rows
  Dtype dtype = Dtype::bf16;         // of q and of the cache
  std::int32_t latent = 512, rope = 64;
  bool whole_slabs = true;       // pages of a multiple of 8 tokens: the copy engine loads them; else threads do
  bool kv_fits_l2 = false;       // KV and partials of the largest step do, together
  bool dependent_launch = true;  // thread blocks may take their places while the launch before still has its own
};

}  // namespace latte::cuda
