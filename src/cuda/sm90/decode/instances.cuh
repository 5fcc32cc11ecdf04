// The kernels that are compiled: rows x widths x 16-bit types. Each file instances_*.cu makes those of one type and
// width, so that they compile side by side.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/call.hpp"
#include "cuda/sm90/common/divider.cuh"

namespace latte::cuda::sm90 {

// What a kernel is called with, and a division that its threads make often.
struct KernelCall : DecodeCall {
  Divider by_heads;
};

struct LaunchShape {
  bool overlap_previous;  // the launch before may still run; it writes only q and slots of the step's own tokens
  bool kv_fits_l2;        // with the partials; else it goes first: plan, queries and partials should stay
  std::int32_t blocks_a_worker;
  Divider by_page_size;
  std::int32_t last_page;       // the largest id of the cache
  std::int32_t box_slabs_log2;  // log2 of the slabs the copy engine brings at a time; -1: threads copy tokens
};

// A compiled kernel; null where `rows` is none of those compiled.
struct Instance {
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  unsigned threads = 0;
  int parts = 1;       // in which a block of KV comes
  int box_tokens = 0;  // the most that the copy engine brings at a time
};
Instance find_bf16_512(std::int32_t rows, bool whole_slabs);
Instance find_bf16_256(std::int32_t rows, bool whole_slabs);
Instance find_f16_512(std::int32_t rows, bool whole_slabs);
Instance find_f16_256(std::int32_t rows, bool whole_slabs);

}  // namespace latte::cuda::sm90
