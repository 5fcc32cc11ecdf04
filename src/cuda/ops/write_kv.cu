// write_kv: a thread block a token. New tokens are few and small, so a thread takes one value at a time.
#include <algorithm>
#include <cfloat>

#include "cuda/ops/ops.hpp"
#include "cuda/ops/values.cuh"
#include "cuda/prim/launch.cuh"
#include "cuda/prim/sync.cuh"

namespace latte::cuda {
namespace {

constexpr std::int32_t kThreads = 128, kLanes = 32;
static_assert(kThreads == kDsMlaGroups * kLanes, "fp8_ds_mla: a warp a group");

__device__ float value_at(const void* row, Dtype dtype, std::int32_t i) {
  float value[1];
  load_values(static_cast<const std::byte*>(row) + i * dtype_size(dtype), dtype, value);
  return value[0];
}

__device__ void store_value(std::byte* token, KvFormat format, std::int32_t i, float value, float kv_scale) {
  switch (format) {
    case KvFormat::bf16: reinterpret_cast<std::uint16_t*>(token)[i] = f32_to_bf16(value); return;
    case KvFormat::f16: reinterpret_cast<std::uint16_t*>(token)[i] = f32_to_f16(value); return;
    case KvFormat::f32: reinterpret_cast<float*>(token)[i] = value; return;
    case KvFormat::fp8_e4m3: token[i] = static_cast<std::byte>(quotient_to_e4m3(value, kv_scale)); return;
    case KvFormat::fp8_ds_mla: return;  // write_ds_mla
  }
}

__device__ void write_ds_mla(Dtype dtype, const std::byte* latent, const std::byte* rope, std::byte* token) {
  constexpr std::int32_t kEach = kDsMlaGroup / kLanes;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), lane = thread % kLanes, group = thread / kLanes;
  float values[kEach], largest = 0;
#pragma unroll
  for (std::int32_t i = 0; i < kEach; ++i) {
    values[i] = value_at(latent, dtype, group * kDsMlaGroup + i * kLanes + lane);
    const float magnitude = fabsf(values[i]);
    largest = largest < magnitude ? magnitude : largest;  // a NaN has no say
  }
#pragma unroll
  for (std::int32_t step = kLanes / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const float scale = fmaxf(largest / kE4m3Max, FLT_MIN);
  if (lane == 0) reinterpret_cast<float*>(token + kDsMlaScaleOffset)[group] = scale;
#pragma unroll
  for (std::int32_t i = 0; i < kEach; ++i)
    token[group * kDsMlaGroup + i * kLanes + lane] = static_cast<std::byte>(quotient_to_e4m3(values[i], scale));
  if (thread < kDsMlaRope)
    store_value(token + kDsMlaRopeOffset, KvFormat::bf16, thread, value_at(rope, dtype, thread), 1);
}

__global__ void __launch_bounds__(kThreads) write_kv_kernel(const __grid_constant__ WriteKvCall call) {
  prim::allow_next_launch();  // a decode that overlaps waits for the end of this one before it reads what is written
                              // here
  const auto* kv_c = static_cast<const std::byte*>(call.kv_c);
  const auto* k_pe = static_cast<const std::byte*>(call.k_pe);
  const std::int64_t size = dtype_size(call.dtype);
  const float kv_scale = call.kv_scale.ptr ? *call.kv_scale.ptr : call.kv_scale.value;
  for (std::int64_t n = blockIdx.x; n < call.tokens; n += gridDim.x) {
    const std::int64_t slot = call.slots[n];
    if (slot < 0) continue;
    const std::int64_t page = slot / call.page_size;
    if (page >= call.page_count) continue;
    const std::byte* latent = kv_c + n * call.kv_c_stride * size;
    const std::byte* rope = k_pe + n * call.k_pe_stride * size;
    std::byte* token = static_cast<std::byte*>(call.cache) + page * call.page_stride_bytes +
                       (slot - page * call.page_size) * call.token_stride_bytes;
    if (call.format == KvFormat::fp8_ds_mla) {
      write_ds_mla(call.dtype, latent, rope, token);
      continue;
    }
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < call.latent + call.rope; i += kThreads) {
      const float value =
          i < call.latent ? value_at(latent, call.dtype, i) : value_at(rope, call.dtype, i - call.latent);
      store_value(token, call.format, i, value, kv_scale);
    }
  }
}

}  // namespace

cudaError_t launch_write_kv(const WriteKvCall& call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(call.tokens, 1 << 20));
  return prim::launch(write_kv_kernel, blocks, kThreads, 0, stream, call);
}

}  // namespace latte::cuda
