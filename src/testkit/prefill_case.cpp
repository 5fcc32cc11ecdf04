#include "testkit/prefill_case.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "testkit/oracle.hpp"
#include "testkit/rng.hpp"

namespace latte::testkit {
namespace {

const char* scale_form_name(ScaleForm form) {
  switch (form) {
    case ScaleForm::value: return "value";
    case ScaleForm::pointer: return "pointer";
    case ScaleForm::per_head: break;
  }
  return "per_head";
}

}  // namespace

PrefillProblem PrefillCase::problem() const {
  PrefillProblem problem{.heads = heads,
                         .qk_width = qk_width,
                         .v_width = v_width,
                         .dtype = dtype,
                         .out_dtype = out_dtype,
                         .mask = mask,
                         .math = math};
  if (context_tokens() == 0) return problem;
  problem.context = {.latent = latent,
                     .rope = rope,
                     .kv_format = kv_format,
                     .page_size = page_size,
                     .max_total_tokens = context_tokens(),
                     .workspace_bytes = context_workspace_bytes};
  for (const PrefillRequest& request : requests)
    problem.context->max_tokens = std::max(problem.context->max_tokens, request.context_tokens);
  return problem;
}

Limits PrefillCase::limits(std::int32_t workers) const {
  Limits limits{.max_requests = std::max<std::int32_t>(1, static_cast<std::int32_t>(requests.size())),
                .max_total_query_tokens = std::max<std::int32_t>(1, static_cast<std::int32_t>(query_tokens())),
                .max_kv_tokens = 1,
                .max_total_kv_tokens = std::max<std::int64_t>(1, kv_tokens()),
                .workers = workers};
  for (const PrefillRequest& request : requests) {
    limits.max_query_tokens = std::max(limits.max_query_tokens, request.query_tokens);
    limits.max_kv_tokens = std::max(limits.max_kv_tokens, request.kv_tokens);
  }
  return limits;
}

float PrefillCase::softmax_scale() const {
  return scale != 0 ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk_width)));
}

std::int64_t PrefillCase::query_tokens() const {
  std::int64_t sum = 0;
  for (const PrefillRequest& request : requests) sum += request.query_tokens;
  return sum;
}

std::int64_t PrefillCase::kv_tokens() const {
  std::int64_t sum = 0;
  for (const PrefillRequest& request : requests) sum += request.kv_tokens;
  return sum;
}

std::int64_t PrefillCase::context_tokens() const {
  std::int64_t sum = 0;
  for (const PrefillRequest& request : requests) sum += request.context_tokens;
  return sum;
}

std::vector<float> PrefillCase::head_scales(float base, std::uint64_t salt) const {
  Rng rng(seed ^ salt);
  std::vector<float> scales(static_cast<std::size_t>(heads));
  for (float& value : scales) value = base * static_cast<float>(0.5 + rng.uniform());
  return scales;
}

std::string PrefillCase::spec() const {
  std::ostringstream text;
  for (std::size_t begin = 0; begin < requests.size();) {
    std::size_t end = begin;
    while (end < requests.size() && requests[end] == requests[begin]) ++end;
    const PrefillRequest& request = requests[begin];
    text << (begin == 0 ? "" : "_") << end - begin << 'q' << request.query_tokens << 's' << request.kv_tokens;
    if (request.context_tokens > 0) text << 'c' << request.context_tokens;
    begin = end;
  }
  return text.str();
}

std::string PrefillCase::name() const {
  std::ostringstream text;
  text << "prefill heads=" << heads << " qk=" << qk_width << " v=" << v_width << " dtype=" << dtype_name(dtype)
       << " out=" << dtype_name(out_dtype) << " mask=" << mask_name(mask) << " math=" << prefill_math_name(math)
       << " q_layout=" << layout_name(q_layout) << " k_layout=" << layout_name(k_layout)
       << " v_layout=" << layout_name(v_layout) << " out_layout=" << layout_name(out_layout)
       << " lse=" << (with_lse ? layout_name(lse_layout) : "none")
       << (align_bytes > 1 ? " align=" + std::to_string(align_bytes) : "") << " scale=" << softmax_scale();
  if (has_scales())
    text << " scales=" << q_scale << ',' << k_scale << ',' << v_scale << ' ' << scale_form_name(scale_form);
  if (outliers) text << " outliers";
  if (sink != Sink::none) text << " sink=" << sink_name(sink);
  if (opposed) text << " opposed";
  if (context_tokens() > 0) {
    text << " latent=" << latent << " rope=" << rope << " page=" << page_size << " kv=" << kv_format_name(kv_format)
         << " pages=" << (page_form == PageForm::csr ? "csr" : "table")
         << " context_workspace=" << context_workspace_bytes;
    if (kv_format == KvFormat::fp8_e4m3) text << " kv_scale=" << kv_scale;
  }
  text << " seed=" << seed << " spec=" << spec();
  return text.str();
}

double PrefillCase::visible_pairs() const {
  double pairs = 0;
  for (const PrefillRequest& request : requests) {
    pairs += static_cast<double>(request.query_tokens) * request.context_tokens;
    for (std::int32_t j = 0; j < request.query_tokens; ++j)
      pairs += visible_tokens(mask, request.kv_tokens, request.query_tokens, j);
  }
  return pairs;
}

double PrefillCase::flops() const { return 2.0 * heads * (static_cast<double>(qk_width) + v_width) * visible_pairs(); }

double PrefillCase::bytes() const {
  const auto item = static_cast<double>(dtype_bytes(dtype)), out_item = static_cast<double>(dtype_bytes(out_dtype));
  return heads * (static_cast<double>(query_tokens()) * (qk_width * item + v_width * out_item) +
                  static_cast<double>(kv_tokens()) * (qk_width + v_width) * item);
}

// fp8 tensors that are converted are exact in 16 bits and lose what bf16 loses. Where fp8 is multiplied, the weights
// are rounded to three bits (3e-2, as for decode: 2.5e-2 where many weights are alike), and the hardware adds products
// with some 14 bits, which moves scores, and with them the LSE, by thousandths, or by as much as 1/386 of the
// largest, as measured; half as much again is allowed.
Tolerance PrefillCase::tolerance(PrefillMath ran, double max_abs_score) const {
  if (ran == PrefillMath::fp8)
    return {.out = tolerance_factor * 3e-2, .lse = tolerance_factor * std::max(5e-3, max_abs_score / 256)};
  const auto out_of = [&](Dtype format) {
    return format == Dtype::f32 ? 2e-6 * (1 + max_abs_score) : format == Dtype::f16 ? 6e-4 : 3e-3;
  };
  const double lse = dtype == Dtype::f32 ? 1e-5 * (1 + max_abs_score) : dtype == Dtype::f16 ? 2e-4 : 1e-3;
  return {.out = tolerance_factor * std::max(out_of(dtype), out_of(out_dtype)), .lse = tolerance_factor * lse};
}

}  // namespace latte::testkit
