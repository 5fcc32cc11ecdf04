// The operations around decode as kernels: what src/cpu/ops.cpp does, and a look at lengths and page ids where the host
// cannot see them. Arguments are validated already; addresses are on the device unless said otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/cuda.hpp"

namespace latte::cuda {

// The bytes the CPU would write. Slots that are negative or behind the cache's last page are skipped. The cache's
// base and strides are multiples of an element, and of 4 bytes for fp8_ds_mla.
cudaError_t launch_write_kv(const WriteKvCall& call, cudaStream_t stream);

// Row out_start[b] + i of `out` gets token first_token + i of request b, fp8 ones multiplied out.
cudaError_t launch_gather_kv(const GatherKvCall& call, cudaStream_t stream);

// In the order of the parts, at most kMaxMergeParts. `out` and its lse may be a part's own.
cudaError_t launch_merge(const MergeCall& call, cudaStream_t stream);

// Finds the first thing wrong: of the lowest request, there in the order of Finding, there at the lowest position, and
// tells it in `call.report`, in device or pinned host memory. A report that has not been collected yet (`finding` not
// none) stays as it is. What position and value are:
//   seq_len      0: the length itself, 1: the sum of the lengths up to here; value: the length
//   query_start  0 or 1: query_start[request + position], which is the value
//   visible      query token within the request; value: its bound
//   page_list    0; value: pages listed for the request, -1 where the bounds of its list make no sense
//   page_id      page within the request; value: its id
cudaError_t launch_validate(const ValidateCall& call, cudaStream_t stream);

}  // namespace latte::cuda
