#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "backend/errors.hpp"
#include "backend/validate/validate.hpp"
#include "backend/views.hpp"
#include "cpu/workers.hpp"

namespace latte::backend {
namespace {

Status check_workspace(const PlannedStep& step, std::span<std::byte> workspace) {
  if (workspace.empty()) {
    if (step.owns_workspace) return {};
    return missing("workspace",
                   text(step.workspace_bytes) + " bytes, as the builder was made with own_workspace = false");
  }
  return validate_workspace(workspace, step.workspace_bytes);
}

// Of a tensor whose heads share what is scaled, or of a kernel that takes no more.
Status check_one_number(const char* field, const Fp8Scale& scale) {
  if (!scale.per_head) return {};
  return invalid(field, "one number for the tensor (per_head = false)", "one for each head");
}

}  // namespace

Status validate_scale(const char* field, float value) {
  if (std::isfinite(value) && value > 0) return {};
  return invalid(field, "a finite number > 0", text(value));
}

Status validate_fp8_scale(const char* field, float value) {
  if (std::isnormal(value) && value > 0) return {};
  return invalid(field, "a number from 2^-126 that is finite", text(value));
}

Status validate_workspace(std::span<std::byte> workspace, std::size_t bytes, std::size_t alignment, const char* field) {
  if (workspace.data() == nullptr) return missing(field, "a pointer", "null");
  if (workspace.size() < bytes) return invalid(field, ">= " + text(bytes) + " bytes", text(workspace.size()));
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % alignment != 0)
    return invalid(field, "an address that is a multiple of " + text(alignment), "a misaligned one");
  return {};
}

Status validate_cache(const DecodeProblem& problem, const ConstTensorView& cache, Place place) {
  // fp8 caches are handed around as bytes by most frameworks.
  const bool bytes = dtype_bytes(kv_element_dtype(problem.kv_format)) == 1;
  const std::int64_t width = kv_token_elements(problem.kv_format, problem.latent, problem.rope);
  // On the host, the scales within a token are floats, read in place.
  const std::int64_t host_alignment = problem.kv_format == KvFormat::fp8_ds_mla ? 4 : 1;
  LATTE_RETURN_IF_ERROR(check_view(cache, {.field = "kv_cache",
                                           .rank = 3,
                                           .shape = {0, problem.page_size, width},
                                           .dtypes = bytes ? dtype_bit(Dtype::fp8_e4m3) | dtype_bit(Dtype::u8)
                                                           : dtype_bit(kv_element_dtype(problem.kv_format)),
                                           .align_bytes = std::max(host_alignment, required_alignment(place))}));
  if (place == Place::host) return {};
  if (cache.shape[0] == 0) return invalid("kv_cache", "at least one page", "none");
  // The copy engine walks forward only, less than 2^40 bytes a step. A step is at most a page, or 8 tokens.
  const std::int64_t most = (std::int64_t{1} << 40) / static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const std::int64_t below[] = {most, most / std::max<std::int64_t>(cache.shape[1], 8)};
  for (std::size_t axis = 0; axis < 2; ++axis)
    if (cache.shape[axis] > 1 && (cache.stride[axis] < width || cache.stride[axis] >= below[axis]))
      return invalid("kv_cache",
                     "strides of at least a token's " + text(width) + " elements, and below 2^40 bytes a page",
                     "strides " + shape_text({cache.stride.data(), 2}));
  return {};
}

Status validate_query(const PlannedStep& step, const DecodeArgs& args) {
  const DecodeProblem& problem = step.problem;
  const bool pair = given(args.q_nope) || given(args.q_pe);
  if (given(args.q) && pair) return invalid("q", "q or the pair q_nope and q_pe", "both");
  if (!given(args.q) && !pair) return missing("q", "q or the pair q_nope and q_pe");
  const auto check = [&](const ConstTensorView& view, const char* field, std::int64_t width) {
    return check_view(view, {.field = field,
                             .rank = 3,
                             .shape = {step.query_tokens(), problem.heads, width},
                             .dtypes = dtype_bit(problem.q_dtype),
                             .align_bytes = required_alignment(step.place)});
  };
  if (!pair) return check(args.q, "q", std::int64_t{problem.latent} + problem.rope);
  LATTE_RETURN_IF_ERROR(check(args.q_nope, "q_nope", problem.latent));
  return check(args.q_pe, "q_pe", problem.rope);
}

Status validate_outputs(const TensorView& out, const TensorView& lse, const OutputShape& shape, Place place) {
  LATTE_RETURN_IF_ERROR(check_view(out, {.field = "out",
                                         .rank = 3,
                                         .shape = {shape.tokens, shape.heads, shape.width},
                                         .dtypes = dtype_bit(shape.dtype),
                                         .align_bytes = required_alignment(place)}));
  LATTE_RETURN_IF_ERROR(check_disjoint(out, "out", shape.tokens, shape.width));
  if (!given(lse)) return {};
  LATTE_RETURN_IF_ERROR(check_view(lse, {.field = "lse",
                                         .rank = 2,
                                         .shape = {shape.tokens, shape.heads},
                                         .dtypes = dtype_bit(Dtype::f32),
                                         .dense_last = false}));
  return check_disjoint(lse, "lse", shape.tokens, 1);
}

Status validate_kv_scale(KvFormat format, const Fp8Scale& scale, Place place) {
  LATTE_RETURN_IF_ERROR(check_one_number("kv_scale", scale));
  if (scale.ptr != nullptr && place == Place::device) {
    if (format == KvFormat::fp8_e4m3) return {};
    return invalid("kv_scale", std::string("no address, as the cache is ") + kv_format_name(format), "one");
  }
  const float kv_scale = scale_of(scale);
  LATTE_RETURN_IF_ERROR(validate_fp8_scale("kv_scale", kv_scale));
  // A scale that would be ignored is a caller who expects another result.
  if (format != KvFormat::fp8_e4m3 && kv_scale != 1)
    return invalid("kv_scale", std::string("1, as the cache is ") + kv_format_name(format), text(kv_scale));
  return {};
}

Status validate_scales(const PlannedStep& step, const DecodeArgs& args) {
  const DecodeProblem& problem = step.problem;
  LATTE_RETURN_IF_ERROR(validate_scale("scale", args.scale));
  // What lies behind a device's address cannot be looked at, and only fp8 has a use for it.
  if (step.place == Place::device && (args.q_scale.ptr != nullptr || args.kv_scale.ptr != nullptr))
    return unsupported(args.q_scale.ptr != nullptr ? "q_scale" : "kv_scale",
                       "no address: scales by address come with fp8 caches", "one");
  LATTE_RETURN_IF_ERROR(check_one_number("q_scale", args.q_scale));
  const float q_scale = scale_of(args.q_scale);
  LATTE_RETURN_IF_ERROR(validate_fp8_scale("q_scale", q_scale));
  if (problem.q_dtype != Dtype::fp8_e4m3 && q_scale != 1)
    return invalid("q_scale", std::string("1, as q is ") + dtype_name(problem.q_dtype), text(q_scale));
  LATTE_RETURN_IF_ERROR(validate_kv_scale(problem.kv_format, args.kv_scale, step.place));
  const cpu::DefaultFloatingPoint arithmetic;  // as the product is made
  const float product = args.scale * q_scale * scale_of(args.kv_scale);
  // Kernels multiply by log2(e), too.
  if (!std::isfinite(product * std::numbers::log2e_v<float>) || product <= 0)
    return invalid("scale", "a scale * q_scale * kv_scale above 0 that log2(e) times is finite", text(product));
  return {};
}

Status validate_decode_args(const PlannedStep& step, const DecodeArgs& args) {
  LATTE_RETURN_IF_ERROR(validate_stream(step.place, args.stream));
  LATTE_RETURN_IF_ERROR(validate_query(step, args));
  LATTE_RETURN_IF_ERROR(validate_cache(step.problem, args.kv_cache, step.place));
  LATTE_RETURN_IF_ERROR(validate_outputs(args.out, args.lse, output_shape(step), step.place));
  LATTE_RETURN_IF_ERROR(validate_scales(step, args));
  LATTE_RETURN_IF_ERROR(check_workspace(step, args.workspace));
  // Last, as it is the only check whose cost grows with the step.
  return validate_pages(step, args.pages, args.kv_cache.shape[0]);
}

}  // namespace latte::backend
