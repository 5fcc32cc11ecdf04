#include "tests/gpu/c_abi_support.hpp"

#include <algorithm>
#include <cstdio>

namespace latte::testkit {
namespace {

template <class View>
View view_of(const latte_tensor& tensor) {
  View view;
  view.data = tensor.data;
  view.rank = tensor.rank;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    if (c_dtype(dtype) == tensor.dtype) view.dtype = dtype;
  std::copy_n(tensor.shape, kMaxRank, view.shape.begin());
  std::copy_n(tensor.stride, kMaxRank, view.stride.begin());
  return view;
}

std::int32_t c_mask(Mask mask) { return mask == Mask::causal ? LATTE_MASK_CAUSAL : LATTE_MASK_NONE; }

// The same fields in the arguments of decode and of prefill.
template <class Args>
void set_pages(Args& args, const PageTable& pages) {
  args.block_table = pages.block_table;
  args.block_table_stride = pages.block_table_stride;
  args.max_pages = pages.max_pages;
  args.page_indptr = pages.page_indptr.data();
  args.page_indptr_count = static_cast<std::int64_t>(pages.page_indptr.size());
  args.page_indices = pages.page_indices.data();
  args.page_indices_count = static_cast<std::int64_t>(pages.page_indices.size());
}

latte_fp8_scale c_scale(const Fp8Scale& scale) {
  return {.value = scale.value, .per_head = scale.per_head ? 1 : 0, .ptr = scale.ptr};
}

}  // namespace

std::int32_t c_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return LATTE_F32;
    case Dtype::bf16: return LATTE_BF16;
    case Dtype::f16: return LATTE_F16;
    case Dtype::fp8_e4m3: return LATTE_FP8_E4M3;
    case Dtype::u8: break;
  }
  return LATTE_U8;
}

std::int32_t c_kv_format(KvFormat format) {
  switch (format) {
    case KvFormat::bf16: return LATTE_KV_BF16;
    case KvFormat::f16: return LATTE_KV_F16;
    case KvFormat::f32: return LATTE_KV_F32;
    case KvFormat::fp8_e4m3: return LATTE_KV_FP8_E4M3;
    case KvFormat::fp8_ds_mla: break;
  }
  return LATTE_KV_FP8_DS_MLA;
}

latte_tensor c_tensor(const ConstTensorView& view) {
  latte_tensor tensor = latte_dense(view.data, c_dtype(view.dtype), view.rank, view.shape.data());
  std::copy_n(view.stride.begin(), kMaxRank, tensor.stride);
  return tensor;
}

latte_problem c_problem(const DecodeProblem& problem) {
  latte_problem c = LATTE_PROBLEM_INIT;
  c.heads = problem.heads;
  c.latent = problem.latent;
  c.rope = problem.rope;
  c.q_dtype = c_dtype(problem.q_dtype);
  c.out_dtype = c_dtype(problem.out_dtype);
  c.kv_format = c_kv_format(problem.kv_format);
  c.page_size = problem.page_size;
  c.mask = c_mask(problem.mask);
  return c;
}

latte_limits c_limits(const Limits& limits) {
  latte_limits c = LATTE_LIMITS_INIT;
  c.max_requests = limits.max_requests;
  c.max_query_tokens = limits.max_query_tokens;
  c.max_total_query_tokens = limits.max_total_query_tokens;
  c.max_total_kv_tokens = limits.max_total_kv_tokens;
  c.max_kv_tokens = limits.max_kv_tokens;
  c.workers = limits.workers;
  return c;
}

latte_lengths c_lengths(const StepLengths& lengths, void* stream) {
  latte_lengths c = LATTE_LENGTHS_INIT;
  c.seq_lens = lengths.seq_lens.data();
  c.seq_lens_count = static_cast<std::int64_t>(lengths.seq_lens.size());
  c.query_start = lengths.query_start.data();
  c.query_start_count = static_cast<std::int64_t>(lengths.query_start.size());
  c.visible = lengths.visible.data();
  c.visible_count = static_cast<std::int64_t>(lengths.visible.size());
  c.stream = stream;
  return c;
}

latte_device_lengths c_lengths(const DeviceLengths& lengths, void* stream) {
  latte_device_lengths c = LATTE_DEVICE_LENGTHS_INIT;
  c.requests = lengths.requests;
  c.seq_lens = lengths.seq_lens;
  c.query_start = lengths.query_start;
  c.visible = lengths.visible;
  c.query_tokens = lengths.query_tokens;
  c.stream = stream;
  return c;
}

latte_decode_args c_args(const DecodeArgs& args) {
  latte_decode_args c = latte_decode_args_init();
  c.scale = args.scale;
  c.q = c_tensor(args.q);
  c.q_nope = c_tensor(args.q_nope);
  c.q_pe = c_tensor(args.q_pe);
  c.kv_cache = c_tensor(args.kv_cache);
  c.out = c_tensor(args.out);
  c.lse = c_tensor(args.lse);
  set_pages(c, args.pages);
  c.stream = args.stream;
  return c;
}

latte_prefill_context c_context(const PrefillContext& context) {
  latte_prefill_context c = LATTE_PREFILL_CONTEXT_INIT;
  c.latent = context.latent;
  c.rope = context.rope;
  c.kv_format = c_kv_format(context.kv_format);
  c.page_size = context.page_size;
  c.max_tokens = context.max_tokens;
  c.max_total_tokens = context.max_total_tokens;
  c.workspace_bytes = context.workspace_bytes;
  return c;
}

latte_prefill_problem c_problem(const PrefillProblem& problem) {
  latte_prefill_problem c = LATTE_PREFILL_PROBLEM_INIT;
  c.heads = problem.heads;
  c.qk_width = problem.qk_width;
  c.v_width = problem.v_width;
  c.dtype = c_dtype(problem.dtype);
  c.out_dtype = c_dtype(problem.out_dtype);
  c.mask = c_mask(problem.mask);
  c.math = problem.math == PrefillMath::automatic ? LATTE_MATH_AUTOMATIC
           : problem.math == PrefillMath::half    ? LATTE_MATH_HALF
                                                  : LATTE_MATH_FP8;
  return c;
}

latte_prefill_lengths c_lengths(const PrefillLengths& lengths, void* stream) {
  latte_prefill_lengths c = LATTE_PREFILL_LENGTHS_INIT;
  c.query_start = lengths.query_start.data();
  c.query_start_count = static_cast<std::int64_t>(lengths.query_start.size());
  c.kv_start = lengths.kv_start.data();
  c.kv_start_count = static_cast<std::int64_t>(lengths.kv_start.size());
  c.context_lens = lengths.context_lens.data();
  c.context_lens_count = static_cast<std::int64_t>(lengths.context_lens.size());
  c.stream = stream;
  return c;
}

latte_prefill_args c_args(const PrefillArgs& args) {
  latte_prefill_args c = latte_prefill_args_init();
  c.scale = args.scale;
  c.q = c_tensor(args.q);
  c.k = c_tensor(args.k);
  c.v = c_tensor(args.v);
  c.out = c_tensor(args.out);
  c.lse = c_tensor(args.lse);
  c.q_scale = c_scale(args.q_scale);
  c.k_scale = c_scale(args.k_scale);
  c.v_scale = c_scale(args.v_scale);
  c.stream = args.stream;
  c.kv_cache = c_tensor(args.kv_cache);
  set_pages(c, args.pages);
  c.kv_scale = args.kv_scale.value;
  c.kv_scale_ptr = args.kv_scale.ptr;
  return c;
}

latte_code CHook::call(void* user, const latte_context_chunk* chunk, latte_error* error) {
  const auto& hook = *static_cast<const CHook*>(user);
  EXPECT_EQ(chunk->size, sizeof *chunk);
  EXPECT_EQ(chunk->stream, hook.stream);
  const Status status =
      hook.expand(hook.user, {.index = chunk->index,
                              .tokens = chunk->tokens,
                              .kv_start = {chunk->kv_start, static_cast<std::size_t>(chunk->kv_start_count)},
                              .latent = view_of<ConstTensorView>(chunk->latent),
                              .k = view_of<TensorView>(chunk->k),
                              .v = view_of<TensorView>(chunk->v),
                              .stream = chunk->stream});
  if (status.ok()) return LATTE_OK;
  std::snprintf(error->field, sizeof error->field, "%s", status.field().c_str());
  std::snprintf(error->expected, sizeof error->expected, "%s", status.expected().c_str());
  std::snprintf(error->got, sizeof error->got, "%s", status.got().c_str());
  return LATTE_INTERNAL;
}

}  // namespace latte::testkit
