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

constexpr std::uint32_t kInputDtypes = kFloatDtypes | dtype_bit(Dtype::fp8_e4m3);

// Tokens of the context, all of which the chunks will fetch.
class ContextDemand final : public PageDemand {
 public:
  explicit ContextDemand(const PlannedPrefill& step)
      : PageDemand(step.place, step.problem.context->page_size, static_cast<std::int64_t>(step.context_lens.size()),
                   true),
        lens_(step.context_lens) {}
  std::int64_t tokens(std::size_t request) const override { return lens_[request]; }

 private:
  std::span<const std::int32_t> lens_;
};

Status validate_context(const PrefillContext& context) {
  // The same cache as decode's, so the same rules.
  const DecodeProblem cache{.heads = 1,
                            .latent = context.latent,
                            .rope = context.rope,
                            .kv_format = context.kv_format,
                            .page_size = context.page_size};
  if (Status status = validate_problem(cache); !status.ok())
    return {status.code(), "context." + status.field(), status.expected(), status.got()};
  if (context.max_tokens < 1) return invalid("context.max_tokens", ">= 1", text(context.max_tokens));
  // Bisections between two positions stay within 32 bits.
  constexpr std::int32_t kMaxTokens = 1 << 30;
  if (context.max_tokens > kMaxTokens)
    return unsupported("context.max_tokens", "at most " + text(kMaxTokens), text(context.max_tokens));
  if (context.max_total_tokens < 0) return invalid("context.max_total_tokens", ">= 0", text(context.max_total_tokens));
  if (context.workspace_bytes < 0) return invalid("context.workspace_bytes", ">= 0", text(context.workspace_bytes));
  return {};
}

Status validate_context_lens(std::span<const std::int32_t> lens, std::size_t requests, const PrefillContext* context) {
  if (lens.empty()) return {};
  if (context == nullptr) return invalid("context_lens", "none, as the problem has no context", text(lens.size()));
  if (lens.data() == nullptr) return missing("context_lens", "a pointer", "null");
  if (lens.size() != requests) return invalid("context_lens", text(requests) + " entries", text(lens.size()));
  std::int64_t total = 0;
  for (std::size_t b = 0; b < requests; ++b) {
    if (lens[b] < 0) return invalid("context_lens[" + text(b) + "]", ">= 0", text(lens[b]));
    if (lens[b] > context->max_tokens)
      return {Code::out_of_limits, "context_lens[" + text(b) + "]", "at most " + text(context->max_tokens),
              text(lens[b])};
    total += lens[b];
  }
  if (total > context->max_total_tokens)
    return {Code::out_of_limits, "context_lens", "at most " + text(context->max_total_tokens) + " tokens in all",
            text(total)};
  return {};
}

// q, k or v. A device's copy engine walks forward only, less than 2^40 bytes a step.
constexpr std::int64_t kMostStride = std::int64_t{1} << 38;
Status check_input(const PlannedPrefill& step, const ConstTensorView& view, const char* field, std::int64_t tokens,
                   std::int64_t width) {
  LATTE_RETURN_IF_ERROR(check_view(view, {.field = field,
                                          .rank = 3,
                                          .shape = {tokens, step.problem.heads, width},
                                          .dtypes = dtype_bit(step.problem.dtype),
                                          .align_bytes = required_alignment(step.place)}));
  if (step.place == Place::host || view.shape[0] == 0) return {};
  for (std::size_t axis = 0; axis < 2; ++axis)
    if (view.shape[axis] > 1 && (view.stride[axis] < width || view.stride[axis] >= kMostStride))
      return invalid(field, "strides of at least a row's " + text(width) + " elements, below 2^38",
                     "strides " + shape_text({view.stride.data(), 2}));
  return {};
}

Status check_inputs(const PlannedPrefill& step, const PrefillArgs& args) {
  const PrefillProblem& problem = step.problem;
  LATTE_RETURN_IF_ERROR(check_input(step, args.q, "q", step.query_tokens(), problem.qk_width));
  // A step that brings no new keys needs no tensors for them.
  if (step.kv_tokens() > 0 || given(args.k))
    LATTE_RETURN_IF_ERROR(check_input(step, args.k, "k", step.kv_tokens(), problem.qk_width));
  if (step.kv_tokens() > 0 || given(args.v))
    LATTE_RETURN_IF_ERROR(check_input(step, args.v, "v", step.kv_tokens(), problem.v_width));
  return {};
}

Status check_fp8_scale(const PlannedPrefill& step, const char* field, const Fp8Scale& scale) {
  const PrefillProblem& problem = step.problem;
  if (scale.per_head && scale.ptr == nullptr) return missing(field, "a pointer to one number a head", "null");
  if (scale.ptr == nullptr) LATTE_RETURN_IF_ERROR(validate_fp8_scale(field, scale.value));
  // A scale that would be ignored is a caller who expects another result.
  const bool used = problem.dtype == Dtype::fp8_e4m3 || problem.math == PrefillMath::fp8;
  if (!used && scale.ptr != nullptr)
    return invalid(field, std::string("no address, as the tensor is ") + dtype_name(problem.dtype), "one");
  if (!used && scale.value != 1)
    return invalid(field, std::string("1, as the tensor is ") + dtype_name(problem.dtype), text(scale.value));
  // What lies behind a device's address cannot be looked at.
  if (scale.ptr == nullptr || step.place == Place::device) return {};
  for (std::int32_t head = 0; head < (scale.per_head ? problem.heads : 1); ++head)
    LATTE_RETURN_IF_ERROR(validate_fp8_scale(field, scale.ptr[head]));
  return {};
}

Status check_scales(const PlannedPrefill& step, const PrefillArgs& args) {
  LATTE_RETURN_IF_ERROR(validate_scale("scale", args.scale));
  LATTE_RETURN_IF_ERROR(check_fp8_scale(step, "q_scale", args.q_scale));
  LATTE_RETURN_IF_ERROR(check_fp8_scale(step, "k_scale", args.k_scale));
  LATTE_RETURN_IF_ERROR(check_fp8_scale(step, "v_scale", args.v_scale));
  // Scales behind a device's addresses cannot be looked at.
  const bool device = step.place == Place::device;
  const auto known = [&](const Fp8Scale& scale, std::int32_t head) {
    if (scale.ptr == nullptr) return scale.value;
    return device ? 1.0f : scale.ptr[scale.per_head ? head : 0];
  };
  const cpu::DefaultFloatingPoint arithmetic;  // as the product is made
  const bool per_head = !device && (args.q_scale.per_head || args.k_scale.per_head);
  for (std::int32_t head = 0; head < (per_head ? step.problem.heads : 1); ++head) {
    const float product = args.scale * known(args.q_scale, head) * known(args.k_scale, head);
    // Kernels multiply by log2(e), too.
    if (std::isfinite(product * std::numbers::log2e_v<float>) && product > 0) continue;
    return invalid("scale", "a scale * q_scale * k_scale above 0 that log2(e) times is finite, for every head",
                   text(product) + " for head " + text(head));
  }
  return {};
}

Status check_context_args(const PlannedPrefill& step, const PrefillArgs& args) {
  const bool lists = !args.pages.page_indptr.empty() || !args.pages.page_indices.empty();
  const bool table = args.pages.block_table != nullptr || args.pages.max_pages != 0;
  if (!step.problem.context) {
    if (given(args.kv_cache)) return invalid("kv_cache", "none, as the problem has no context", "one");
    if (lists || table) return invalid("pages", "none, as the problem has no context", "some");
    return {};
  }
  const PrefillContext& context = *step.problem.context;
  LATTE_RETURN_IF_ERROR(validate_kv_scale(context.kv_format, args.kv_scale, step.place));
  if (step.chunks == 0) return {};
  if (args.expand == nullptr) return missing("expand", "a function that makes keys and values of a chunk", "null");
  const DecodeProblem cache{.heads = 1,
                            .latent = context.latent,
                            .rope = context.rope,
                            .kv_format = context.kv_format,
                            .page_size = context.page_size};
  LATTE_RETURN_IF_ERROR(validate_cache(cache, args.kv_cache, step.place));
  // Last, as it is the only check whose cost grows with the step.
  return validate_pages(ContextDemand(step), args.pages, args.kv_cache.shape[0]);
}

}  // namespace

Status validate_problem(const PrefillProblem& problem) {
  // Widths and heads keep decode's bounds.
  const DecodeProblem shape{.heads = problem.heads, .latent = problem.qk_width, .rope = problem.v_width};
  if (Status status = validate_problem(shape); !status.ok()) {
    const std::string& field = status.field();
    return {status.code(),
            field == "latent" ? "qk_width"
            : field == "rope" ? "v_width"
                              : field,
            status.expected(), status.got()};
  }
  // Enums that came through a cast (from C, from a file) can hold any number.
  if (problem.dtype > Dtype::u8) return invalid("dtype", "a Dtype", text(static_cast<std::int64_t>(problem.dtype)));
  if (problem.out_dtype > Dtype::u8)
    return invalid("out_dtype", "a Dtype", text(static_cast<std::int64_t>(problem.out_dtype)));
  if (problem.mask > Mask::none) return invalid("mask", "a Mask", text(static_cast<std::int64_t>(problem.mask)));
  if (problem.math > PrefillMath::fp8)
    return invalid("math", "a PrefillMath", text(static_cast<std::int64_t>(problem.math)));
  if (!contains(kInputDtypes, problem.dtype))
    return unsupported("dtype", dtype_set_text(kInputDtypes), dtype_name(problem.dtype));
  if (!contains(kFloatDtypes, problem.out_dtype))
    return unsupported("out_dtype", dtype_set_text(kFloatDtypes), dtype_name(problem.out_dtype));
  if (problem.math == PrefillMath::fp8 && problem.dtype == Dtype::f32)
    return unsupported("math", "automatic or half, as the tensors are f32", prefill_math_name(problem.math));
  return problem.context ? validate_context(*problem.context) : Status();
}

Status validate_lengths(const PrefillLengths& lengths, const Limits& limits, std::int32_t heads,
                        const PrefillContext* context) {
  const std::span<const std::int32_t> query = lengths.query_start, kv = lengths.kv_start;
  if (query.empty()) return missing("query_start", "B + 1 entries");
  if (query.data() == nullptr) return missing("query_start", "a pointer", "null");
  if (kv.empty()) return missing("kv_start", "B + 1 entries");
  if (kv.data() == nullptr) return missing("kv_start", "a pointer", "null");
  const std::size_t requests = query.size() - 1;
  const auto above = [](std::string field, std::string expected, std::int64_t got) {
    return Status(Code::out_of_limits, std::move(field), std::move(expected), text(got));
  };
  if (requests > static_cast<std::size_t>(limits.max_requests))
    return above("query_start", "at most " + text(limits.max_requests) + " requests",
                 static_cast<std::int64_t>(requests));
  if (kv.size() != query.size()) return invalid("kv_start", text(query.size()) + " entries", text(kv.size()));

  // Prefix sums from 0, no step longer than `most`, the last one no larger than `total`.
  const auto check_starts = [&](const char* field, std::span<const std::int32_t> starts, std::int64_t most,
                                std::int64_t total) -> Status {
    const auto at = [&](std::size_t index) { return std::string(field) + "[" + text(index) + "]"; };
    if (starts[0] != 0) return invalid(at(0), "0", text(starts[0]));
    for (std::size_t b = 0; b < requests; ++b) {
      if (starts[b + 1] < starts[b]) return invalid(at(b + 1), ">= " + text(starts[b]), text(starts[b + 1]));
      if (starts[b + 1] - starts[b] > most)
        return above(at(b + 1), "at most " + text(most) + " tokens a request", starts[b + 1] - starts[b]);
    }
    if (starts.back() > total) return above(field, "at most " + text(total) + " tokens in all", starts.back());
    return {};
  };
  LATTE_RETURN_IF_ERROR(check_starts("query_start", query, limits.max_query_tokens, limits.max_total_query_tokens));
  LATTE_RETURN_IF_ERROR(check_starts("kv_start", kv, limits.max_kv_tokens, limits.max_total_kv_tokens));
  if (std::int64_t{query.back()} * heads > INT32_MAX)
    return above("query_start", "tokens * heads below 2^31", query.back());
  return validate_context_lens(lengths.context_lens, requests, context);
}

Status validate_prefill_args(const PlannedPrefill& step, const PrefillArgs& args) {
  LATTE_RETURN_IF_ERROR(validate_stream(step.place, args.stream));
  LATTE_RETURN_IF_ERROR(check_inputs(step, args));
  LATTE_RETURN_IF_ERROR(validate_outputs(
      args.out, args.lse, {step.query_tokens(), step.problem.heads, step.problem.v_width, step.problem.out_dtype},
      step.place));
  LATTE_RETURN_IF_ERROR(check_scales(step, args));
  if (!args.workspace.empty()) {
    LATTE_RETURN_IF_ERROR(validate_workspace(args.workspace, step.workspace_bytes, kPrefillWorkspaceAlignment));
  } else if (!step.owns_workspace && step.workspace_bytes > 0) {
    return missing("workspace",
                   text(step.workspace_bytes) + " bytes, as the builder was made with own_workspace = false");
  }
  return check_context_args(step, args);
}

}  // namespace latte::backend
