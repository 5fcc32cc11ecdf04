#include <memory>
#include <utility>

#include "backend/c_abi/c_abi.hpp"
#include "backend/prefill_builder.hpp"

namespace latte::c_abi {
namespace {

Status read_context(const latte_prefill_context* given, PrefillContext& context) {
  latte_prefill_context full = LATTE_PREFILL_CONTEXT_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "context", offsetof(latte_prefill_context, max_total_tokens), full));
  context.latent = full.latent;
  context.rope = full.rope;
  context.page_size = full.page_size;
  context.max_tokens = full.max_tokens;
  context.max_total_tokens = full.max_total_tokens;
  context.workspace_bytes = full.workspace_bytes;
  return read_enum(full.kv_format, kLastKvFormat, "context.kv_format", context.kv_format);
}

}  // namespace

Status read_problem(const latte_prefill_problem* given, PrefillProblem& problem) {
  latte_prefill_problem full = LATTE_PREFILL_PROBLEM_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "problem", offsetof(latte_prefill_problem, qk_width), full));
  problem.heads = full.heads;
  problem.qk_width = full.qk_width;
  problem.v_width = full.v_width;
  LATTE_RETURN_IF_ERROR(read_enum(full.dtype, Dtype::u8, "dtype", problem.dtype));
  LATTE_RETURN_IF_ERROR(read_enum(full.out_dtype, Dtype::u8, "out_dtype", problem.out_dtype));
  LATTE_RETURN_IF_ERROR(read_enum(full.mask, Mask::none, "mask", problem.mask));
  LATTE_RETURN_IF_ERROR(read_enum(full.math, PrefillMath::fp8, "math", problem.math));
  if (full.context == nullptr) return {};
  return read_context(full.context, problem.context.emplace());
}

namespace {

Status read_prefill_lengths(const latte_prefill_lengths* given, PrefillLengths& lengths, Stream& stream) {
  latte_prefill_lengths full = LATTE_PREFILL_LENGTHS_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "lengths", offsetof(latte_prefill_lengths, context_lens), full));
  LATTE_RETURN_IF_ERROR(read_span(full.query_start, full.query_start_count, "query_start", lengths.query_start));
  LATTE_RETURN_IF_ERROR(read_span(full.kv_start, full.kv_start_count, "kv_start", lengths.kv_start));
  stream = full.stream;
  return read_span(full.context_lens, full.context_lens_count, "context_lens", lengths.context_lens);
}

Status read_prefill_metadata(const latte_prefill_metadata* given, PrefillMetadata& metadata) {
  latte_prefill_metadata full = LATTE_PREFILL_METADATA_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "metadata", sizeof(latte_prefill_metadata), full));
  metadata = backend::PrefillBuilderImpl::metadata_of(static_cast<backend::PrefillSlot*>(full.slot), full.generation);
  return {};
}

Fp8Scale read_scale(const latte_fp8_scale& scale) {
  return {.value = scale.value, .ptr = scale.ptr, .per_head = scale.per_head != 0};
}

Status read_prefill_args(const latte_prefill_args* given, PrefillArgs& args, latte_prefill_args& full) {
  LATTE_RETURN_IF_ERROR(read_struct(given, "args", offsetof(latte_prefill_args, q_scale), full));
  LATTE_RETURN_IF_ERROR(read_input(full.q, "q", args.q));
  LATTE_RETURN_IF_ERROR(read_input(full.k, "k", args.k));
  LATTE_RETURN_IF_ERROR(read_input(full.v, "v", args.v));
  LATTE_RETURN_IF_ERROR(read_tensor(full.out, "out", args.out));
  LATTE_RETURN_IF_ERROR(read_tensor(full.lse, "lse", args.lse));
  LATTE_RETURN_IF_ERROR(read_input(full.kv_cache, "kv_cache", args.kv_cache));
  LATTE_RETURN_IF_ERROR(read_pages(full, args.pages));
  LATTE_RETURN_IF_ERROR(read_memory(full.workspace, full.workspace_bytes, "workspace", args.workspace));
  args.scale = full.scale;
  args.q_scale = read_scale(full.q_scale);
  args.k_scale = read_scale(full.k_scale);
  args.v_scale = read_scale(full.v_scale);
  args.kv_scale = {.value = full.kv_scale, .ptr = full.kv_scale_ptr};
  args.stream = full.stream;
  return {};
}

latte_tensor tensor_of(const ConstTensorView& view) {
  latte_tensor tensor{.data = const_cast<void*>(view.data),
                      .dtype = static_cast<std::int32_t>(view.dtype),
                      .rank = view.rank,
                      .shape = {},
                      .stride = {}};
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
  return tensor;
}

// Calls the C function that the caller's struct names.
Status expand_through_c(void* user, const ContextChunk& chunk) {
  const auto& args = *static_cast<const latte_prefill_args*>(user);
  const latte_context_chunk given{.size = sizeof(latte_context_chunk),
                                  .index = chunk.index,
                                  .tokens = chunk.tokens,
                                  .reserved = 0,
                                  .kv_start = chunk.kv_start.data(),
                                  .kv_start_count = static_cast<std::int64_t>(chunk.kv_start.size()),
                                  .latent = tensor_of(chunk.latent),
                                  .k = tensor_of(chunk.k),
                                  .v = tensor_of(chunk.v),
                                  .stream = chunk.stream};
  latte_error error = LATTE_ERROR_INIT;
  const latte_code code = args.expand(args.user, &given, &error);
  if (code == LATTE_OK) return {};
  // Whoever fills them with strncpy may leave them without an end.
  error.field[sizeof(error.field) - 1] = error.expected[sizeof(error.expected) - 1] = error.got[sizeof(error.got) - 1] =
      '\0';
  if (code < LATTE_OK || code > LATTE_DEVICE_FAULT)
    return backend::invalid("expand", "a latte_code", backend::text(code));
  return {static_cast<Code>(code), error.field[0] != '\0' ? error.field : "expand", error.expected, error.got};
}

}  // namespace
}  // namespace latte::c_abi

using namespace latte;
using namespace latte::c_abi;

extern "C" {

latte_code latte_backend_supports_prefill(const latte_backend* backend, const latte_prefill_problem* problem,
                                          latte_support* support, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    LATTE_RETURN_IF_ERROR(check_struct(support, "support", offsetof(latte_support, kernel)));
    PrefillProblem wanted;
    LATTE_RETURN_IF_ERROR(read_problem(problem, wanted));
    write_support(backend->backend.supports(wanted), support);
    return {};
  });
}

latte_code latte_prefill_builder_needs(const latte_backend* backend, const latte_prefill_problem* problem,
                                       const latte_limits* limits, const latte_builder_options* options,
                                       latte_workspace_need* plan, latte_workspace_need* workspace,
                                       latte_error* error) {
  return guarded(error, [&]() -> Status {
    Wanted<PrefillProblem> wanted;
    LATTE_RETURN_IF_ERROR(read_wanted(backend, problem, limits, options, wanted));
    return write_needs(PrefillBuilder::needs(backend->backend, wanted.problem, wanted.limits, wanted.options), plan,
                       workspace);
  });
}

latte_code latte_prefill_builder_create(const latte_backend* backend, const latte_prefill_problem* problem,
                                        const latte_limits* limits, const latte_builder_options* options,
                                        latte_prefill_builder** builder, latte_error* error) {
  return guarded(error, [&] { return create_builder<PrefillProblem>(backend, problem, limits, options, builder); });
}

latte_code latte_prefill_builder_destroy(latte_prefill_builder* builder, latte_error* error) {
  return destroy_handle(builder, error);
}

latte_code latte_prefill_builder_get_info(const latte_prefill_builder* builder, latte_prefill_builder_info* info,
                                          latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_builder(builder));
    LATTE_RETURN_IF_ERROR(check_struct(info, "info", offsetof(latte_prefill_builder_info, row_tile)));
    latte_prefill_builder_info full = LATTE_PREFILL_BUILDER_INFO_INIT;
    fill_info(builder->builder, full);
    full.math = static_cast<std::int32_t>(builder->builder.math());
    full.chunk_tokens = builder->builder.chunk_tokens();
    write_struct(full, info);
    return {};
  });
}

latte_code latte_prefill_builder_build(latte_prefill_builder* builder, int32_t slot,
                                       const latte_prefill_lengths* lengths, latte_prefill_metadata* metadata,
                                       latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_builder(builder));
    LATTE_RETURN_IF_ERROR(check_struct(metadata, "metadata", sizeof(latte_prefill_metadata)));
    PrefillLengths step;
    Stream stream = nullptr;
    LATTE_RETURN_IF_ERROR(read_prefill_lengths(lengths, step, stream));
    const auto built = builder->builder.build(slot, step, stream);
    if (!built.ok()) return built.status();
    write_struct({.size = 0,
                  .chunks = built->chunks(),
                  .slot = backend::PrefillBuilderImpl::slot_of(*built),
                  .generation = built->generation()},
                 metadata);
    return {};
  });
}

latte_code latte_prefill_builder_init_workspace(const latte_prefill_builder* builder, void* workspace,
                                                uint64_t workspace_bytes, void* stream, latte_error* error) {
  return guarded(error, [&] { return init_workspace(builder, workspace, workspace_bytes, stream); });
}

latte_code latte_prefill_metadata_plan(const latte_prefill_metadata* metadata, int32_t chunk, latte_plan* plan,
                                       latte_error* error) {
  return guarded(error, [&]() -> Status {
    PrefillMetadata step;
    LATTE_RETURN_IF_ERROR(read_prefill_metadata(metadata, step));
    LATTE_RETURN_IF_ERROR(backend::check_current(step));
    LATTE_RETURN_IF_ERROR(check_struct(plan, "plan", offsetof(latte_plan, work_meta_data)));
    if (chunk < -1 || chunk >= step.chunks())
      return backend::invalid("chunk", "-1 .. " + backend::text(step.chunks() - 1), backend::text(chunk));
    write_plan(chunk < 0 ? step.plan() : step.chunk_plan(chunk), plan);
    return {};
  });
}

latte_code latte_prefill(const latte_prefill_metadata* metadata, const latte_prefill_args* args, latte_error* error) {
  return guarded(error, [&]() -> Status {
    PrefillMetadata step;
    PrefillArgs call;
    latte_prefill_args full = latte_prefill_args_init();
    LATTE_RETURN_IF_ERROR(read_prefill_metadata(metadata, step));
    LATTE_RETURN_IF_ERROR(read_prefill_args(args, call, full));
    if (full.expand != nullptr) {
      call.expand = expand_through_c;
      call.user = &full;
    }
    return prefill(step, call);
  });
}

latte_code latte_gather_kv(const latte_backend* backend, const latte_gather_kv_args* args, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    latte_gather_kv_args full = latte_gather_kv_args_init();
    LATTE_RETURN_IF_ERROR(read_struct(args, "args", offsetof(latte_gather_kv_args, kv_scale), full));
    GatherKvArgs call;
    LATTE_RETURN_IF_ERROR(read_enum(full.kv_format, kLastKvFormat, "kv_format", call.kv_format));
    LATTE_RETURN_IF_ERROR(read_input(full.kv_cache, "kv_cache", call.kv_cache));
    LATTE_RETURN_IF_ERROR(read_tensor(full.out, "out", call.out));
    LATTE_RETURN_IF_ERROR(read_pages(full, call.pages));
    LATTE_RETURN_IF_ERROR(read_span(full.out_start, full.out_start_count, "out_start", call.out_start));
    call.first_token = full.first_token;
    call.tokens = full.tokens;
    call.kv_scale = {.value = full.kv_scale, .ptr = full.kv_scale_ptr};
    call.stream = full.stream;
    return gather_kv(backend->backend, call);
  });
}

}  // extern "C"
