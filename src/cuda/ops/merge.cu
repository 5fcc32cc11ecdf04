// merge: L = ln sum e^lse_k, out = sum e^(lse_k - L) out_k, in order of k, as src/cpu/simd/merge-inl.hpp computes it. A
// warp a row: lane k looks at the lse of parts k and k + 32, then each lane joins columns of its own, which it has read
// from every part before it writes them; so the output may be one of the parts.
#include <algorithm>

#include "core/softmax_state.hpp"
#include "cuda/ops/ops.hpp"
#include "cuda/ops/values.cuh"
#include "cuda/prim/launch.cuh"

namespace latte::cuda {
namespace {

constexpr std::int32_t kLanes = 32, kRowsABlock = 8;
constexpr unsigned kAll = 0xffffffffu;
static_assert(kMaxMergeParts == 2 * kLanes, "a lane holds the weights of two parts");

struct Arguments {
  MergePart parts[kMaxMergeParts];
  std::int32_t count, heads, latent;
  std::int64_t rows;
  OutputView out;
};
static_assert(sizeof(Arguments) <= 4096);

// What the parts weigh, for parts lane and lane + 32.
struct Weights {
  float low = 0, high = 0;
  __device__ float of(std::int32_t k) const { return __shfl_sync(kAll, k < kLanes ? low : high, k % kLanes); }
};

template <std::int32_t Width>
__global__ void __launch_bounds__(kRowsABlock* kLanes) merge_kernel(const __grid_constant__ Arguments m) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsABlock + threadIdx.x / kLanes;
  if (row >= m.rows) return;
  const std::int64_t token = row / m.heads, head = row % m.heads;

  const auto lse_of = [&](std::int32_t k) {
    return k < m.count ? m.parts[k].lse[token * m.parts[k].lse_token_stride + head * m.parts[k].lse_head_stride]
                       : kNegInf;
  };
  const float low = lse_of(lane), high = lse_of(lane + kLanes);
  float best = fmaxf(low, high);
#pragma unroll
  for (std::int32_t step = kLanes / 2; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(kAll, best, step));
  const bool empty = __all_sync(kAll, low == kNegInf && high == kNegInf);

  Weights weights;
  float total = 0;
  if (!empty) {
    weights = {expf(low - best), expf(high - best)};
    for (std::int32_t k = 0; k < m.count; ++k) total += weights.of(k);
    const float share = 1.0f / total;
    weights = {weights.low * share, weights.high * share};
  }
  // A part that saw nothing is not even read.
  const unsigned read_low = __ballot_sync(kAll, low != kNegInf), read_high = __ballot_sync(kAll, high != kNegInf);

  for (std::int32_t first = 0; first < m.latent; first += kLanes * Width) {
    const std::int32_t column = first + lane * Width;
    float joined[Width] = {};
    for (std::int32_t k = 0; k < m.count; ++k) {
      if (((k < kLanes ? read_low : read_high) >> (k % kLanes) & 1u) == 0) continue;
      const float weight = weights.of(k);
      if (column >= m.latent) continue;
      const MergePart& part = m.parts[k];
      const std::int64_t element = token * part.token_stride + head * part.head_stride + column;
      float values[Width];
      load_values(static_cast<const std::byte*>(part.out) + element * dtype_size(part.dtype), part.dtype, values);
#pragma unroll
      for (std::int32_t i = 0; i < Width; ++i) joined[i] = fmaf(weight, values[i], joined[i]);
    }
    __syncwarp();
    if (column >= m.latent) continue;
    const std::int64_t element = token * m.out.out_token_stride + head * m.out.out_head_stride + column;
    store_values(static_cast<std::byte*>(m.out.out) + element * dtype_size(m.out.dtype), m.out.dtype, joined);
  }
  if (lane == 0 && m.out.lse != nullptr)
    m.out.lse[token * m.out.lse_token_stride + head * m.out.lse_head_stride] = empty ? kNegInf : best + logf(total);
}

// Rows that begin at multiples of 16 bytes can be read and written in wide words.
bool wide_rows(const void* base, std::int64_t token_stride, std::int64_t head_stride, Dtype dtype) {
  const std::int64_t size = dtype == Dtype::f32 ? 4 : 2;
  return reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && token_stride * size % 16 == 0 &&
         head_stride * size % 16 == 0;
}

}  // namespace

cudaError_t launch_merge(const MergeCall& call, cudaStream_t stream) {
  if (call.parts.size() > kMaxMergeParts) return cudaErrorInvalidValue;
  Arguments m{.parts = {},
              .count = static_cast<std::int32_t>(call.parts.size()),
              .heads = call.heads,
              .latent = call.latent,
              .rows = call.tokens * call.heads,
              .out = call.out};
  if (m.rows == 0) return cudaSuccess;
  std::copy(call.parts.begin(), call.parts.end(), m.parts);
  bool wide = call.latent % 8 == 0 && wide_rows(m.out.out, m.out.out_token_stride, m.out.out_head_stride, m.out.dtype);
  for (const MergePart& part : call.parts)
    wide = wide && wide_rows(part.out, part.token_stride, part.head_stride, part.dtype);
  const std::int64_t blocks = (m.rows + kRowsABlock - 1) / kRowsABlock;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return prim::launch(wide ? merge_kernel<8> : merge_kernel<1>, static_cast<unsigned>(blocks), kRowsABlock * kLanes, 0,
                      stream, m);
}

}  // namespace latte::cuda
