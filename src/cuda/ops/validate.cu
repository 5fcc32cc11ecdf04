// Validation where the host cannot look. One thread block, a warp a request: it is switched on to find a defect, not
// for speed, and one block needs no memory of its own to agree on which finding is the first.
#include <climits>

#include "cuda/ops/ops.hpp"
#include "cuda/prim/launch.cuh"

namespace latte::cuda {
namespace {

constexpr std::int32_t kThreads = 1024, kLanes = 32, kWarps = kThreads / kLanes;
constexpr unsigned kAll = 0xffffffffu;

// Findings ordered by request, kind and position.
using Key = unsigned long long;
constexpr Key kNothing = ~Key{0};
constexpr int kKindShift = 31, kRequestShift = 35;

__device__ Key key_of(std::int32_t request, Finding kind, std::int64_t position) {
  return static_cast<Key>(request) << kRequestShift | static_cast<Key>(kind) << kKindShift | static_cast<Key>(position);
}

struct Pages {
  const std::int32_t* ids;
  std::int64_t listed;  // negative: the list's bounds make no sense
};

__device__ Pages pages_of(const CacheView& kv, std::int32_t request) {
  if (kv.indptr == nullptr) return {kv.pages + request * kv.row_stride, kv.pages == nullptr ? 0 : kv.list_pages};
  const std::int64_t begin = kv.indptr[request], end = kv.indptr[request + 1];
  if (begin < 0 || end < begin || end > kv.list_pages) return {kv.pages, -1};
  return {kv.pages + begin, end - begin};
}

__device__ Finding check_lengths(const ValidateCall& call, std::int32_t request, std::int32_t& position) {
  const std::int32_t seq_len = call.lengths.seq_lens[request];
  position = 0;
  if (seq_len < 0 || seq_len > call.limits.max_kv_tokens) return Finding::seq_len;
  if (call.lengths.query_start == nullptr) return Finding::none;
  const std::int64_t begin = call.lengths.query_start[request], end = call.lengths.query_start[request + 1];
  if (begin < 0 || (request == 0 && begin != 0)) return Finding::query_start;
  position = 1;
  if (end < begin || end - begin > call.limits.max_query_tokens || end > call.query_tokens ||
      end > call.limits.max_total_query_tokens)
    return Finding::query_start;
  return Finding::none;
}

// Of a request whose lengths are sound, the first so many tokens that some query sees. `first` gets the lane's finding.
__device__ std::int32_t seen_tokens(const ValidateCall& call, std::int32_t request, std::int32_t lane, Key& first) {
  const std::int32_t seq_len = call.lengths.seq_lens[request];
  if (call.lengths.query_start == nullptr) return seq_len;
  const std::int32_t begin = call.lengths.query_start[request], end = call.lengths.query_start[request + 1];
  if (begin == end) return 0;
  if (call.lengths.visible == nullptr) return seq_len;
  std::int32_t seen = 0;
  for (std::int32_t token = begin + lane; token < end; token += kLanes) {
    const std::int32_t visible = call.lengths.visible[token];
    if (visible < 0 || visible > seq_len)
      first = min(first, key_of(request, Finding::visible, token - begin));
    else
      seen = max(seen, visible);
  }
  return __reduce_max_sync(kAll, seen);
}

// The whole warp looks at one request and returns the lane's first finding.
__device__ Key check_request(const ValidateCall& call, std::int32_t request, std::int32_t lane) {
  std::int32_t position = 0;
  if (const Finding finding = check_lengths(call, request, position); finding != Finding::none)
    return key_of(request, finding, position);
  Key first = kNothing;
  const std::int32_t tokens = seen_tokens(call, request, lane, first);
  const std::int64_t needed = (std::int64_t{tokens} + call.kv.page_size - 1) / call.kv.page_size;
  if (needed == 0) return first;
  const Pages pages = pages_of(call.kv, request);
  if (pages.listed < needed) return min(first, key_of(request, Finding::page_list, 0));
  for (std::int64_t p = lane; p < needed; p += kLanes)
    if (pages.ids[p] < 0 || pages.ids[p] >= call.kv.page_count) return min(first, key_of(request, Finding::page_id, p));
  return first;
}

// The first request at which the sum of lengths passes its limit; by one warp.
__device__ Key check_total(const ValidateCall& call, std::int32_t requests, std::int32_t lane) {
  std::int64_t sum = 0;
  for (std::int32_t first = 0; first < requests; first += kLanes) {
    const std::int32_t request = first + lane;
    const std::int32_t own = request < requests ? max(call.lengths.seq_lens[request], 0) : 0;
    long long up_to = own;
    for (std::int32_t step = 1; step < kLanes; step *= 2) {
      const long long below = __shfl_up_sync(kAll, up_to, static_cast<unsigned>(step));
      if (lane >= step) up_to += below;
    }
    const unsigned over = __ballot_sync(kAll, sum + up_to > call.limits.max_total_kv_tokens);
    if (over != 0) return key_of(first + __ffs(static_cast<int>(over)) - 1, Finding::seq_len, 1);
    sum += __shfl_sync(kAll, up_to, kLanes - 1);
  }
  return kNothing;
}

__device__ std::int32_t value_of(const ValidateCall& call, Finding kind, std::int32_t request, std::int32_t position) {
  switch (kind) {
    case Finding::none: return 0;
    case Finding::seq_len: return call.lengths.seq_lens[request];
    case Finding::query_start: return call.lengths.query_start[request + position];
    case Finding::visible: return call.lengths.visible[call.lengths.query_start[request] + position];
    case Finding::page_list:
      return static_cast<std::int32_t>(min(pages_of(call.kv, request).listed, std::int64_t{INT_MAX}));
    case Finding::page_id: return pages_of(call.kv, request).ids[position];
  }
  return 0;
}

__global__ void __launch_bounds__(kThreads) validate_kernel(const __grid_constant__ ValidateCall call) {
  __shared__ Key first;
  const auto thread = static_cast<std::int32_t>(threadIdx.x), lane = thread % kLanes;
  if (thread == 0) first = kNothing;
  __syncthreads();
  const std::int32_t requests = *call.requests;
  Key found = thread < kLanes ? check_total(call, requests, lane) : kNothing;
  for (std::int32_t request = thread / kLanes; request < requests; request += kWarps)
    found = min(found, check_request(call, request, lane));
  if (found != kNothing) atomicMin(&first, found);
  __syncthreads();
  ValidationReport& report = *call.report;
  if (thread != 0 || first == kNothing || report.finding != Finding::none) return;
  const auto kind = static_cast<Finding>(first >> kKindShift & ((1u << (kRequestShift - kKindShift)) - 1));
  report.request = static_cast<std::int32_t>(first >> kRequestShift);
  report.position = static_cast<std::int32_t>(first & ((Key{1} << kKindShift) - 1));
  report.value = value_of(call, kind, report.request, report.position);
  __threadfence_system();  // whoever sees a finding sees what belongs to it
  *const_cast<volatile Finding*>(&report.finding) = kind;
}

}  // namespace

cudaError_t launch_validate(const ValidateCall& call, cudaStream_t stream) {
  return prim::launch(validate_kernel, 1, kThreads, 0, stream, call);
}

}  // namespace latte::cuda
