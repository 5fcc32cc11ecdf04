#include <limits>
#include <string>

#include "backend/errors.hpp"
#include "backend/validate/validate.hpp"

namespace latte::backend {
namespace {

// Rows are 32-bit numbers; these keep sums and byte counts of a single row or token far from overflow.
constexpr std::int32_t kMaxHeads = 1 << 20;
constexpr std::int32_t kMaxWidth = 1 << 13;

Status check_width(const char* field, std::int32_t width) {
  if (width < 1) return invalid(field, ">= 16", text(width));
  if (width % 16 != 0 || width > kMaxWidth)
    return unsupported(field, "a multiple of 16 up to " + text(kMaxWidth), text(width));
  return {};
}

}  // namespace

Status validate_problem(const DecodeProblem& problem) {
  if (problem.heads < 1) return invalid("heads", ">= 1", text(problem.heads));
  if (problem.heads > kMaxHeads) return unsupported("heads", "at most " + text(kMaxHeads), text(problem.heads));
  LATTE_RETURN_IF_ERROR(check_width("latent", problem.latent));
  LATTE_RETURN_IF_ERROR(check_width("rope", problem.rope));
  if (problem.page_size < 1) return invalid("page_size", ">= 1", text(problem.page_size));
  // Enums that came through a cast (from C, from a file) can hold any number.
  if (problem.kv_format > kLastKvFormat)
    return invalid("kv_format", "a KvFormat", text(static_cast<std::int64_t>(problem.kv_format)));
  if (problem.mask > Mask::none) return invalid("mask", "a Mask", text(static_cast<std::int64_t>(problem.mask)));
  if (problem.q_dtype > Dtype::u8)
    return invalid("q_dtype", "a Dtype", text(static_cast<std::int64_t>(problem.q_dtype)));
  if (problem.out_dtype > Dtype::u8)
    return invalid("out_dtype", "a Dtype", text(static_cast<std::int64_t>(problem.out_dtype)));

  if (problem.kv_format == KvFormat::fp8_ds_mla && (problem.latent != 512 || problem.rope != 64))
    return unsupported(problem.latent != 512 ? "latent" : "rope", "latent 512 and rope 64 for fp8_ds_mla",
                       text(problem.latent) + " and " + text(problem.rope));
  const bool fp8_query_ok = problem.kv_format == KvFormat::fp8_e4m3;
  const std::uint32_t q_dtypes = kFloatDtypes | (fp8_query_ok ? dtype_bit(Dtype::fp8_e4m3) : 0u);
  if (!contains(q_dtypes, problem.q_dtype))
    return unsupported("q_dtype", dtype_set_text(q_dtypes) + " with a cache of " + kv_format_name(problem.kv_format),
                       dtype_name(problem.q_dtype));
  if (!contains(kFloatDtypes, problem.out_dtype))
    return unsupported("out_dtype", dtype_set_text(kFloatDtypes), dtype_name(problem.out_dtype));
  return {};
}

Status validate_limits(const Limits& limits, std::int32_t available_workers) {
  if (limits.max_requests < 1) return invalid("limits.max_requests", ">= 1", text(limits.max_requests));
  if (limits.max_query_tokens < 0) return invalid("limits.max_query_tokens", ">= 0", text(limits.max_query_tokens));
  if (limits.max_total_query_tokens < 0)
    return invalid("limits.max_total_query_tokens", ">= 0", text(limits.max_total_query_tokens));
  if (limits.max_kv_tokens < 0) return invalid("limits.max_kv_tokens", ">= 0", text(limits.max_kv_tokens));
  // Kernels look a few blocks past a token without a care for the end of the integers.
  constexpr std::int32_t kMaxKvTokens = std::numeric_limits<std::int32_t>::max() - 4096;
  if (limits.max_kv_tokens > kMaxKvTokens)
    return unsupported("limits.max_kv_tokens", "at most " + text(kMaxKvTokens), text(limits.max_kv_tokens));
  if (limits.max_total_kv_tokens < 0)
    return invalid("limits.max_total_kv_tokens", ">= 0", text(limits.max_total_kv_tokens));
  if (limits.workers < 0) return invalid("limits.workers", ">= 0", text(limits.workers));
  if (limits.workers > available_workers)
    return unsupported("limits.workers", "at most the backend's " + text(available_workers), text(limits.workers));
  return {};
}

Status validate_policy(const Policy& policy) {
  if (policy.kind > PolicyKind::batch_invariant)
    return invalid("policy.kind", "a PolicyKind", text(static_cast<std::int64_t>(policy.kind)));
  if (policy.n < 0) return invalid("policy.n", ">= 0", text(policy.n));
  return {};
}

Status validate_lengths(const StepLengths& lengths) {
  const auto no_address = [](std::span<const std::int32_t> values) { return !values.empty() && !values.data(); };
  if (no_address(lengths.seq_lens)) return missing("seq_lens", "a pointer", "null");
  if (no_address(lengths.query_start)) return missing("query_start", "a pointer", "null");
  if (no_address(lengths.visible)) return missing("visible", "a pointer", "null");
  return {};
}

Status validate_device_lengths(const DeviceLengths& lengths, const Limits& resolved_limits) {
  const auto check_count = [](const char* field, std::int32_t count, std::int32_t limit) -> Status {
    if (count < 0) return invalid(field, ">= 0", text(count));
    if (count <= limit) return {};
    return {Code::out_of_limits, field, "at most the limit of " + text(limit), text(count)};
  };
  LATTE_RETURN_IF_ERROR(check_count("requests", lengths.requests, resolved_limits.max_requests));
  LATTE_RETURN_IF_ERROR(check_count("query_tokens", lengths.query_tokens, resolved_limits.max_total_query_tokens));
  if (lengths.query_start == nullptr) return missing("query_start", "a pointer", "null");
  if (lengths.requests > 0 && lengths.seq_lens == nullptr) return missing("seq_lens", "a pointer", "null");
  return {};
}

Status validate_stream(Place place, Stream stream) {
  if (place == Place::device || stream == nullptr) return {};
  return invalid("stream", "null, as the cpu backend has no streams", "one");
}

}  // namespace latte::backend
