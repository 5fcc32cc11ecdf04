// A small prefill step that works, to be broken one field at a time, and the same calls made through C.
#pragma once

#include <algorithm>

#include "tests/unit/bad_input.hpp"

namespace latte::bad_input {

inline latte_prefill_context to_c(const PrefillContext& context) {
  latte_prefill_context out = LATTE_PREFILL_CONTEXT_INIT;
  out.latent = context.latent;
  out.rope = context.rope;
  out.kv_format = static_cast<int32_t>(context.kv_format);
  out.page_size = context.page_size;
  out.max_tokens = context.max_tokens;
  out.max_total_tokens = context.max_total_tokens;
  out.workspace_bytes = context.workspace_bytes;
  return out;
}

// `context` is where the problem's context goes, if it has one.
inline latte_prefill_problem to_c(const PrefillProblem& problem, latte_prefill_context& context) {
  latte_prefill_problem out = LATTE_PREFILL_PROBLEM_INIT;
  out.heads = problem.heads;
  out.qk_width = problem.qk_width;
  out.v_width = problem.v_width;
  out.dtype = static_cast<int32_t>(problem.dtype);
  out.out_dtype = static_cast<int32_t>(problem.out_dtype);
  out.mask = static_cast<int32_t>(problem.mask);
  out.math = static_cast<int32_t>(problem.math);
  if (problem.context) {
    context = to_c(*problem.context);
    out.context = &context;
  }
  return out;
}

inline latte_prefill_lengths to_c(const PrefillLengths& lengths) {
  latte_prefill_lengths out = LATTE_PREFILL_LENGTHS_INIT;
  out.query_start = lengths.query_start.data();
  out.query_start_count = static_cast<int64_t>(lengths.query_start.size());
  out.kv_start = lengths.kv_start.data();
  out.kv_start_count = static_cast<int64_t>(lengths.kv_start.size());
  out.context_lens = lengths.context_lens.data();
  out.context_lens_count = static_cast<int64_t>(lengths.context_lens.size());
  return out;
}

inline latte_fp8_scale to_c(const Fp8Scale& scale) { return {scale.value, scale.per_head ? 1 : 0, scale.ptr}; }

inline latte_gather_kv_args to_c(const GatherKvArgs& args) {
  latte_gather_kv_args out = latte_gather_kv_args_init();
  out.kv_format = static_cast<int32_t>(args.kv_format);
  out.kv_cache = to_c(args.kv_cache);
  out.out = to_c(args.out);
  out.block_table = args.pages.block_table;
  out.block_table_stride = args.pages.block_table_stride;
  out.max_pages = args.pages.max_pages;
  out.page_indptr = args.pages.page_indptr.data();
  out.page_indptr_count = static_cast<int64_t>(args.pages.page_indptr.size());
  out.page_indices = args.pages.page_indices.data();
  out.page_indices_count = static_cast<int64_t>(args.pages.page_indices.size());
  out.out_start = args.out_start.data();
  out.out_start_count = static_cast<int64_t>(args.out_start.size());
  out.first_token = args.first_token;
  out.tokens = args.tokens;
  out.kv_scale = args.kv_scale.value;
  out.kv_scale_ptr = args.kv_scale.ptr;
  out.stream = args.stream;
  return out;
}

// Two requests with 2 and 1 new tokens, of which the first has 5 older ones in pages of 4 tokens; three heads, all
// fp32. Every key is like every other, and so is every value. The tensors have one row more than the step uses, and
// every output byte starts as poison.
struct PrefillCase {
  static constexpr std::int64_t kTokens = 4, kHeads = 3, kQk = 32, kV = 16, kPages = 4, kPageSize = 4, kWidth = 48;

  PrefillProblem problem{
      .heads = kHeads,
      .qk_width = kQk,
      .v_width = kV,
      .dtype = Dtype::f32,
      .out_dtype = Dtype::f32,
      .context = PrefillContext{
          .latent = 32, .rope = 16, .kv_format = KvFormat::f32, .page_size = kPageSize, .max_tokens = 8}};
  Limits limits{.max_requests = 2, .max_query_tokens = 2, .max_kv_tokens = 3};
  std::vector<std::int32_t> query_start{0, 2, 3}, kv_start{0, 2, 3}, context_lens{5, 0};
  std::vector<std::int32_t> block_table{0, 1, -7, -7}, page_indptr{0, 2, 2}, page_indices{0, 1};
  std::vector<float> q = std::vector<float>(kTokens * kHeads * kQk, 0.25f);
  std::vector<float> k = std::vector<float>(kTokens * kHeads * kQk, 0.5f);
  std::vector<float> v = std::vector<float>(kTokens * kHeads * kV, 0.75f);
  std::vector<float> cache = std::vector<float>(kPages * kPageSize * kWidth, 0.5f);
  std::vector<float> out = std::vector<float>(kTokens * kHeads * kV);
  std::vector<float> lse = std::vector<float>(kTokens * kHeads);
  alignas(256) std::byte workspace[64] = {};
  float bad_scale = -1, good_scale = 2;
  int expanded = 0;  // chunks that came by
  bool expand_fails = false;

  PrefillCase() { poison(); }

  PrefillLengths lengths() const {
    return {.query_start = query_start, .kv_start = kv_start, .context_lens = context_lens};
  }

  PrefillArgs args() {
    PrefillArgs args;
    args.q = dense(static_cast<const void*>(q.data()), Dtype::f32, {kTokens, kHeads, kQk});
    args.k = dense(static_cast<const void*>(k.data()), Dtype::f32, {kTokens, kHeads, kQk});
    args.v = dense(static_cast<const void*>(v.data()), Dtype::f32, {kTokens, kHeads, kV});
    args.out = dense(out.data(), Dtype::f32, {kTokens, kHeads, kV});
    args.lse = dense(lse.data(), Dtype::f32, {kTokens, kHeads});
    args.scale = 0.125f;
    args.kv_cache = dense(static_cast<const void*>(cache.data()), Dtype::f32, {kPages, kPageSize, kWidth});
    args.pages.block_table = block_table.data();
    args.pages.block_table_stride = 2;
    args.pages.max_pages = 2;
    args.expand = [](void* user, const ContextChunk& chunk) {
      auto& self = *static_cast<PrefillCase*>(user);
      return self.fill(chunk.k, chunk.v) ? Status() : Status(Code::internal, "weights", "some", "none");
    };
    args.user = this;
    return args;
  }
  void use_page_lists(PrefillArgs& args) {
    args.pages = {};
    args.pages.page_indptr = page_indptr;
    args.pages.page_indices = page_indices;
  }
  latte_prefill_args c_args(const PrefillArgs& args) {
    latte_prefill_args c = latte_prefill_args_init();
    c.scale = args.scale;
    c.q = to_c(args.q);
    c.k = to_c(args.k);
    c.v = to_c(args.v);
    c.out = to_c(args.out);
    c.lse = to_c(args.lse);
    c.q_scale = to_c(args.q_scale);
    c.k_scale = to_c(args.k_scale);
    c.v_scale = to_c(args.v_scale);
    c.workspace = args.workspace.data();
    c.workspace_bytes = args.workspace.size();
    c.stream = args.stream;
    c.kv_cache = to_c(args.kv_cache);
    c.block_table = args.pages.block_table;
    c.block_table_stride = args.pages.block_table_stride;
    c.max_pages = args.pages.max_pages;
    c.page_indptr = args.pages.page_indptr.data();
    c.page_indptr_count = static_cast<int64_t>(args.pages.page_indptr.size());
    c.page_indices = args.pages.page_indices.data();
    c.page_indices_count = static_cast<int64_t>(args.pages.page_indices.size());
    c.kv_scale = args.kv_scale.value;
    c.kv_scale_ptr = args.kv_scale.ptr;
    c.user = this;
    if (args.expand != nullptr)
      c.expand = [](void* user, const latte_context_chunk* chunk, latte_error* error) -> latte_code {
        auto& self = *static_cast<PrefillCase*>(user);
        const auto view = [](const latte_tensor& tensor) {
          return dense(tensor.data, static_cast<Dtype>(tensor.dtype),
                       {tensor.shape[0], tensor.shape[1], tensor.shape[2]});
        };
        if (self.fill(view(chunk->k), view(chunk->v))) return LATTE_OK;
        std::strcpy(error->field, "weights");
        std::strcpy(error->expected, "some");
        std::strcpy(error->got, "none");
        return LATTE_INTERNAL;
      };
    return c;
  }

  bool fill(const TensorView& to_k, const TensorView& to_v) {
    ++expanded;
    if (expand_fails) return false;
    std::fill_n(static_cast<float*>(to_k.data), to_k.shape[0] * to_k.shape[1] * to_k.shape[2], 0.5f);
    std::fill_n(static_cast<float*>(to_v.data), to_v.shape[0] * to_v.shape[1] * to_v.shape[2], 0.75f);
    return true;
  }

  void poison() {
    std::memset(out.data(), Step::kPoison, out.size() * sizeof(float));
    std::memset(lse.data(), Step::kPoison, lse.size() * sizeof(float));
  }
  bool untouched() const { return Step::all_poison(out) && Step::all_poison(lse); }
  // Of the row behind the step's three.
  bool tail_untouched() const {
    return Step::all_poison({out.begin() + 3 * kHeads * kV, out.end()}) &&
           Step::all_poison({lse.begin() + 3 * kHeads, lse.end()});
  }
};

}  // namespace latte::bad_input
