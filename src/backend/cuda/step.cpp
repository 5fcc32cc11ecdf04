#include <algorithm>

#include "backend/cuda/impl.hpp"
#include "backend/errors.hpp"
#include "backend/views.hpp"
#include "plan/layout.hpp"

namespace latte::backend {
namespace {

cuda::QueryView query_view(const DecodeProblem& problem, const DecodeArgs& args) {
  const bool whole = args.q.rank != 0;
  const ConstTensorView& nope = whole ? args.q : args.q_nope;
  const ConstTensorView& rope = whole ? args.q : args.q_pe;
  const std::size_t skip = whole ? static_cast<std::size_t>(problem.latent) * dtype_bytes(problem.q_dtype) : 0;
  return {.nope = nope.data,
          .rope = rope.bytes() + skip,
          .nope_token_stride = nope.stride[0],
          .nope_head_stride = nope.stride[1],
          .rope_token_stride = rope.stride[0],
          .rope_head_stride = rope.stride[1]};
}

}  // namespace

cuda::PlanView device_plan(const PlanSizes& sizes, std::int32_t workers, const std::int32_t* words) {
  const plan::Layout at = plan::layout(sizes, workers);
  return {.indptr = words + at.indptr,
          .records = reinterpret_cast<const WorkRecord*>(words + at.records),
          .reduce_indptr = words + at.reduce_indptr,
          .reduce_partial_map = words + at.reduce_partial};
}

cuda::CacheView cache_view(const ConstTensorView& cache, const PageTable& pages) {
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const bool lists = !pages.page_indptr.empty();
  // The stride of a dimension of one element was not looked at; descriptors of the copy engine want a sane one.
  const std::int64_t token_stride = cache.shape[1] > 1 ? cache.stride[1] : cache.shape[2];
  const std::int64_t page_stride = cache.shape[0] > 1 ? cache.stride[0] : token_stride * cache.shape[1];
  return {.data = cache.data,
          .page_stride_bytes = page_stride * element_bytes,
          .token_stride_bytes = token_stride * element_bytes,
          .page_count = cache.shape[0],
          .page_size = static_cast<std::int32_t>(cache.shape[1]),
          .pages = lists ? pages.page_indices.data() : pages.block_table,
          .row_stride = lists ? 0 : pages.block_table_stride,
          .list_pages = lists ? static_cast<std::int64_t>(pages.page_indices.size()) : pages.max_pages,
          .indptr = lists ? pages.page_indptr.data() : nullptr};
}

CudaStep::CudaStep(CudaImpl& impl, const Builder& builder, const cuda::DecodeKernel& kernel)
    : device_(*impl.device()),
      builder_(builder),
      kernel_(kernel),
      workers_(plan::worker_count(builder.config)),
      may_overlap_(!impl.serial_launches()),
      words_(*impl.device()),
      findings_(impl, "seq_lens", plan::resolve(builder.config.limits)) {}

Status CudaStep::allocate(std::int32_t* words, const BuilderOptions& options) {
  LATTE_RETURN_IF_ERROR(words_.allocate(words, builder_.words.count));
  if (options.validate) LATTE_RETURN_IF_ERROR(findings_.allocate());

  plan_ = device_plan(builder_.sizes, workers_, on_device().plan.data());

  if (!options.own_workspace) return {};
  LATTE_RETURN_IF_ERROR(workspace_.allocate(device_, builder_.workspace_bytes, cuda::Memory::device));
  LATTE_RETURN_IF_ERROR(device_.clear(workspace_.data(), arrived_bytes(builder_.sizes), nullptr));
  // Once, at creation: every stream may use the workspace from here on.
  return device_.synchronize(nullptr);
}

Result<DecodeWords::Parts> CudaStep::stage(Stream stream) {
  LATTE_RETURN_IF_ERROR(words_.stage(stream));
  return builder_.words.at(words_.staged());
}

Status CudaStep::publish(const Plan& plan, const StepLengths& lengths, Stream stream) {
  LATTE_RETURN_IF_ERROR(words_.upload(stream, lengths.seq_lens, lengths.query_start, lengths.visible,
                                      plan.work_meta_data, plan.work_indptr, plan.work_info_set, plan.reduce_indptr,
                                      plan.reduce_final_map, plan.reduce_partial_map));
  plan_under_way_.reset();
  const DecodeWords::Parts words = on_device();
  lengths_ = {.seq_lens = words.seq_lens,
              .query_start = words.query_start,
              .visible = lengths.visible.empty() ? nullptr : words.visible};
  return {};
}

Status CudaStep::plan_on_device(const DeviceLengths& lengths, Stream stream) {
  lengths_ = {.seq_lens = lengths.seq_lens, .query_start = lengths.query_start, .visible = lengths.visible};
  const Result<bool> captured = device_.capturing(stream);
  if (!captured) return captured.status();
  plan_under_way_ = {.stream = stream, .captured = *captured};
  return device_.plan({.config = builder_.config,
                       .sizes = builder_.sizes,
                       .requests = lengths.requests,
                       .lengths = lengths_,
                       .words = on_device().plan.data(),
                       .query_tokens = lengths.query_tokens},
                      stream);
}

Result<std::vector<std::int32_t>> CudaStep::copy_words(Stream stream) {
  const std::span<const std::int32_t> plan = on_device().plan;
  std::vector<std::int32_t> words(plan.size());
  LATTE_RETURN_IF_ERROR(device_.copy(words.data(), plan.data(), plan.size_bytes(), cuda::Copy::to_host, stream));
  LATTE_RETURN_IF_ERROR(device_.synchronize(stream));
  return words;
}

// Query tokens that the call's tensors hold. Not those of the step: a captured launch serves later steps too, whose
// plans say which rows there are.
static std::int32_t tensor_tokens(const DecodeArgs& args) {
  std::int64_t tokens = args.out.shape[0];
  if (args.q.rank != 0)
    tokens = std::min(tokens, args.q.shape[0]);
  else
    tokens = std::min({tokens, args.q_nope.shape[0], args.q_pe.shape[0]});
  if (args.lse.rank != 0) tokens = std::min(tokens, args.lse.shape[0]);
  return static_cast<std::int32_t>(std::min<std::int64_t>(tokens, INT32_MAX));
}

Status CudaStep::run(const PlannedStep& step, const DecodeArgs& args) {
  const DecodeProblem& problem = builder_.problem;
  std::byte* const workspace = args.workspace.empty() ? workspace_.data() : args.workspace.data();
  const cuda::DecodeCall call{.heads = problem.heads,
                              .mask = problem.mask,
                              .scale = args.scale,
                              .query_tokens = tensor_tokens(args),
                              .q = query_view(problem, args),
                              .kv = cache_view(args.kv_cache, args.pages),
                              .out = output_view<cuda::OutputView>(args.out, args.lse),
                              .lengths = lengths_,
                              .plan = plan_,
                              .workspace = carve_workspace(builder_.sizes, builder_.problem.latent, workspace)};
  LATTE_RETURN_IF_ERROR(findings_.look(
      {.lengths = lengths_,
       .kv = call.kv,
       // A captured look serves later steps too: how many requests they have is in their plan, and how many query
       // tokens there may be was said when the plan was asked for, or is what the tensors hold.
       .requests = on_device().plan.data() + kMetaRequests,
       .query_tokens = step.planned_on_device ? step.query_tokens() : call.query_tokens},
      args.stream));
  // The first call behind a plan that a kernel makes waits for that kernel, whatever the caller promises: with half of
  // a plan thread blocks would wait for each other for ever.
  const bool overlap = may_overlap_ && args.overlap_previous && !plan_under_way_;
  LATTE_RETURN_IF_ERROR(device_.decode(kernel_, call, workers_, overlap, args.stream));
  if (!plan_under_way_ || args.stream != plan_under_way_->stream) return {};
  const Result<bool> captured = device_.capturing(args.stream);
  if (captured && *captured == plan_under_way_->captured) plan_under_way_.reset();
  return {};
}

}  // namespace latte::backend
