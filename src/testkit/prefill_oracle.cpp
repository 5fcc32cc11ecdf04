#include "testkit/prefill_oracle.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// From the numbers in memory to those that are multiplied.
struct Conversion {
  bool scaled = false;
  bool quantised = false;
  Fp8Scale scale;

  void apply(std::int32_t head, double* values, std::int64_t count) const {
    if (!scaled && !quantised) return;
    const double f = scale_of(scale, head);
    for (std::int64_t i = 0; i < count; ++i)
      values[i] = f * (quantised ? decode_e4m3(encode_e4m3(values[i] / f)) : values[i]);
  }
};

class Oracle {
 public:
  Oracle(const PrefillProblem& problem, const PrefillLengths& lengths, const PrefillArgs& args, PrefillMath ran,
         const ExpandedContext& context)
      : problem_(problem), lengths_(lengths), args_(args), context_(context) {
    const bool fp8 = problem.dtype == Dtype::fp8_e4m3, quantised = !fp8 && ran == PrefillMath::fp8;
    q_ = {.scaled = fp8, .quantised = quantised, .scale = args.q_scale};
    k_ = {.scaled = fp8, .quantised = quantised, .scale = args.k_scale};
    v_ = {.scaled = fp8, .quantised = quantised, .scale = args.v_scale};
    result_ = {.tokens = lengths.query_start.back(), .heads = problem.heads, .latent = problem.v_width};
    result_.out.resize(static_cast<std::size_t>(result_.tokens * problem.heads * problem.v_width));
    result_.lse.resize(static_cast<std::size_t>(result_.tokens * problem.heads));
  }

  // Heads of requests are independent: threads take them one by one.
  OracleResult run() {
    const auto requests = static_cast<std::int32_t>(lengths_.query_start.size()) - 1;
    std::atomic<std::int32_t> next{0};
    const auto work = [&](double& max_abs_score) {
      for (std::int32_t item; (item = next++) < requests * problem_.heads;)
        attend(item / problem_.heads, item % problem_.heads, max_abs_score);
    };
    std::vector<double> largest(std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16), 0);
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < largest.size(); ++i) threads.emplace_back(work, std::ref(largest[i]));
    work(largest[0]);
    for (std::thread& thread : threads) thread.join();
    result_.max_abs_score = *std::max_element(largest.begin(), largest.end());
    return std::move(result_);
  }

 private:
  static void load_token(const ConstTensorView& view, std::int64_t token, std::int32_t head, std::int64_t width,
                         double* to) {
    const std::int64_t offset = token * view.stride[0] + head * view.stride[1];
    load_row(view.dtype, view.bytes() + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype)), width, to);
  }

  // One head's keys or values of a request, those of the context first.
  std::vector<double> load_tokens(std::int32_t request, std::int32_t head, const ConstTensorView& view,
                                  std::vector<double> ExpandedContext::Request::*context, std::int64_t width,
                                  const Conversion& conversion) const {
    const std::int64_t older = context_tokens(request), first = lengths_.kv_start[request];
    const std::int64_t tokens = older + lengths_.kv_start[request + 1] - first;
    std::vector<double> values(static_cast<std::size_t>(tokens * width));
    for (std::int64_t t = 0; t < tokens; ++t) {
      double* to = &values[static_cast<std::size_t>(t * width)];
      if (t < older)
        std::copy_n(&(context_.requests[request].*context)[(t * problem_.heads + head) * width], width, to);
      else
        load_token(view, first + t - older, head, width, to);
      conversion.apply(head, to, width);
    }
    return values;
  }

  std::int32_t context_tokens(std::int32_t request) const {
    return context_.requests.empty() ? 0 : context_.requests[request].tokens;
  }

  void attend(std::int32_t request, std::int32_t head, double& max_abs_score) {
    const std::int32_t begin = lengths_.query_start[request], n = lengths_.query_start[request + 1] - begin;
    if (n == 0) return;
    const std::int64_t qk = problem_.qk_width, width = problem_.v_width;
    const std::vector<double> k = load_tokens(request, head, args_.k, &ExpandedContext::Request::k, qk, k_);
    const std::vector<double> v = load_tokens(request, head, args_.v, &ExpandedContext::Request::v, width, v_);
    const std::int32_t length = lengths_.kv_start[request + 1] - lengths_.kv_start[request];
    std::vector<double> q(static_cast<std::size_t>(qk)), scores(k.size() / static_cast<std::size_t>(qk));
    for (std::int32_t j = 0; j < n; ++j) {
      const std::int64_t row = static_cast<std::int64_t>(begin + j) * problem_.heads + head;
      double* out = &result_.out[static_cast<std::size_t>(row * width)];
      double& lse = result_.lse[static_cast<std::size_t>(row)];
      const std::int64_t visible = context_tokens(request) + visible_tokens(problem_.mask, length, n, j);
      lse = -kInfinity;
      if (visible == 0) continue;
      load_token(args_.q, begin + j, head, qk, q.data());
      q_.apply(head, q.data(), qk);
      double max = -kInfinity, sum = 0;
      for (std::int64_t t = 0; t < visible; ++t) {
        scores[t] = static_cast<double>(args_.scale) * dot(q.data(), &k[t * qk], qk);
        max = std::max(max, scores[t]);
        max_abs_score = std::max(max_abs_score, std::fabs(scores[t]));
      }
      for (std::int64_t t = 0; t < visible; ++t) {
        const double weight = std::exp(scores[t] - max);
        sum += weight;
        for (std::int64_t d = 0; d < width; ++d) out[d] += weight * v[t * width + d];
      }
      for (std::int64_t d = 0; d < width; ++d) out[d] /= sum;
      lse = max + std::log(sum);
    }
  }

  const PrefillProblem& problem_;
  const PrefillLengths& lengths_;
  const PrefillArgs& args_;
  const ExpandedContext& context_;
  Conversion q_, k_, v_;
  OracleResult result_;
};

}  // namespace

OracleResult prefill_oracle(const PrefillProblem& problem, const PrefillLengths& lengths, const PrefillArgs& args,
                            PrefillMath ran, const ExpandedContext& context) {
  return Oracle(problem, lengths, args, ran, context).run();
}

}  // namespace latte::testkit
