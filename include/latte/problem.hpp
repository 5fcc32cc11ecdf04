// What stays the same from step to step: the attention's shape and the limits every buffer is sized for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "latte/tensor.hpp"

namespace latte {

// How a token lies in the KV cache. K = all latent + rope values of a token, V = its first `latent` values.
enum class KvFormat : std::uint8_t {
  bf16,
  f16,
  f32,
  fp8_e4m3,    // latent + rope e4m3 bytes; value = stored * kv_scale
  fp8_ds_mla,  // 656 bytes: 512 e4m3, 4 fp32 scales (one per 128 values), 64 bf16 rope values
};
inline constexpr KvFormat kLastKvFormat = KvFormat::fp8_ds_mla;

enum class Mask : std::uint8_t {
  causal,  // bottom-right aligned: query j of n sees KV positions <= seq_len - n + j
  none,
};

const char* kv_format_name(KvFormat format);
const char* mask_name(Mask mask);
// The dtype of the cache view's elements and their number per token.
Dtype kv_element_dtype(KvFormat format);
std::int64_t kv_token_elements(KvFormat format, std::int32_t latent, std::int32_t rope);

// Which kernel runs depends on these fields and on the limits, never on a step's lengths.
struct DecodeProblem {
  std::int32_t heads = 0;  // query heads on this rank, any number >= 1
  std::int32_t latent = 512;
  std::int32_t rope = 64;
  Dtype q_dtype = Dtype::bf16;
  Dtype out_dtype = Dtype::bf16;
  KvFormat kv_format = KvFormat::bf16;
  std::int32_t page_size = 64;  // tokens a page, any number >= 1
  Mask mask = Mask::causal;
};

// How prefill multiplies.
enum class PrefillMath : std::uint8_t {
  automatic,  // fp8 where q, k and v are fp8 and the machine multiplies fp8, else half
  half,       // 16-bit (or fp32 where the tensors or the machine ask for it); fp8 tensors are converted on entry
  fp8,        // 16-bit tensors are quantised on entry with the scales of the call; half where the machine has no fp8
};

const char* prefill_math_name(PrefillMath math);

// Older tokens of the requests, in the paged cache.
struct PrefillContext {
  std::int32_t latent = 512;
  std::int32_t rope = 64;
  KvFormat kv_format = KvFormat::bf16;
  std::int32_t page_size = 64;
  std::int32_t max_tokens = 0;  // of one request
  // Of a step; 0 = max_requests * max_tokens. A slot keeps a plan for every chunk that this allows.
  std::int64_t max_total_tokens = 0;
  // Most a slot may use for chunks and what joins them; 0 = 256 MiB, or what the smallest chunks need if that is more.
  std::int64_t workspace_bytes = 0;
};

// Which kernel runs depends on these fields and on the limits, never on a step's lengths.
struct PrefillProblem {
  std::int32_t heads = 0;  // on this rank, any number >= 1
  std::int32_t qk_width = 192;
  std::int32_t v_width = 128;
  Dtype dtype = Dtype::bf16;  // of q, k and v: bf16, f16, f32 or fp8_e4m3
  Dtype out_dtype = Dtype::bf16;
  Mask mask = Mask::causal;
  PrefillMath math = PrefillMath::automatic;
  std::optional<PrefillContext> context{};
};

struct Limits {
  std::int32_t max_requests = 0;
  std::int32_t max_query_tokens = 1;        // of one request
  std::int32_t max_total_query_tokens = 0;  // of a step; 0 = max_requests * max_query_tokens
  std::int32_t max_kv_tokens = 0;           // of one request
  std::int64_t max_total_kv_tokens = 0;     // of a step; 0 = max_requests * max_kv_tokens
  // 0 = all the backend has. On cuda: multiprocessors. In decode, above 64 rows (heads * max_query_tokens) two of them
  // form one worker of the plan, so PlanConfig::workers is half of this, and at least 2 are needed.
  std::int32_t workers = 0;
};

// The lengths of one step. They are copied; nothing needs to outlive the call they are passed to.
struct StepLengths {
  std::span<const std::int32_t> seq_lens{};     // [B] KV tokens, this step's query tokens included
  std::span<const std::int32_t> query_start{};  // [B + 1] prefix sums of the query lengths
  // Optional, [query_start[B]]: query token t sees the first visible[t] of its request's tokens on this rank. Replaces
  // the mask (context parallelism). Must lie in [0, seq_len].
  std::span<const std::int32_t> visible{};
};

// The lengths of one prefill step. They are copied.
struct PrefillLengths {
  std::span<const std::int32_t> query_start{};  // [B + 1] prefix sums of the query lengths
  std::span<const std::int32_t> kv_start{};     // [B + 1] prefix sums of the lengths of k and v
  // Only with PrefillProblem::context, [B]: tokens of the request in the cache, all seen by all of its query tokens.
  // Empty = none has any.
  std::span<const std::int32_t> context_lens{};
};

}  // namespace latte
