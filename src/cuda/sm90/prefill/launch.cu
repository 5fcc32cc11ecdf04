#include "cuda/sm90/common/tensor_map.hpp"
#include "cuda/sm90/prefill/kernel.cuh"
#include "cuda/sm90/prefill/launch.hpp"

namespace latte::cuda {
namespace {

namespace prefill = sm90::prefill;

struct Instance {
  const void* function;
  std::size_t shared_bytes;
};

template <class T>
Instance instance_of() {
  return {reinterpret_cast<const void*>(&prefill::prefill_kernel<T>), sizeof(prefill::Storage<T>)};
}

Instance find(const PrefillKernel& kernel) {
  if (kernel.dtype == Dtype::bf16) return instance_of<__nv_bfloat16>();
  if (kernel.dtype == Dtype::f16) return instance_of<__half>();
  return instance_of<prefill::Fp8>();
}

CUtensorMapDataType map_type(Dtype dtype) {
  if (dtype == Dtype::bf16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return dtype == Dtype::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// {columns, rows, planes} of a tensor, boxes of some columns and rows of one plane.
struct MapShape {
  std::int64_t columns, rows, planes;
  std::int64_t row_stride_bytes, plane_stride_bytes;
  std::int32_t box_columns, box_rows = kPrefillBlock;
  CUtensorMapSwizzle swizzle;
};

// A tensor without elements gets no map: no piece reads it.
cudaError_t make_map(Dtype dtype, const void* data, const MapShape& shape, CUtensorMap& map) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  const EncodeTensorMap encode = encode_tensor_map();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows),
                                static_cast<cuuint64_t>(shape.planes)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(shape.row_stride_bytes),
                                static_cast<cuuint64_t>(shape.plane_stride_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(shape.box_columns), static_cast<cuuint32_t>(shape.box_rows), 1};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result = encode(&map, map_type(dtype), 3, const_cast<void*>(data), extent, stride, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encode_error(result);
}

// Tokens are rows, heads are planes. The stride of a dimension of one element was not looked at.
MapShape by_head(const PrefillTensor& tensor, std::int32_t heads, std::int32_t width, std::int64_t bytes) {
  const std::int64_t token_stride = tensor.tokens > 1 ? tensor.token_stride : width;
  const std::int64_t head_stride = heads > 1 ? tensor.head_stride : token_stride;
  return {.columns = width,
          .rows = tensor.tokens,
          .planes = heads,
          .row_stride_bytes = token_stride * bytes,
          .plane_stride_bytes = head_stride * bytes,
          .box_columns = prefill::kGroupColumns,
          .swizzle = bytes == 2 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B};
}

cudaError_t make_maps(const PrefillKernel& kernel, const PrefillCall& call, prefill::Maps& maps) {
  const bool fp8 = kernel.dtype == Dtype::fp8_e4m3;
  const std::int64_t bytes = fp8 ? 1 : 2;
  MapShape values = by_head(call.v, call.heads, kPrefillValues, bytes);
  if (fp8) {  // whole rows
    values.box_columns = kPrefillValues;
    values.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  }
  MapShape queries = by_head(call.q, call.heads, kPrefillWidth, bytes);
  queries.box_rows = prefill::kRows / prefill::kConsumers;
  cudaError_t error = make_map(kernel.dtype, call.q.data, queries, maps.q);
  if (error == cudaSuccess)
    error = make_map(kernel.dtype, call.k.data, by_head(call.k, call.heads, kPrefillWidth, bytes), maps.k);
  if (error == cudaSuccess) error = make_map(kernel.dtype, call.v.data, values, maps.v);
  return error;
}

}  // namespace

cudaError_t prepare_prefill(const PrefillKernel& kernel) {
  const Instance instance = find(kernel);
  return cudaFuncSetAttribute(instance.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(instance.shared_bytes));
}

cudaError_t launch_prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers,
                           cudaStream_t stream) {
  const Instance instance = find(kernel);
  prefill::Maps maps{};
  if (const cudaError_t error = make_maps(kernel, call, maps); error != cudaSuccess) return error;
  PrefillCall copy = call;
  void* arguments[] = {&copy, &maps};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(workers));
  config.blockDim = dim3(prefill::kThreads);
  config.dynamicSmemBytes = instance.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelExC(&config, instance.function, arguments);
}

}  // namespace latte::cuda
