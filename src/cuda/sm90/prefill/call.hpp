// What a prefill launch is told: addresses on the device, strides, and the plan. Plain data, the same for host and
// device code; validated already.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/call.hpp"

namespace latte::cuda {

// [tokens, heads, width], strides in elements. `tokens` are those of the tensor, not of the step: a captured launch
// serves later steps too, whose plans say which there are.
struct PrefillTensor {
  const void* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  std::int32_t tokens = 0;
};

inline constexpr std::int32_t kPrefillRows = 128;   // query tokens a tile
inline constexpr std::int32_t kPrefillBlock = 128;  // KV tokens a block
inline constexpr std::int32_t kPrefillWidth = 192;  // of q and k
inline constexpr std::int32_t kPrefillValues = 128;

// fp8: values as the products take them, which the launch makes of v as it goes along: [heads][blocks], 128 columns of
// 128 tokens each, as they are to lie in shared memory. Every request has blocks of its own, with zeros behind its last
// token. Words are numbers of launches and zero before the first. They count modulo 2^32: a block that no launch used
// in exactly so many would be taken for ready, which is days of nothing but launches.
struct TransposedValues {
  std::byte* data = nullptr;
  std::int32_t blocks = 0;            // of a head; with all heads they are fewer than 2^31, or would be 32 TB
  std::uint32_t* launches = nullptr;  // so far
  std::uint32_t* counted = nullptr;   // thread blocks of this one that know its number
  std::uint32_t* claimed = nullptr;   // [heads][blocks]: the last launch in which somebody took it upon himself
  std::uint32_t* ready = nullptr;     // [heads][blocks]: the last launch in which it is there
};
// The first block of a request: request b begins with block kv_start[b] / 128 + b, which leaves room for all of its
// own. With x = kv_start[b], y = kv_start[b + 1]:  y / 128 - x / 128 + 1 >= (y - x) / 128 + 1 >= ceil((y - x) / 128).
constexpr std::int32_t transposed_begin(std::int32_t kv_start, std::int32_t request) {
  return kv_start / kPrefillBlock + request;
}
constexpr std::int64_t transposed_blocks(std::int64_t kv_tokens, std::int64_t requests) {
  return kv_tokens / kPrefillBlock + requests;
}

struct PrefillCall {
  std::int32_t heads = 1;
  Mask mask = Mask::causal;
  float scale = 1;
  PrefillTensor q, k, v;
  Fp8Scale q_scale, k_scale, v_scale;
  OutputView out;
  std::int32_t out_tokens = 0;  // rows of q, out and lse: those of later steps behind them are dropped
  const std::int32_t* query_start = nullptr;
  const std::int32_t* kv_start = nullptr;
  const std::int32_t* meta = nullptr;  // the plan's work_meta_data
  PlanView plan;
  PrefillWorkspace workspace;  // arrived: [2 * tiles], one for each warpgroup's half of a tile
  TransposedValues values;     // fp8
};

// Which kernel serves a problem: the type it multiplies.
struct PrefillKernel {
  Dtype dtype = Dtype::bf16;  // bf16, f16 or fp8_e4m3
};

struct ConvertCall {
  PrefillTensor from;
  Dtype from_dtype = Dtype::bf16;  // bf16 and f16 become fp8, fp8 becomes f16
  Fp8Scale scale;  // to fp8: divided by it. From fp8 the values stay as they are: the kernel knows the scale.
  std::int32_t heads = 1, width = kPrefillWidth;
  void* to = nullptr;  // [tokens, heads, width], dense
};

}  // namespace latte::cuda
