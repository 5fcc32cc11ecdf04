#include "cuda/sm90/decode/instances.inl.cuh"

namespace latte::cuda::sm90 {

Instance find_bf16_512(std::int32_t rows, bool whole_slabs) {
  return find_instance<512, __nv_bfloat16>(rows, whole_slabs);
}

}  // namespace latte::cuda::sm90
