#include "testkit/case.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "testkit/rng.hpp"

namespace latte::testkit {
namespace {

enum class Precision : std::uint8_t { f32, f16, bf16, fp8 };  // finest first

Precision precision(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return Precision::f32;
    case Dtype::f16: return Precision::f16;
    case Dtype::bf16: return Precision::bf16;
    case Dtype::fp8_e4m3:
    case Dtype::u8: break;
  }
  return Precision::fp8;
}

double out_tolerance(Precision p, double max_abs_score) {
  switch (p) {
    case Precision::f32: return 2e-6 * (1 + max_abs_score);
    case Precision::f16: return 6e-4;
    case Precision::bf16: return 3e-3;
    case Precision::fp8: break;
  }
  return 5e-3;  // P in 16 bits or more
}

double lse_tolerance(Precision p, double max_abs_score) {
  switch (p) {
    case Precision::f32: return 1e-5 * (1 + max_abs_score);
    case Precision::f16: return 2e-4;
    case Precision::bf16:
    case Precision::fp8: break;
  }
  return 1e-3;
}

}  // namespace

const char* sink_name(Sink sink) { return sink == Sink::none ? "none" : sink == Sink::first ? "first" : "last"; }

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::dense: return "dense";
    case Layout::gapped: return "gapped";
    case Layout::transposed: break;
  }
  return "transposed";
}

DecodeProblem DecodeCase::problem() const {
  return {.heads = heads,
          .latent = latent,
          .rope = rope,
          .q_dtype = q_dtype,
          .out_dtype = out_dtype,
          .kv_format = kv_format,
          .page_size = page_size,
          .mask = mask};
}

Limits DecodeCase::limits(std::int32_t workers) const {
  Limits limits{.max_requests = std::max<std::int32_t>(1, static_cast<std::int32_t>(requests.size())),
                .max_total_query_tokens = std::max<std::int32_t>(1, static_cast<std::int32_t>(query_tokens())),
                .max_kv_tokens = 1,
                .max_total_kv_tokens = std::max<std::int64_t>(1, kv_tokens()),
                .workers = workers};
  for (const RequestLengths& request : requests) {
    limits.max_query_tokens = std::max(limits.max_query_tokens, request.query_tokens);
    limits.max_kv_tokens = std::max(limits.max_kv_tokens, request.kv_tokens);
  }
  return limits;
}

float DecodeCase::softmax_scale() const {
  return scale != 0 ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(latent + rope)));
}

std::int64_t DecodeCase::query_tokens() const {
  std::int64_t sum = 0;
  for (const RequestLengths& request : requests) sum += request.query_tokens;
  return sum;
}

std::int64_t DecodeCase::kv_tokens() const {
  std::int64_t sum = 0;
  for (const RequestLengths& request : requests) sum += request.kv_tokens;
  return sum;
}

std::vector<std::int32_t> DecodeCase::visible() const {
  std::vector<std::int32_t> bounds_of_tokens;
  if (bounds == Bounds::mask) return bounds_of_tokens;
  Rng rng(seed ^ 0x76697369626c65u);
  for (const RequestLengths& request : requests)
    for (std::int32_t j = 0; j < request.query_tokens; ++j)
      bounds_of_tokens.push_back(rng.chance(4) ? rng.pick(std::vector{0, request.kv_tokens})
                                               : rng.between(0, request.kv_tokens));
  return bounds_of_tokens;
}

std::string DecodeCase::spec() const {
  std::ostringstream text;
  for (std::size_t begin = 0; begin < requests.size();) {
    std::size_t end = begin;
    while (end < requests.size() && requests[end] == requests[begin]) ++end;
    text << (begin == 0 ? "" : "_") << end - begin << 'q' << requests[begin].query_tokens << 's'
         << requests[begin].kv_tokens;
    begin = end;
  }
  return text.str();
}

std::string DecodeCase::name() const {
  std::ostringstream text;
  text << "heads=" << heads << " latent=" << latent << " rope=" << rope << " page=" << page_size
       << " kv=" << kv_format_name(kv_format) << " q=" << dtype_name(q_dtype) << " out=" << dtype_name(out_dtype)
       << " mask=" << (bounds == Bounds::random ? "bounds" : mask_name(mask))
       << " q_form=" << (query_form == QueryForm::split ? "split" : "joined")
       << " pages=" << (page_form == PageForm::csr ? "csr" : "table") << " cache=" << layout_name(cache_layout)
       << " out_layout=" << layout_name(out_layout) << " lse=" << (with_lse ? layout_name(lse_layout) : "none")
       << (align_bytes > 1 ? " align=" + std::to_string(align_bytes) : "") << (scale_pointers ? " scale_pointers" : "")
       << " scale=" << softmax_scale();
  if (kv_format == KvFormat::fp8_e4m3) text << " kv_scale=" << kv_scale;
  if (q_dtype == Dtype::fp8_e4m3) text << " q_scale=" << q_scale;
  if (kv_spread != 1) text << " kv_spread=" << kv_spread;
  if (sink != Sink::none) text << " sink=" << sink_name(sink);
  text << " seed=" << seed;
  if (page_seed != 0) text << " page_seed=" << page_seed;
  text << " spec=" << spec();
  return text.str();
}

double DecodeCase::flops() const {
  double query_kv_pairs = 0;
  for (const RequestLengths& request : requests)
    query_kv_pairs += static_cast<double>(request.query_tokens) * request.kv_tokens;
  return 2.0 * heads * query_kv_pairs * (2.0 * latent + rope);
}

double DecodeCase::kv_token_bytes() const {
  return static_cast<double>(kv_token_elements(kv_format, latent, rope)) *
         static_cast<double>(dtype_bytes(kv_element_dtype(kv_format)));
}

double DecodeCase::bytes() const {
  const double rows = static_cast<double>(query_tokens()) * heads;
  return static_cast<double>(kv_tokens()) * kv_token_bytes() +
         rows * (latent + rope) * static_cast<double>(dtype_bytes(q_dtype)) +
         rows * latent * static_cast<double>(dtype_bytes(out_dtype));
}

// The coarsest of the formats involved decides; the LSE never passes through the output's format.
Tolerance DecodeCase::tolerance(double max_abs_score) const {
  const bool fp8_cache = kv_format == KvFormat::fp8_e4m3 || kv_format == KvFormat::fp8_ds_mla;
  const Precision cache = fp8_cache ? Precision::fp8 : precision(kv_element_dtype(kv_format));
  const Precision inputs = std::max(cache, precision(q_dtype));
  return {.out = tolerance_factor * out_tolerance(std::max(inputs, precision(out_dtype)), max_abs_score),
          .lse = tolerance_factor * lse_tolerance(inputs, max_abs_score)};
}

}  // namespace latte::testkit
