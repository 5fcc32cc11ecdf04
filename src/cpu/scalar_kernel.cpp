// The fp32 kernel compiled for one lane: runs on anything and is what the vector kernels are compared with.
#define HWY_COMPILE_ONLY_SCALAR
#include "cpu/simd/fp32/kernel-inl.hpp"
#include "cpu/simd/merge-inl.hpp"

namespace latte::cpu {
namespace {
namespace target = HWY_NAMESPACE::fp32;
}

const Kernel& scalar_kernel() {
  static const Kernel kernel{
      .name = "scalar",
      .serves = "every format and width",
      .usable = [](const Features&, std::string&) { return true; },
      .takes = [](Dtype, KvFormat) { return true; },
      .run = target::run,
      .merge_row = HWY_NAMESPACE::merge_row,
      .copy_token = HWY_NAMESPACE::copy_token,
      .scratch_bytes = target::scratch_bytes,
      .max_row_tile = target::kRowTile,
      .speed = {.block_ns = 2400, .row_block_ns = 13400, .granule = 1},
      .prefill_row_tile = target::kPrefillRowTile,
      .prefill_speed = {.block_ns = 18000, .row_block_ns = 4560, .granule = 1},
      .burn = target::burn,
      .enter = [] {},
      .leave = [] {},
  };
  return kernel;
}

}  // namespace latte::cpu
