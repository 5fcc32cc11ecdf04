// gather_kv: a warp a token, a value a lane at a time.
#include <algorithm>

#include "cuda/ops/ops.hpp"
#include "cuda/ops/values.cuh"
#include "cuda/prim/launch.cuh"

namespace latte::cuda {
namespace {

constexpr std::int32_t kThreads = 256, kWarps = kThreads / 32;

__device__ float load_value(const std::byte* token, KvFormat format, float kv_scale, std::int32_t i) {
  const auto half = [](const std::byte* values, std::int32_t at) {
    return reinterpret_cast<const std::uint16_t*>(values)[at];
  };
  const auto e4m3 = [&](std::int32_t at) { return e4m3_to_f32(static_cast<std::uint8_t>(token[at])); };
  switch (format) {
    case KvFormat::bf16: return bf16_to_f32(half(token, i));
    case KvFormat::f16: return f16_to_f32(half(token, i));
    case KvFormat::f32: return reinterpret_cast<const float*>(token)[i];
    case KvFormat::fp8_e4m3: return e4m3(i) * kv_scale;
    case KvFormat::fp8_ds_mla: break;
  }
  if (i >= kDsMlaGroups * kDsMlaGroup)
    return bf16_to_f32(half(token + kDsMlaRopeOffset, i - kDsMlaGroups * kDsMlaGroup));
  return e4m3(i) * reinterpret_cast<const float*>(token + kDsMlaScaleOffset)[i / kDsMlaGroup];
}

// The request that owns a row: the last one that begins at or before it.
__device__ std::int32_t owner(const GatherKvCall& call, std::int32_t row) {
  std::int32_t low = 0, high = call.requests;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    if (__ldg(call.out_start + middle) <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) gather_kv_kernel(const __grid_constant__ GatherKvCall call) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % 32;
  const std::int64_t size = dtype_size(call.out_dtype);
  const float kv_scale = call.kv_scale.ptr ? *call.kv_scale.ptr : call.kv_scale.value;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < call.tokens;
       row += std::int64_t{gridDim.x} * kWarps) {
    const std::int32_t request = owner(call, static_cast<std::int32_t>(row));
    // Lengths, places in the list and ids are trusted, but nothing outside list and cache is read.
    const std::int32_t position =
        max(call.first_token + static_cast<std::int32_t>(row) - __ldg(call.out_start + request), 0);
    const CacheView& kv = call.kv;
    const std::int32_t page = position / kv.page_size;
    std::int64_t id = 0;
    if (kv.list_pages > 0) {
      const std::int64_t listed =
          kv.indptr ? min(max(std::int64_t{__ldg(kv.indptr + request)} + page, std::int64_t{0}), kv.list_pages - 1)
                    : std::int64_t{request} * kv.row_stride + min(std::int64_t{page}, kv.list_pages - 1);
      id = min(max(std::int64_t{__ldg(kv.pages + listed)}, std::int64_t{0}), kv.page_count - 1);
    }
    const std::byte* token = static_cast<const std::byte*>(kv.data) + id * kv.page_stride_bytes +
                             (position - page * kv.page_size) * kv.token_stride_bytes;
    std::byte* out = static_cast<std::byte*>(call.out) + row * call.out_stride * size;
    for (std::int32_t i = lane; i < call.width; i += 32) {
      const float value[1] = {load_value(token, call.format, kv_scale, i)};
      store_values(out + i * size, call.out_dtype, value);
    }
  }
}

}  // namespace

cudaError_t launch_gather_kv(const GatherKvCall& call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((call.tokens + kWarps - 1) / kWarps, 1 << 16));
  return prim::launch(gather_kv_kernel, blocks, kThreads, 0, stream, call);
}

}  // namespace latte::cuda
