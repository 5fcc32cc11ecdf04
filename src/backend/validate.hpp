// Everything the host can see of a call, checked before anything is written. Allocates nothing unless it fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "latte/decode.hpp"
#include "latte/ops.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte::backend {

inline constexpr std::size_t kWorkspaceAlignment = 64;

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

Status validate_decode_args(const PlannedStep& step, const DecodeArgs& args);
// Its parts, each of which can be asked alone.
Status validate_query(const PlannedStep& step, const DecodeArgs& args);
Status validate_outputs(const PlannedStep& step, const TensorView& out, const TensorView& lse);
Status validate_pages(const PlannedStep& step, const PageTable& pages, std::int64_t page_count);
Status validate_cache(const DecodeProblem& problem, const ConstTensorView& cache, Place place = Place::host);
Status validate_kv_scale(KvFormat format, float kv_scale);
Status validate_scales(const PlannedStep& step, const DecodeArgs& args);
Status validate_workspace(std::span<std::byte> workspace, std::size_t bytes);

Status validate_merge_args(std::span<const Partial> partials, const TensorView& out, const TensorView& lse,
                           Place place = Place::host);
Status validate_write_kv_args(const WriteKvArgs& args, Place place = Place::host);

}  // namespace latte::backend
