#include "cuda/sm90/decode/instances.inl.cuh"

namespace latte::cuda::sm90 {

Instance find_f16_256(std::int32_t rows) { return find_instance<256, __half>(rows); }

}  // namespace latte::cuda::sm90
