#include "latte/decode.hpp"

#include "backend/builder.hpp"
#include "backend/errors.hpp"

namespace latte {
namespace backend {
namespace {

cpu::QueryView query_view(const DecodeProblem& problem, const DecodeArgs& args) {
  const bool whole = args.q.rank != 0;
  const ConstTensorView& nope = whole ? args.q : args.q_nope;
  const ConstTensorView& rope = whole ? args.q : args.q_pe;
  // In the one tensor the rope part starts behind the latent part of the same row.
  const std::size_t skip = whole ? static_cast<std::size_t>(problem.latent) * dtype_bytes(problem.q_dtype) : 0;
  return {.nope = nope.bytes(),
          .rope = rope.bytes() + skip,
          .nope_token_stride = nope.stride[0],
          .nope_head_stride = nope.stride[1],
          .rope_token_stride = rope.stride[0],
          .rope_head_stride = rope.stride[1],
          .dtype = problem.q_dtype};
}

cpu::CacheView cache_view(const DecodeProblem& problem, const DecodeArgs& args) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
  const bool lists = !args.pages.page_indptr.empty();
  return {.data = args.kv_cache.bytes(),
          .page_stride_bytes = args.kv_cache.stride[0] * element_bytes,
          .token_stride_bytes = args.kv_cache.stride[1] * element_bytes,
          .page_size = problem.page_size,
          .format = problem.kv_format,
          .pages = lists ? args.pages.page_indices.data() : args.pages.block_table,
          .row_stride = lists ? 0 : args.pages.block_table_stride,
          .indptr = lists ? args.pages.page_indptr.data() : nullptr};
}

cpu::OutputView output_view(const DecodeArgs& args) {
  return {.out = args.out.bytes(),
          .out_token_stride = args.out.stride[0],
          .out_head_stride = args.out.stride[1],
          .dtype = args.out.dtype,
          .lse = static_cast<float*>(args.lse.data),
          .lse_token_stride = args.lse.stride[0],
          .lse_head_stride = args.lse.stride[1]};
}

}  // namespace
}  // namespace backend

Status decode(const DecodeMetadata& metadata, const DecodeArgs& args) {
  LATTE_RETURN_IF_ERROR(backend::check_current(metadata));
  const backend::Slot* slot = metadata.slot_;
  const backend::Builder& builder = *slot->builder;
  const backend::PlannedStep step = builder.planned_step(*slot);
  LATTE_RETURN_IF_ERROR(backend::validate_decode_args(step, args));
  if (step.query_tokens() == 0) return {};

  const DecodeProblem& problem = builder.problem;
  const float q_scale = args.q_scale_ptr ? *args.q_scale_ptr : args.q_scale;
  const float kv_scale = args.kv_scale_ptr ? *args.kv_scale_ptr : args.kv_scale;
  const cpu::DecodeCall call{
      .kernel = builder.kernel,
      .plan = &slot->plan,
      .heads = problem.heads,
      .latent = problem.latent,
      .rope = problem.rope,
      .mask = problem.mask,
      .lengths = {.seq_lens = slot->seq_lens, .query_start = slot->query_start, .visible = slot->visible},
      .q = backend::query_view(problem, args),
      .kv = backend::cache_view(problem, args),
      .out = backend::output_view(args),
      .score_scale = args.scale * q_scale * kv_scale,
      .value_scale = kv_scale,
      .workspace = args.workspace.empty() ? slot->workspace.get() : args.workspace.data()};
  cpu::run_decode(builder.backend->impl().workers, call);
  return {};
}

}  // namespace latte
