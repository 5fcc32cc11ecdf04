// One prefill call. With context it is a loop over chunks, each of which adds to the sum before it:
//
//   new tokens ---------------------------------- attend, masked ---> sum
//   chunk i:   cache --gather--> rows --expand--> k, v
//                                                 attend, unmasked -> part
//                                                 join sum + part --> sum, or the caller's output after the last chunk
//
// All of it is queued in one stream, in this order.
#include "latte/prefill.hpp"

#include <array>

#include "backend/errors.hpp"
#include "backend/prefill_builder.hpp"
#include "core/within_memory.hpp"

namespace latte {
namespace backend {
namespace {

class ChunkedRun {
 public:
  ChunkedRun(const PrefillSlot& slot, const PrefillArgs& args, std::byte* workspace)
      : slot_(slot),
        builder_(*slot.builder),
        impl_(builder_.backend->impl()),
        args_(args),
        workspace_(workspace),
        tokens_(slot.query_start.back()),
        sum_(partial(kSum, kSumLse)),
        part_(partial(kPart, kPartLse)) {}

  Status run() const {
    LATTE_RETURN_IF_ERROR(attend(*slot_.joined, args_.k, args_.v, sum_, builder_.workspaces.joined));
    for (std::int32_t index = 0; index < slot_.chunks; ++index) LATTE_RETURN_IF_ERROR(add_chunk(index));
    return {};
  }

 private:
  struct Part {
    TensorView out;
    TensorView lse;
  };

  std::byte* place(ContextNeed need) const { return workspace_ + builder_.workspaces.parts[need]; }
  TensorView view(ContextNeed need, Dtype dtype, std::initializer_list<std::int64_t> shape) const {
    return dense(place(need), dtype, shape);
  }
  // LSEs lie head by head, in the order the kernels' rows have.
  Part partial(ContextNeed out, ContextNeed lse) const {
    const PrefillProblem& problem = builder_.problem;
    Part part{.out = view(out, Dtype::f32, {tokens_, problem.heads, problem.v_width}),
              .lse = view(lse, Dtype::f32, {tokens_, problem.heads})};
    part.lse.stride = {1, tokens_};
    return part;
  }

  Status attend(PrefillStep& step, const ConstTensorView& k, const ConstTensorView& v, const Part& to,
                std::size_t kernel_workspace) const {
    PrefillArgs call = args_;
    call.k = k;
    call.v = v;
    call.out = to.out;
    call.lse = to.lse;
    return step.run(call, workspace_ + kernel_workspace);
  }

  Status add_chunk(std::int32_t index) const {
    const PrefillProblem& problem = builder_.problem;
    const PrefillContext& context = *problem.context;
    const ChunkSlot& chunk = slot_.chunk_slots[static_cast<std::size_t>(index)];
    const std::int32_t rows = chunk.kv_start.back();
    const std::int64_t width = std::int64_t{context.latent} + context.rope;
    const ContextChunk filled{.index = index,
                              .tokens = rows,
                              .kv_start = chunk.kv_start,
                              .latent = view(kChunkRows, chunk_row_dtype(context.kv_format), {rows, width}),
                              .k = view(kChunkK, problem.dtype, {rows, problem.heads, problem.qk_width}),
                              .v = view(kChunkV, problem.dtype, {rows, problem.heads, problem.v_width}),
                              .stream = args_.stream};
    LATTE_RETURN_IF_ERROR(impl_.gather_kv({.kv_cache = args_.kv_cache,
                                           .kv_format = context.kv_format,
                                           .kv_scale = args_.kv_scale,
                                           .pages = args_.pages,
                                           .first_token = chunk.begin,
                                           .out_start = {chunk.step->kv_start(), chunk.kv_start.size()},
                                           .tokens = rows,
                                           .out = view(kChunkRows, filled.latent.dtype, {rows, width}),
                                           .stream = args_.stream}));
    LATTE_RETURN_IF_ERROR(args_.expand(args_.user, filled));
    LATTE_RETURN_IF_ERROR(attend(*chunk.step, filled.k, filled.v, part_, builder_.workspaces.chunk));
    const std::array<Partial, 2> both = {Partial{sum_.out, sum_.lse}, Partial{part_.out, part_.lse}};
    if (index + 1 < slot_.chunks) return impl_.merge({both, sum_.out, sum_.lse, args_.stream});
    // The caller's tensors may have more rows than the step.
    TensorView out = args_.out, lse = args_.lse;
    out.shape[0] = tokens_;
    if (lse.rank != 0) lse.shape[0] = tokens_;
    return impl_.merge({both, out, lse, args_.stream});
  }

  const PrefillSlot& slot_;
  const PrefillBuilderImpl& builder_;
  Impl& impl_;
  const PrefillArgs& args_;
  std::byte* const workspace_;
  const std::int64_t tokens_;
  const Part sum_, part_;
};

}  // namespace
}  // namespace backend

Status prefill(const PrefillMetadata& metadata, const PrefillArgs& args) {
  return within_memory([&]() -> Status {
    LATTE_RETURN_IF_ERROR(backend::check_current(metadata));
    const backend::PrefillSlot& slot = *metadata.slot_;
    LATTE_RETURN_IF_ERROR(slot.builder->take_finding());
    const backend::PlannedPrefill step = slot.builder->planned_step(slot);
    LATTE_RETURN_IF_ERROR(backend::validate_prefill_args(step, args));
    if (step.query_tokens() == 0) return {};
    std::byte* const workspace = args.workspace.empty() ? slot.workspace.data() : args.workspace.data();
    if (slot.chunks > 0) return backend::ChunkedRun(slot, args, workspace).run();
    return slot.direct->run(args, workspace + slot.builder->workspaces.direct);
  });
}

}  // namespace latte
