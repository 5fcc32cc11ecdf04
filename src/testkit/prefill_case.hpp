// The one description of a prefill call that tests, `latte check` and `latte bench` share, as case.hpp is for decode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "latte/problem.hpp"
#include "testkit/case.hpp"

namespace latte::testkit {

struct PrefillRequest {
  std::int32_t query_tokens = 0;
  std::int32_t kv_tokens = 0;       // of k and v
  std::int32_t context_tokens = 0;  // in the paged cache
  bool operator==(const PrefillRequest&) const = default;
};

// How the scales of q, k and v are handed over.
enum class ScaleForm : std::uint8_t { value, pointer, per_head };

struct PrefillCase {
  std::vector<PrefillRequest> requests{};
  std::int32_t heads = 16;
  std::int32_t qk_width = 192;
  std::int32_t v_width = 128;
  Dtype dtype = Dtype::bf16;
  Dtype out_dtype = Dtype::bf16;
  Mask mask = Mask::causal;
  PrefillMath math = PrefillMath::automatic;
  Layout q_layout = Layout::dense;
  Layout k_layout = Layout::dense;
  Layout v_layout = Layout::dense;
  Layout out_layout = Layout::dense;
  bool with_lse = true;
  Layout lse_layout = Layout::dense;
  std::int32_t align_bytes = 1;  // strides of gapped tensors are multiples of this; 1 = odd ones
  ScaleForm scale_form = ScaleForm::value;
  float scale = 0;  // 0 = 1 / sqrt(qk_width)
  // Of fp8 tensors and of those that are quantised on entry; per head: times a number from 1/2 to 3/2.
  float q_scale = 0.75f, k_scale = 0.375f, v_scale = 0.5f;
  bool outliers = false;  // one value in a thousand is ten times as large
  // Every other query has only negative values. The keys of every other request have none, and of the requests between
  // them the later half of the keys. So there are rows without a score above zero, and rows that have one only among
  // their first tokens, which kernels that go from the last to the first see late. Keys of context stay as they are.
  bool opposed = false;
  // Not none: every query scores all tokens alike, but a request's first or last one 8 * scale higher. So nearly all
  // probabilities are the same number, and whatever rounding does to it does not average out.
  Sink sink = Sink::none;

  // Only for requests with context.
  std::int32_t latent = 64;
  std::int32_t rope = 16;
  KvFormat kv_format = KvFormat::bf16;
  std::int32_t page_size = 16;
  PageForm page_form = PageForm::block_table;
  float kv_scale = 0.375f;  // fp8_e4m3 cache only
  std::int64_t context_workspace_bytes = 0;
  std::uint64_t seed = 1;
  double tolerance_factor = 1;  // of what docs/numerics.md allows

  PrefillProblem problem() const;
  Limits limits(std::int32_t workers = 0) const;
  float softmax_scale() const;
  std::int64_t query_tokens() const;
  std::int64_t kv_tokens() const;
  std::int64_t context_tokens() const;
  bool has_scales() const { return dtype == Dtype::fp8_e4m3 || math == PrefillMath::fp8; }
  // The scale of each head, where they differ.
  std::vector<float> head_scales(float scale, std::uint64_t salt) const;

  // Everything needed to make the case again, on one line.
  std::string name() const;
  // The requests in the grammar of the benchmarks, context behind a c: 2q1024s2048_1q64s64c300.
  std::string spec() const;

  // Pairs of query and KV tokens that the mask lets through, over all requests; context counts in full.
  double visible_pairs() const;
  // 2 * heads * (qk_width + v_width) for each of them: half the square for a causal prompt.
  double flops() const;
  // q, k, v and out once.
  double bytes() const;
  // `ran`: what the builder says runs, half or fp8.
  Tolerance tolerance(PrefillMath ran, double max_abs_score) const;
};

}  // namespace latte::testkit
