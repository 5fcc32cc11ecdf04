// The CPU room's front door: what the backend room needs to run decode, prefill, merge, cache writes and gathers on
// resident threads.
// Arguments here are validated already; nothing below returns an error, but for what asks the system for memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/workers.hpp"
#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte::cpu {

// Where a query row's values lie, in one part or two. Strides in elements of `dtype`. Decode from one tensor: rope =
// nope + latent; prefill: all of it is nope.
struct QueryView {
  const std::byte* nope = nullptr;
  const std::byte* rope = nullptr;
  std::int32_t nope_width = 512, rope_width = 64;
  std::int64_t nope_token_stride = 0, nope_head_stride = 0;
  std::int64_t rope_token_stride = 0, rope_head_stride = 0;
  Dtype dtype = Dtype::bf16;
};

// Where a token lies in the paged cache. Strides in bytes.
struct CacheView {
  const std::byte* data = nullptr;
  std::int64_t page_stride_bytes = 0, token_stride_bytes = 0;
  std::int32_t page_size = 1;
  KvFormat format = KvFormat::bf16;
  // Page p of request b is pages[b * row_stride + p], or, when indptr is set, pages[indptr[b] + p].
  const std::int32_t* pages = nullptr;
  std::int64_t row_stride = 0;
  const std::int32_t* indptr = nullptr;
};

// Strides in elements.
struct OutputView {
  std::byte* out = nullptr;
  std::int64_t out_token_stride = 0, out_head_stride = 0;
  Dtype dtype = Dtype::bf16;
  float* lse = nullptr;  // may be null
  std::int64_t lse_token_stride = 0, lse_head_stride = 0;

  std::byte* row(std::int64_t token, std::int64_t head) const {
    return out + (token * out_token_stride + head * out_head_stride) * static_cast<std::int64_t>(dtype_bytes(dtype));
  }
  float* lse_at(std::int64_t token, std::int64_t head) const {
    return lse ? lse + token * lse_token_stride + head * lse_head_stride : nullptr;
  }
};

struct Kernel;

struct DecodeCall {
  const Kernel* kernel = nullptr;
  const Plan* plan = nullptr;
  std::int32_t heads = 1, latent = 512, rope = 64;
  Mask mask = Mask::causal;
  StepLengths lengths;
  QueryView q;
  CacheView kv;
  OutputView out;
  float score_scale = 1;  // scale * q_scale * kv_scale
  float value_scale = 1;  // kv_scale
  std::byte* workspace = nullptr;
};

// Keys or values [tokens, heads, width] of prefill. Strides in bytes.
struct HeadsView {
  const std::byte* data = nullptr;
  std::int64_t token_stride_bytes = 0, head_stride_bytes = 0;
};

// One number for each head, or, with a stride of 0, for all of them.
struct HeadScale {
  const float* data = nullptr;
  std::int64_t stride = 0;
  float at(std::int64_t head) const { return data[head * stride]; }
};

struct PrefillCall {
  const Kernel* kernel = nullptr;
  const Plan* plan = nullptr;
  std::int32_t qk_width = 192, v_width = 128;
  Mask mask = Mask::causal;
  std::span<const std::int32_t> query_start;
  std::span<const std::int32_t> kv_start;
  QueryView q;
  HeadsView k, v;  // of q's dtype
  OutputView out;
  float scale = 1;
  HeadScale q_scale, k_scale, v_scale;
  std::byte* workspace = nullptr;
};

// Kernels of this build, best first. `usable` follows from the machine and the operating system.
struct KernelListing {
  const Kernel* kernel;
  std::string_view name;
  bool usable;
  std::string reason;  // why not usable; empty otherwise
  std::string_view serves;
};
const std::vector<KernelListing>& kernels();
std::string cpu_name();
std::string feature_text();

// The best usable kernel for the problem, or the one named by `override_name` ("auto" = best). Null with a reason
// when there is none.
const Kernel* choose_kernel(const DecodeProblem& problem, std::string_view override_name, std::string& reason);
const Kernel* choose_kernel(const PrefillProblem& problem, std::string_view override_name, std::string& reason);
std::string_view kernel_name(const Kernel& kernel);

// Tile sizes, cost constants and the default chunk of a kernel for a problem; limits and policy are copied in.
PlanConfig plan_config(const Kernel& kernel, const DecodeProblem& problem, const Limits& limits, const Policy& policy,
                       std::int32_t workers);
PlanConfig plan_config(const Kernel& kernel, const PrefillProblem& problem, const Limits& limits, const Policy& policy,
                       std::int32_t workers);

// Bytes of workspace (64-byte aligned) that a call needs: partials, per-tile counters, a scratch area per worker.
std::size_t workspace_bytes(const Kernel& kernel, const DecodeProblem& problem, const PlanConfig& config,
                            const PlanSizes& sizes);
std::size_t workspace_bytes(const Kernel& kernel, const PrefillProblem& problem, const PlanConfig& config,
                            const PlanSizes& sizes);

void run_decode(Workers& workers, const DecodeCall& call);
void run_prefill(Workers& workers, const PrefillCall& call);

struct MergePart {
  const std::byte* out;
  std::int64_t token_stride, head_stride;
  Dtype dtype;
  const float* lse;
  std::int64_t lse_token_stride, lse_head_stride;
};
// tokens * heads rows of `latent` values each.
void run_merge(Workers& workers, std::span<const MergePart> parts, std::int64_t tokens, std::int32_t heads,
               std::int32_t latent, const OutputView& out);

struct WriteKvCall {
  const std::byte* kv_c;
  const std::byte* k_pe;
  std::int64_t kv_c_stride, k_pe_stride;  // elements
  Dtype dtype;                            // of kv_c and k_pe
  std::span<const std::int64_t> slots;
  std::byte* cache;
  std::int64_t page_stride_bytes, token_stride_bytes;
  std::int32_t page_size, latent, rope;
  KvFormat format;
  float kv_scale;
};
void run_write_kv(Workers& workers, const WriteKvCall& call);

// Row out_start[b] + i gets token first_token + i of request b.
struct GatherKvCall {
  CacheView kv;
  std::int32_t width;  // latent + rope
  float kv_scale;
  std::int32_t first_token;
  std::span<const std::int32_t> out_start;
  std::byte* out;
  std::int64_t out_stride;  // elements
  Dtype dtype;
};
void run_gather_kv(Workers& workers, const GatherKvCall& call);

// Streaming read bandwidth and the kernel's arithmetic rate on all workers; about a second. An error where there is no
// memory to read.
struct MeasuredCeilings {
  double read_gbps, tflops;
};
Result<MeasuredCeilings> measure_ceilings(Workers& workers, const Kernel& kernel);

}  // namespace latte::cpu
