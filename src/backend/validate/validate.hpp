// Everything the host can see of a call, checked before anything is written. Allocates nothing unless it fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "latte/decode.hpp"
#include "latte/ops.hpp"
#include "latte/prefill.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte::backend {

inline constexpr std::size_t kWorkspaceAlignment = 64;
inline constexpr std::size_t kPrefillWorkspaceAlignment = 256;

// Where the tensors and tables of a call lie. Of what a device holds, the host sees addresses and shapes only.
enum class Place : std::uint8_t { host, device };
// Bytes that bases and outer strides are multiples of: a device loads 16 at a time.
constexpr std::int64_t required_alignment(Place place) { return place == Place::device ? 16 : 1; }

Status validate_stream(Place place, Stream stream);

Status validate_problem(const DecodeProblem& problem);
Status validate_limits(const Limits& limits, std::int32_t available_workers);
Status validate_policy(const Policy& policy);
// Addresses only; sizes, signs, order and limits are the planner's to check (make_plan does, before it writes).
Status validate_lengths(const StepLengths& lengths);
Status validate_device_lengths(const DeviceLengths& lengths, const Limits& resolved_limits);

// A planned step, as far as the arguments of decode() must fit it.
struct PlannedStep {
  const DecodeProblem& problem;
  std::span<const std::int32_t> seq_lens;
  std::span<const std::int32_t> query_start;
  std::span<const std::int32_t> visible;
  std::size_t workspace_bytes = 0;
  bool owns_workspace = false;
  Place place = Place::host;
  // Planned on the device: the spans above are empty, and this is all the host knows.
  bool planned_on_device = false;
  std::int32_t device_requests = 0, device_tokens = 0;

  std::int32_t query_tokens() const {
    if (planned_on_device) return device_tokens;
    return query_start.empty() ? 0 : query_start.back();
  }
  std::int64_t requests() const {
    return planned_on_device ? device_requests : static_cast<std::int64_t>(seq_lens.size());
  }
};

// Which tokens of a paged cache a call reads, as far as the host knows.
struct PageDemand {
  PageDemand(Place where, std::int32_t tokens_a_page, std::int64_t request_count, bool known)
      : place(where), page_size(tokens_a_page), requests(request_count), lengths_known(known) {}
  virtual ~PageDemand() = default;
  // Of a request's tokens the first so many may be read. Asked only where lengths are known.
  virtual std::int64_t tokens(std::size_t request) const = 0;
  std::int64_t known_requests() const { return lengths_known ? requests : 0; }

  const Place place;
  const std::int32_t page_size;
  const std::int64_t requests;
  const bool lengths_known;
};

Status validate_decode_args(const PlannedStep& step, const DecodeArgs& args);
// Its parts, each of which can be asked alone.
Status validate_query(const PlannedStep& step, const DecodeArgs& args);
struct OutputShape {
  std::int64_t tokens, heads, width;
  Dtype dtype;
};
inline OutputShape output_shape(const PlannedStep& step) {
  return {step.query_tokens(), step.problem.heads, step.problem.latent, step.problem.out_dtype};
}
Status validate_outputs(const TensorView& out, const TensorView& lse, const OutputShape& shape, Place place);
Status validate_pages(const PageDemand& demand, const PageTable& pages, std::int64_t page_count);
Status validate_pages(const PlannedStep& step, const PageTable& pages, std::int64_t page_count);
Status validate_cache(const DecodeProblem& problem, const ConstTensorView& cache, Place place = Place::host);
// On a device nobody can look behind an address.
Status validate_kv_scale(KvFormat format, const Fp8Scale& scale, Place place);
Status validate_scales(const PlannedStep& step, const DecodeArgs& args);
Status validate_workspace(std::span<std::byte> workspace, std::size_t bytes,
                          std::size_t alignment = kWorkspaceAlignment, const char* field = "workspace");
Status validate_scale(const char* field, float value);
// What fp8 values are multiplied by: below 2^-126 a number has fewer digits, and results would have as few.
Status validate_fp8_scale(const char* field, float value);

// A planned prefill step, as far as the arguments of prefill() must fit it.
struct PlannedPrefill {
  const PrefillProblem& problem;
  std::span<const std::int32_t> query_start;
  std::span<const std::int32_t> kv_start;
  std::span<const std::int32_t> context_lens;
  std::int32_t chunks = 0;
  std::size_t workspace_bytes = 0;
  bool owns_workspace = false;
  Place place = Place::host;

  std::int32_t query_tokens() const { return query_start.empty() ? 0 : query_start.back(); }
  std::int32_t kv_tokens() const { return kv_start.empty() ? 0 : kv_start.back(); }
};

Status validate_problem(const PrefillProblem& problem);
// All of a step's lengths. `limits` are resolved, and `context` too; null = there is none.
Status validate_lengths(const PrefillLengths& lengths, const Limits& limits, std::int32_t heads,
                        const PrefillContext* context);
Status validate_prefill_args(const PlannedPrefill& step, const PrefillArgs& args);

Status validate_merge_args(const MergeArgs& args, Place place = Place::host);
Status validate_write_kv_args(const WriteKvArgs& args, Place place = Place::host);
Status validate_gather_kv_args(const GatherKvArgs& args, Place place = Place::host);

}  // namespace latte::backend
