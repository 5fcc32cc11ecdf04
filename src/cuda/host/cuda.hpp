// The CUDA room's front door: one GPU, its memory, streams and graphs, and the launches the backend room asks for. No
// CUDA header is needed to include it, so builds without a toolkit have it too; there open_device() says why not.
//
// Arguments are validated already. Everything takes the stream it works in, and nothing but synchronize(), wait() and
// measure_ceilings() waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cuda/call.hpp"
#include "cuda/sm90/prefill/call.hpp"
#include "latte/backend.hpp"
#include "latte/device.hpp"
#include "latte/plan.hpp"
#include "latte/status.hpp"

namespace latte::cuda {

struct DeviceInfo {
  std::string name;      // "NVIDIA H200"
  std::string driver;    // "driver 580.65.06, CUDA 13.0"
  std::string features;  // "sm_90, 132 multiprocessors, ..."
  std::int32_t multiprocessors = 0;
};

struct PlanCall {
  PlanConfig config;
  PlanSizes sizes;
  std::int32_t requests = 0;
  LengthsView lengths;
  std::int32_t* words = nullptr;
  std::int32_t query_tokens = 0;  // query_start is clamped to it
};

struct MergePart {
  const void* out = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  Dtype dtype = Dtype::bf16;
  const float* lse = nullptr;
  std::int64_t lse_token_stride = 0, lse_head_stride = 0;
};
// Partials travel as kernel arguments, which hold 4 KiB.
inline constexpr std::size_t kMaxMergeParts = 64;
struct MergeCall {
  std::span<const MergePart> parts;
  std::int64_t tokens = 0;
  std::int32_t heads = 0, latent = 0;
  OutputView out;
};

struct WriteKvCall {
  const void* kv_c = nullptr;
  const void* k_pe = nullptr;
  std::int64_t kv_c_stride = 0, k_pe_stride = 0;  // elements
  Dtype dtype = Dtype::bf16;                      // of kv_c and k_pe
  const std::int64_t* slots = nullptr;
  std::int64_t tokens = 0;
  void* cache = nullptr;
  std::int64_t page_stride_bytes = 0, token_stride_bytes = 0;
  std::int64_t page_count = 0;  // slots behind the last page are skipped
  std::int32_t page_size = 1, latent = 512, rope = 64;
  KvFormat format = KvFormat::bf16;
  Fp8Scale kv_scale{};  // one number
};

struct GatherKvCall {
  CacheView kv;
  KvFormat format = KvFormat::bf16;
  Fp8Scale kv_scale{};  // one number
  std::int32_t first_token = 0;
  const std::int32_t* out_start = nullptr;  // [requests + 1]
  std::int32_t requests = 0, tokens = 0;
  std::int32_t width = 576;
  void* out = nullptr;
  std::int64_t out_stride = 0;  // elements
  Dtype out_dtype = Dtype::bf16;
};

// What a validation kernel found first. Lies in pinned host memory, which the kernel writes.
enum class Finding : std::int32_t {
  none = 0,
  seq_len,      // position 0: negative or above the limit; 1: with it the sum passes the limit
  query_start,  // query_start[request + position] does not begin at 0, falls, or passes the tensor or a limit
  visible,      // of query token `position` of the request: outside [0, seq_len]
  page_list,    // fewer pages listed than the request needs; value = how many, -1 = the list's bounds make no sense
  page_id,      // of page `position` of the request: outside the cache
};
struct ValidationReport {
  Finding finding = Finding::none;
  std::int32_t request = 0;
  std::int32_t position = 0;
  std::int32_t value = 0;  // what was found there
};
struct ValidateCall {
  LengthsView lengths;  // query_start null: there are no queries to look at, and every token is read
  CacheView kv;
  Limits limits;                           // resolved
  const std::int32_t* requests = nullptr;  // on the device: how many there are
  std::int32_t query_tokens = 0;
  ValidationReport* report = nullptr;
};

enum class Memory : std::uint8_t { device, pinned };
enum class Copy : std::uint8_t { to_device, to_host };

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;

  virtual Result<void*> allocate(std::size_t bytes, Memory where) = 0;
  virtual void release(void* memory, Memory where) noexcept = 0;
  virtual Result<std::size_t> free_memory() = 0;
  virtual Status copy(void* to, const void* from, std::size_t bytes, Copy direction, Stream stream) = 0;
  virtual Status clear(void* memory, std::size_t bytes, Stream stream) = 0;
  virtual Status fill_random(const RandomFill& fill, Stream stream) = 0;

  virtual Result<void*> make_stream() = 0;
  virtual void release_stream(void* stream) noexcept = 0;
  virtual Status synchronize(Stream stream) = 0;
  virtual Result<void*> make_event(bool timed) = 0;
  virtual void release_event(void* event) noexcept = 0;
  virtual Status record(void* event, Stream stream) = 0;
  virtual Status wait(void* event) = 0;  // returns at once when the stream has passed it
  virtual Result<double> elapsed_us(void* begin, void* end) = 0;

  virtual Result<bool> capturing(Stream stream) = 0;
  virtual Status begin_capture(Stream stream) = 0;
  virtual Result<void*> end_capture(Stream stream) = 0;
  virtual Status launch_graph(void* graph, Stream stream) = 0;
  virtual void release_graph(void* graph) noexcept = 0;

  virtual Status prepare(const DecodeKernel& kernel) = 0;  // once, before the first decode or plan
  virtual Status decode(const DecodeKernel& kernel, const DecodeCall& call, std::int32_t workers, bool overlap_previous,
                        Stream stream) = 0;
  virtual Status plan(const PlanCall& call, Stream stream) = 0;
  virtual Status merge(const MergeCall& call, Stream stream) = 0;
  virtual Status write_kv(const WriteKvCall& call, Stream stream) = 0;
  virtual Status validate(const ValidateCall& call, Stream stream) = 0;

  virtual Status prepare(const PrefillKernel& kernel) = 0;
  virtual Status convert(const ConvertCall& call, Stream stream) = 0;
  virtual Status prefill(const PrefillKernel& kernel, const PrefillCall& call, std::int32_t workers, Stream stream) = 0;
  virtual Status gather_kv(const GatherKvCall& call, Stream stream) = 0;

  virtual Result<Ceilings> measure_ceilings(bool fp8) = 0;
};

// The GPU with that number, or why latte cannot use it: not in this build, no driver, no such device, another kind.
Result<std::unique_ptr<Device>> open_device(std::int32_t ordinal);

}  // namespace latte::cuda
