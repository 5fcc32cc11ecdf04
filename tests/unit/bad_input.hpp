// A small step that decodes, to be broken one field at a time, and the same calls made through C.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "latte/latte.h"
#include "latte/latte.hpp"

namespace latte::bad_input {

// What a call answered, whichever door it went through.
struct Answer {
  Code code = Code::ok;
  std::string field;
  std::string expected;
  std::string got;
};

inline Answer answer(const Status& status) { return {status.code(), status.field(), status.expected(), status.got()}; }
inline Answer answer(latte_code code, const latte_error& error) {
  return {static_cast<Code>(code), error.field, error.expected, error.got};
}

inline void expect_error(const Answer& answer, Code code, const std::string& field) {
  EXPECT_STREQ(code_name(answer.code), code_name(code));
  EXPECT_EQ(answer.field, field) << "expected " << answer.expected << ", got " << answer.got;
  EXPECT_FALSE(answer.expected.empty());
  EXPECT_FALSE(answer.got.empty());
}

inline latte_backend* open_c() {
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  options.threads = 1;
  latte_backend* backend = nullptr;
  EXPECT_EQ(latte_backend_open(&options, &backend, nullptr), LATTE_OK);
  return backend;
}

inline latte_tensor to_c(const ConstTensorView& view) {
  latte_tensor tensor{};
  tensor.data = const_cast<void*>(view.data);
  tensor.dtype = static_cast<int32_t>(view.dtype);
  tensor.rank = view.rank;
  for (std::size_t axis = 0; axis < 4; ++axis) {
    tensor.shape[axis] = view.shape[axis];
    tensor.stride[axis] = view.stride[axis];
  }
  return tensor;
}

inline latte_problem to_c(const DecodeProblem& problem) {
  latte_problem out = LATTE_PROBLEM_INIT;
  out.heads = problem.heads;
  out.latent = problem.latent;
  out.rope = problem.rope;
  out.q_dtype = static_cast<int32_t>(problem.q_dtype);
  out.out_dtype = static_cast<int32_t>(problem.out_dtype);
  out.kv_format = static_cast<int32_t>(problem.kv_format);
  out.page_size = problem.page_size;
  out.mask = static_cast<int32_t>(problem.mask);
  return out;
}

inline latte_limits to_c(const Limits& limits) {
  latte_limits out = LATTE_LIMITS_INIT;
  out.max_requests = limits.max_requests;
  out.max_query_tokens = limits.max_query_tokens;
  out.max_total_query_tokens = limits.max_total_query_tokens;
  out.max_kv_tokens = limits.max_kv_tokens;
  out.max_total_kv_tokens = limits.max_total_kv_tokens;
  out.workers = limits.workers;
  return out;
}

inline latte_builder_options to_c(const BuilderOptions& options) {
  latte_builder_options out = LATTE_BUILDER_OPTIONS_INIT;
  out.policy = static_cast<int32_t>(options.policy.kind);
  out.policy_n = options.policy.n;
  out.slots = options.slots;
  out.own_workspace = options.own_workspace ? 1 : 0;
  out.validate = options.validate ? 1 : 0;
  out.plan_memory = options.plan_memory.data();
  out.plan_memory_bytes = options.plan_memory.size();
  return out;
}

inline latte_lengths to_c(const StepLengths& lengths) {
  latte_lengths out = LATTE_LENGTHS_INIT;
  out.seq_lens = lengths.seq_lens.data();
  out.seq_lens_count = static_cast<int64_t>(lengths.seq_lens.size());
  out.query_start = lengths.query_start.data();
  out.query_start_count = static_cast<int64_t>(lengths.query_start.size());
  out.visible = lengths.visible.data();
  out.visible_count = static_cast<int64_t>(lengths.visible.size());
  return out;
}

inline latte_decode_args to_c(const DecodeArgs& args) {
  latte_decode_args out = latte_decode_args_init();
  out.scale = args.scale;
  out.q = to_c(args.q);
  out.q_nope = to_c(args.q_nope);
  out.q_pe = to_c(args.q_pe);
  out.kv_cache = to_c(args.kv_cache);
  out.out = to_c(args.out);
  out.lse = to_c(args.lse);
  out.block_table = args.pages.block_table;
  out.block_table_stride = args.pages.block_table_stride;
  out.max_pages = args.pages.max_pages;
  out.page_indptr = args.pages.page_indptr.data();
  out.page_indptr_count = static_cast<int64_t>(args.pages.page_indptr.size());
  out.page_indices = args.pages.page_indices.data();
  out.page_indices_count = static_cast<int64_t>(args.pages.page_indices.size());
  out.workspace = args.workspace.data();
  out.workspace_bytes = args.workspace.size();
  out.q_scale = args.q_scale.value;
  out.kv_scale = args.kv_scale.value;
  out.q_scale_ptr = args.q_scale.ptr;
  out.kv_scale_ptr = args.kv_scale.ptr;
  out.stream = args.stream;
  out.overlap_previous = args.overlap_previous ? 1 : 0;
  return out;
}

inline latte_write_kv_args to_c(const WriteKvArgs& args) {
  latte_write_kv_args out = latte_write_kv_args_init();
  out.kv_format = static_cast<int32_t>(args.kv_format);
  out.kv_c = to_c(args.kv_c);
  out.k_pe = to_c(args.k_pe);
  out.kv_cache = to_c(args.kv_cache);
  out.slot_mapping = args.slot_mapping.data();
  out.slot_mapping_count = static_cast<int64_t>(args.slot_mapping.size());
  out.kv_scale = args.kv_scale.value;
  out.kv_scale_ptr = args.kv_scale.ptr;
  out.stream = args.stream;
  return out;
}

// Two requests of 5 and 9 tokens with 1 and 2 query tokens, three heads, pages of 4 tokens, all fp32. The tensors have
// one row more than the step uses, and every output byte starts as poison.
struct Step {
  static constexpr std::int64_t kTokens = 4, kHeads = 3, kLatent = 32, kRope = 16, kPages = 6, kPageSize = 4;
  static constexpr unsigned char kPoison = 0xA5;

  DecodeProblem problem{.heads = kHeads,
                        .latent = kLatent,
                        .rope = kRope,
                        .q_dtype = Dtype::f32,
                        .out_dtype = Dtype::f32,
                        .kv_format = KvFormat::f32,
                        .page_size = kPageSize};
  Limits limits{.max_requests = 2, .max_query_tokens = 2, .max_kv_tokens = 16};
  std::vector<std::int32_t> seq_lens{5, 9}, query_start{0, 1, 3}, visible;
  std::vector<std::int32_t> block_table{0, 1, -7, 2, 3, 4}, page_indptr{0, 2, 5}, page_indices{0, 1, 2, 3, 4};
  std::vector<float> q = std::vector<float>(kTokens * kHeads * (kLatent + kRope), 0.25f);
  std::vector<float> cache = std::vector<float>(kPages * kPageSize * (kLatent + kRope), 0.5f);
  std::vector<float> out = std::vector<float>(kTokens * kHeads * kLatent);
  std::vector<float> lse = std::vector<float>(kTokens * kHeads);
  alignas(64) std::byte workspace[64] = {};
  float bad_scale = -1;

  Step() { poison(); }

  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}; }

  DecodeArgs args() {
    DecodeArgs args;
    args.q = dense(static_cast<const void*>(q.data()), Dtype::f32, {kTokens, kHeads, kLatent + kRope});
    args.kv_cache = dense(static_cast<const void*>(cache.data()), Dtype::f32, {kPages, kPageSize, kLatent + kRope});
    args.pages.block_table = block_table.data();
    args.pages.block_table_stride = 3;
    args.pages.max_pages = 3;
    args.out = dense(out.data(), Dtype::f32, {kTokens, kHeads, kLatent});
    args.lse = dense(lse.data(), Dtype::f32, {kTokens, kHeads});
    args.scale = 0.125f;
    return args;
  }
  // The pair as views into q.
  void use_pair(DecodeArgs& args) {
    args.q_nope = args.q;
    args.q_nope.shape[2] = kLatent;
    args.q_pe = args.q;
    args.q_pe.data = q.data() + kLatent;
    args.q_pe.shape[2] = kRope;
    args.q = {};
  }
  void use_page_lists(DecodeArgs& args) {
    args.pages = {};
    args.pages.page_indptr = page_indptr;
    args.pages.page_indices = page_indices;
  }

  void poison() {
    std::memset(out.data(), kPoison, out.size() * sizeof(float));
    std::memset(lse.data(), kPoison, lse.size() * sizeof(float));
  }
  bool untouched() const { return all_poison(out) && all_poison(lse); }

  static bool all_poison(const std::vector<float>& values) {
    std::vector<float> poison(values.size());
    std::memset(poison.data(), kPoison, poison.size() * sizeof(float));
    return std::memcmp(values.data(), poison.data(), values.size() * sizeof(float)) == 0;
  }
};

// Too small for any plan, but for what is said about it.
alignas(256) inline std::byte plan_memory[256];
inline const std::span<std::byte> kMisaligned{plan_memory + 64, std::size_t{1} << 40};
inline const std::span<std::byte> kNowhere{static_cast<std::byte*>(nullptr), std::size_t{1} << 40};

template <class... Parts>
struct Case {
  const char* name;
  Code code;
  const char* field;
  std::function<void(Parts&...)> break_it;
};

}  // namespace latte::bad_input
