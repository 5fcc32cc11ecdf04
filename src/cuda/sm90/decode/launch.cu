#include <algorithm>
#include <bit>

#include "cuda/sm90/common/tensor_map.hpp"
#include "cuda/sm90/decode/instances.cuh"
#include "cuda/sm90/decode/launch.hpp"

namespace latte::cuda {

namespace {

sm90::Instance find(const DecodeKernel& kernel) {
  if (kernel.dtype == Dtype::bf16)
    return kernel.latent == 512 ? sm90::find_bf16_512(kernel.rows, kernel.whole_slabs)
                                : sm90::find_bf16_256(kernel.rows, kernel.whole_slabs);
  return kernel.latent == 512 ? sm90::find_f16_512(kernel.rows, kernel.whole_slabs)
                              : sm90::find_f16_256(kernel.rows, kernel.whole_slabs);
}

// log2 of the slabs of 8 tokens that a box holds: a power of two that divides the page, so that a box never leaves its
// page, and no more than the kernel takes.
std::int32_t box_slabs_log2(std::int32_t page_size, int most_tokens) {
  const auto log2 = [](int tokens) { return std::countr_zero(static_cast<std::uint32_t>(tokens)); };
  return std::min(log2(page_size), log2(most_tokens)) - 3;
}

// The cache as {64 columns, 8 tokens, groups of columns, slabs of a page, pages}, swizzled as the matrix instructions
// read it. A box is a part's columns of some slabs: what a stage holds, in the stage's order.
cudaError_t make_map(const DecodeKernel& kernel, const CacheView& kv, int parts, std::int32_t slabs, CUtensorMap& map) {
  const EncodeTensorMap encode = encode_tensor_map();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto groups = static_cast<cuuint32_t>((kernel.latent + kernel.rope) / 64);
  const auto token_stride = static_cast<cuuint64_t>(kv.token_stride_bytes);
  const cuuint64_t extent[5] = {64, 8, groups, static_cast<cuuint64_t>(kv.page_size / 8),
                                static_cast<cuuint64_t>(kv.page_count)};
  const cuuint64_t stride[4] = {token_stride, 128, 8 * token_stride, static_cast<cuuint64_t>(kv.page_stride_bytes)};
  const cuuint32_t box[5] = {64, 8, groups / parts, static_cast<cuuint32_t>(slabs), 1};
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      kernel.dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // A token's 1152 bytes are no multiple of 256: promotion to 256 would fetch what nobody asked for.
  const CUresult result =
      encode(&map, type, 5, const_cast<void*>(kv.data), extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encode_error(result);
}

}  // namespace

cudaError_t prepare_decode(const DecodeKernel& kernel) {
  const sm90::Instance instance = find(kernel);
  if (instance.function == nullptr) return cudaErrorInvalidDeviceFunction;
  return cudaFuncSetAttribute(instance.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(instance.shared_bytes));
}

cudaError_t launch_decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers,
                          bool overlap_previous, cudaStream_t stream) {
  const sm90::Instance instance = find(kernel);
  if (instance.function == nullptr) return cudaErrorInvalidDeviceFunction;
  CUtensorMap map{};
  sm90::LaunchShape shape{
      .overlap_previous = overlap_previous,
      .kv_fits_l2 = kernel.kv_fits_l2,
      .blocks_a_worker = kernel.blocks_a_worker,
      .by_page_size = sm90::Divider(call.kv.page_size),
      .last_page = static_cast<std::int32_t>(std::min<std::int64_t>(call.kv.page_count, INT32_MAX) - 1),
      .box_slabs_log2 = kernel.whole_slabs ? box_slabs_log2(call.kv.page_size, instance.box_tokens) : -1};
  if (kernel.whole_slabs)
    if (const cudaError_t error = make_map(kernel, call.kv, instance.parts, 1 << shape.box_slabs_log2, map);
        error != cudaSuccess)
      return error;

  // Cooperative: all thread blocks run at once, so that the merge may wait. A pair is a cluster: both halves of a tile
  // run at the same time and the second read of a page comes from L2.
  cudaLaunchAttribute attributes[3]{};
  unsigned count = 0;
  attributes[count].id = cudaLaunchAttributeCooperative;
  attributes[count++].val.cooperative = 1;
  if (kernel.blocks_a_worker > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(kernel.blocks_a_worker), 1, 1};
  }
  // Thread blocks may take their places while the launch before ends. Without overlap_previous they do nothing there
  // but wait for it.
  if (kernel.dependent_launch || overlap_previous) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(workers * kernel.blocks_a_worker));
  config.blockDim = dim3(instance.threads);
  config.dynamicSmemBytes = instance.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  sm90::KernelCall kernel_call{call, sm90::Divider(call.heads)};
  void* arguments[] = {&kernel_call, &shape, &map};
  return cudaLaunchKernelExC(&config, instance.function, arguments);
}

}  // namespace latte::cuda
