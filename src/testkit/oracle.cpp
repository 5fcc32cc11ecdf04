#include "testkit/oracle.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int32_t kDsMlaLatent = 512, kDsMlaRope = 64, kDsMlaGroup = 128;
constexpr std::int32_t kDsMlaScaleOffset = kDsMlaLatent;
constexpr std::int32_t kDsMlaRopeOffset = kDsMlaScaleOffset + kDsMlaLatent / kDsMlaGroup * 4;

template <class View>
auto element(const View& view, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  const std::int64_t offset = i * view.stride[0] + j * view.stride[1] + k * view.stride[2];
  return view.bytes() + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

// The page that holds tokens [page * page_size, (page + 1) * page_size) of a request.
std::int64_t page_id(const PageTable& pages, std::int64_t request, std::int64_t page) {
  if (!pages.page_indptr.empty()) return pages.page_indices[pages.page_indptr[request] + page];
  return pages.block_table[request * pages.block_table_stride + page];
}

std::vector<double> load_request(const DecodeProblem& problem, const DecodeArgs& args, std::int32_t request,
                                 std::int32_t tokens) {
  const double kv_scale = scale_of(args.kv_scale);
  const std::int64_t width = problem.latent + problem.rope;
  std::vector<double> kv(tokens * width);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t page = page_id(args.pages, request, t / problem.page_size);
    load_kv_token(problem, element(args.kv_cache, page, t % problem.page_size), kv_scale, &kv[t * width]);
  }
  return kv;
}

std::vector<double> load_query(const DecodeProblem& problem, const DecodeArgs& args, std::int64_t token,
                               std::int64_t head) {
  std::vector<double> q(problem.latent + problem.rope);
  if (!args.q.empty()) {
    load_row(args.q.dtype, element(args.q, token, head), problem.latent + problem.rope, q.data());
  } else {
    load_row(args.q_nope.dtype, element(args.q_nope, token, head), problem.latent, q.data());
    load_row(args.q_pe.dtype, element(args.q_pe, token, head), problem.rope, q.data() + problem.latent);
  }
  if (problem.q_dtype == Dtype::fp8_e4m3) {
    const double q_scale = scale_of(args.q_scale);
    for (double& value : q) value *= q_scale;
  }
  return q;
}

// Softmax attention of one row over `visible` tokens; returns the LSE.
double attend(const std::vector<double>& q, const std::vector<double>& kv, std::int32_t visible, double scale,
              std::span<double> out, double& max_abs_score) {
  const auto width = static_cast<std::int64_t>(q.size());
  std::fill(out.begin(), out.end(), 0.0);
  if (visible <= 0) return -kInfinity;

  std::vector<double> scores(visible);
  for (std::int64_t t = 0; t < visible; ++t) {
    scores[t] = scale * dot(q.data(), &kv[t * width], width);
    max_abs_score = std::max(max_abs_score, std::fabs(scores[t]));
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (std::int64_t t = 0; t < visible; ++t) {
    const double weight = std::exp(scores[t] - max);
    const double* value = &kv[t * width];
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * value[d];
  }
  for (double& value : out) value /= sum;
  return max + std::log(sum);
}

}  // namespace

std::int32_t visible_tokens(Mask mask, std::int32_t seq_len, std::int32_t n, std::int32_t j) {
  return mask == Mask::none ? seq_len : std::max(0, seq_len - n + j + 1);
}

// Eight partial sums, so that the compiler may keep them in vector registers without reordering anything.
double dot(const double* a, const double* b, std::int64_t n) {
  double sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

double scale_of(const Fp8Scale& scale, std::int32_t head) {
  if (scale.ptr == nullptr) return scale.value;
  return scale.per_head ? scale.ptr[head] : *scale.ptr;
}

void load_kv_token(const DecodeProblem& problem, const std::byte* token, double kv_scale, double* to) {
  const std::int32_t width = problem.latent + problem.rope;
  switch (problem.kv_format) {
    case KvFormat::bf16: return load_row(Dtype::bf16, token, width, to);
    case KvFormat::f16: return load_row(Dtype::f16, token, width, to);
    case KvFormat::f32: return load_row(Dtype::f32, token, width, to);
    case KvFormat::fp8_e4m3:
      load_row(Dtype::fp8_e4m3, token, width, to);
      for (std::int32_t d = 0; d < width; ++d) to[d] *= kv_scale;
      return;
    case KvFormat::fp8_ds_mla:
      load_row(Dtype::fp8_e4m3, token, kDsMlaLatent, to);
      for (std::int32_t d = 0; d < kDsMlaLatent; ++d)
        to[d] *= load(Dtype::f32, token + kDsMlaScaleOffset + d / kDsMlaGroup * 4);
      load_row(Dtype::bf16, token + kDsMlaRopeOffset, kDsMlaRope, to + kDsMlaLatent);
      return;
  }
}

OracleResult decode_oracle(const DecodeProblem& problem, const StepLengths& lengths, const DecodeArgs& args) {
  OracleResult result{.tokens = lengths.query_start.back(), .heads = problem.heads, .latent = problem.latent};
  result.out.resize(result.tokens * problem.heads * problem.latent);
  result.lse.resize(result.tokens * problem.heads);
  for (std::size_t b = 0; b < lengths.seq_lens.size(); ++b) {
    const std::int32_t first = lengths.query_start[b], n = lengths.query_start[b + 1] - first;
    if (n == 0) continue;
    const auto kv = load_request(problem, args, static_cast<std::int32_t>(b), lengths.seq_lens[b]);
    for (std::int32_t j = 0; j < n; ++j) {
      const std::int64_t token = first + j;
      const std::int32_t visible =
          lengths.visible.empty() ? visible_tokens(problem.mask, lengths.seq_lens[b], n, j) : lengths.visible[token];
      for (std::int64_t head = 0; head < problem.heads; ++head) {
        const std::int64_t row = token * problem.heads + head;
        const std::span out(&result.out[row * problem.latent], static_cast<std::size_t>(problem.latent));
        result.lse[row] =
            attend(load_query(problem, args, token, head), kv, visible, args.scale, out, result.max_abs_score);
      }
    }
  }
  return result;
}

OracleResult merge_oracle(std::span<const Partial> partials) {
  const ConstTensorView& shape = partials[0].out;
  OracleResult result{.tokens = shape.shape[0],
                      .heads = static_cast<std::int32_t>(shape.shape[1]),
                      .latent = static_cast<std::int32_t>(shape.shape[2])};
  result.out.resize(result.tokens * result.heads * result.latent);
  result.lse.resize(result.tokens * result.heads);
  std::vector<double> part(result.latent);
  for (std::int64_t token = 0; token < result.tokens; ++token) {
    for (std::int64_t head = 0; head < result.heads; ++head) {
      double max = -kInfinity, sum = 0;
      for (const Partial& p : partials) max = std::max(max, load(Dtype::f32, element(p.lse, token, head)));
      double& lse = result.lse[token * result.heads + head];
      lse = -kInfinity;
      if (max == -kInfinity) continue;
      for (const Partial& p : partials) sum += std::exp(load(Dtype::f32, element(p.lse, token, head)) - max);
      lse = max + std::log(sum);
      double* out = &result.out[(token * result.heads + head) * result.latent];
      for (const Partial& p : partials) {
        const double weight = std::exp(load(Dtype::f32, element(p.lse, token, head)) - lse);
        if (weight == 0) continue;
        load_row(p.out.dtype, element(p.out, token, head), result.latent, part.data());
        for (std::int32_t d = 0; d < result.latent; ++d) out[d] += weight * part[d];
      }
    }
  }
  return result;
}

void write_kv_oracle(const WriteKvArgs& args) {
  const std::int64_t latent = args.kv_c.shape[1], rope = args.k_pe.shape[1], page_size = args.kv_cache.shape[1];
  std::vector<double> values(latent + rope);
  for (std::size_t i = 0; i < args.slot_mapping.size(); ++i) {
    const std::int64_t slot = args.slot_mapping[i];
    if (slot < 0) continue;
    const auto n = static_cast<std::int64_t>(i);
    load_row(args.kv_c.dtype, element(args.kv_c, n, 0), latent, values.data());
    load_row(args.k_pe.dtype, element(args.k_pe, n, 0), rope, values.data() + latent);
    std::byte* token = element(args.kv_cache, slot / page_size, slot % page_size);
    if (args.kv_format == KvFormat::fp8_ds_mla) {
      for (std::int64_t group = 0; group < latent / kDsMlaGroup; ++group) {
        double amax = 0;
        for (std::int64_t d = 0; d < kDsMlaGroup; ++d)
          amax = std::max(amax, std::fabs(values[group * kDsMlaGroup + d]));
        const float scale = std::max(static_cast<float>(amax / 448.0), FLT_MIN);
        store(Dtype::f32, scale, token + kDsMlaScaleOffset + group * 4);
        for (std::int64_t d = group * kDsMlaGroup; d < (group + 1) * kDsMlaGroup; ++d)
          store(Dtype::fp8_e4m3, values[d] / scale, token + d);
      }
      for (std::int64_t d = 0; d < rope; ++d) store(Dtype::bf16, values[latent + d], token + kDsMlaRopeOffset + 2 * d);
    } else {
      const Dtype dtype = args.kv_format == KvFormat::fp8_e4m3 ? Dtype::fp8_e4m3 : args.kv_cache.dtype;
      const double scale = args.kv_format == KvFormat::fp8_e4m3 ? scale_of(args.kv_scale) : 1.0;
      const auto step = static_cast<std::int64_t>(dtype_bytes(dtype));
      for (std::int64_t d = 0; d < latent + rope; ++d) store(dtype, values[d] / scale, token + d * step);
    }
  }
}

}  // namespace latte::testkit
