#include <array>
#include <memory>
#include <span>
#include <vector>

#include "backend/builder.hpp"
#include "backend/c_abi/c_abi.hpp"

namespace latte::c_abi {
namespace {

Status read_lengths(const latte_lengths* given, StepLengths& lengths, Stream& stream) {
  latte_lengths full = LATTE_LENGTHS_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "lengths", offsetof(latte_lengths, visible), full));
  LATTE_RETURN_IF_ERROR(read_span(full.seq_lens, full.seq_lens_count, "seq_lens", lengths.seq_lens));
  LATTE_RETURN_IF_ERROR(read_span(full.query_start, full.query_start_count, "query_start", lengths.query_start));
  stream = full.stream;
  return read_span(full.visible, full.visible_count, "visible", lengths.visible);
}

Status read_device_lengths(const latte_device_lengths* given, DeviceLengths& lengths, Stream& stream) {
  latte_device_lengths full = LATTE_DEVICE_LENGTHS_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "lengths", sizeof(latte_device_lengths), full));
  lengths = {.requests = full.requests,
             .seq_lens = full.seq_lens,
             .query_start = full.query_start,
             .visible = full.visible,
             .query_tokens = full.query_tokens};
  stream = full.stream;
  return {};
}

Status read_metadata(const latte_metadata* given, DecodeMetadata& metadata) {
  latte_metadata full = LATTE_METADATA_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "metadata", sizeof(latte_metadata), full));
  metadata = backend::Builder::metadata_of(static_cast<backend::Slot*>(full.slot), full.generation);
  return {};
}

Status read_decode_args(const latte_decode_args* given, DecodeArgs& args) {
  latte_decode_args full = latte_decode_args_init();
  LATTE_RETURN_IF_ERROR(read_struct(given, "args", offsetof(latte_decode_args, workspace), full));
  LATTE_RETURN_IF_ERROR(read_input(full.q, "q", args.q));
  LATTE_RETURN_IF_ERROR(read_input(full.q_nope, "q_nope", args.q_nope));
  LATTE_RETURN_IF_ERROR(read_input(full.q_pe, "q_pe", args.q_pe));
  LATTE_RETURN_IF_ERROR(read_input(full.kv_cache, "kv_cache", args.kv_cache));
  LATTE_RETURN_IF_ERROR(read_tensor(full.out, "out", args.out));
  LATTE_RETURN_IF_ERROR(read_tensor(full.lse, "lse", args.lse));
  LATTE_RETURN_IF_ERROR(read_pages(full, args.pages));
  LATTE_RETURN_IF_ERROR(read_memory(full.workspace, full.workspace_bytes, "workspace", args.workspace));
  args.scale = full.scale;
  args.q_scale = {.value = full.q_scale, .ptr = full.q_scale_ptr};
  args.kv_scale = {.value = full.kv_scale, .ptr = full.kv_scale_ptr};
  args.stream = full.stream;
  args.overlap_previous = full.overlap_previous != 0;
  return {};
}

Status write_metadata(const Result<DecodeMetadata>& built, latte_metadata* metadata) {
  if (!built.ok()) return built.status();
  write_struct({.size = 0, .reserved = 0, .slot = backend::Builder::slot_of(*built), .generation = built->generation()},
               metadata);
  return {};
}

}  // namespace
}  // namespace latte::c_abi

using namespace latte;
using namespace latte::c_abi;

extern "C" {

latte_code latte_builder_needs(const latte_backend* backend, const latte_problem* problem, const latte_limits* limits,
                               const latte_builder_options* options, latte_workspace_need* plan,
                               latte_workspace_need* workspace, latte_error* error) {
  return guarded(error, [&]() -> Status {
    Wanted<DecodeProblem> wanted;
    LATTE_RETURN_IF_ERROR(read_wanted(backend, problem, limits, options, wanted));
    return write_needs(MetadataBuilder::needs(backend->backend, wanted.problem, wanted.limits, wanted.options), plan,
                       workspace);
  });
}

latte_code latte_builder_create(const latte_backend* backend, const latte_problem* problem, const latte_limits* limits,
                                const latte_builder_options* options, latte_builder** builder, latte_error* error) {
  return guarded(error, [&] { return create_builder<DecodeProblem>(backend, problem, limits, options, builder); });
}

latte_code latte_builder_destroy(latte_builder* builder, latte_error* error) { return destroy_handle(builder, error); }

latte_code latte_builder_get_info(const latte_builder* builder, latte_builder_info* info, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_builder(builder));
    LATTE_RETURN_IF_ERROR(check_struct(info, "info", offsetof(latte_builder_info, row_tile)));
    latte_builder_info full = LATTE_BUILDER_INFO_INIT;
    fill_info(builder->builder, full);
    write_struct(full, info);
    return {};
  });
}

latte_code latte_builder_build(latte_builder* builder, int32_t slot, const latte_lengths* lengths,
                               latte_metadata* metadata, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_builder(builder));
    LATTE_RETURN_IF_ERROR(check_struct(metadata, "metadata", sizeof(latte_metadata)));
    StepLengths step;
    Stream stream = nullptr;
    LATTE_RETURN_IF_ERROR(read_lengths(lengths, step, stream));
    return write_metadata(builder->builder.build(slot, step, stream), metadata);
  });
}

latte_code latte_builder_build_on_device(latte_builder* builder, int32_t slot, const latte_device_lengths* lengths,
                                         latte_metadata* metadata, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_builder(builder));
    LATTE_RETURN_IF_ERROR(check_struct(metadata, "metadata", sizeof(latte_metadata)));
    DeviceLengths step;
    Stream stream = nullptr;
    LATTE_RETURN_IF_ERROR(read_device_lengths(lengths, step, stream));
    return write_metadata(builder->builder.build_on_device(slot, step, stream), metadata);
  });
}

latte_code latte_builder_init_workspace(const latte_builder* builder, void* workspace, uint64_t workspace_bytes,
                                        void* stream, latte_error* error) {
  return guarded(error, [&] { return init_workspace(builder, workspace, workspace_bytes, stream); });
}

latte_code latte_metadata_plan(const latte_metadata* metadata, latte_plan* plan, latte_error* error) {
  return guarded(error, [&]() -> Status {
    DecodeMetadata step;
    LATTE_RETURN_IF_ERROR(read_metadata(metadata, step));
    LATTE_RETURN_IF_ERROR(backend::check_current(step));
    LATTE_RETURN_IF_ERROR(check_struct(plan, "plan", offsetof(latte_plan, work_meta_data)));
    write_plan(step.plan(), plan);
    return {};
  });
}

latte_code latte_decode(const latte_metadata* metadata, const latte_decode_args* args, latte_error* error) {
  return guarded(error, [&]() -> Status {
    DecodeMetadata step;
    DecodeArgs call;
    LATTE_RETURN_IF_ERROR(read_metadata(metadata, step));
    LATTE_RETURN_IF_ERROR(read_decode_args(args, call));
    return decode(step, call);
  });
}

latte_code latte_merge(const latte_backend* backend, const latte_merge_args* args, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    latte_merge_args full = latte_merge_args_init();
    LATTE_RETURN_IF_ERROR(read_struct(args, "args", offsetof(latte_merge_args, lse), full));
    std::span<const latte_partial> given;
    LATTE_RETURN_IF_ERROR(read_span(full.partials, full.partial_count, "partials", given));
    MergeArgs call{.stream = full.stream};
    LATTE_RETURN_IF_ERROR(read_tensor(full.out, "out", call.out));
    LATTE_RETURN_IF_ERROR(read_tensor(full.lse, "lse", call.lse));
    // No heap for as many as the C++ function joins without it.
    std::array<Partial, 32> few;
    std::vector<Partial> many(given.size() > few.size() ? given.size() : 0);
    const std::span<Partial> partials = many.empty() ? std::span(few).first(given.size()) : std::span(many);
    for (std::size_t i = 0; i < given.size(); ++i) {
      LATTE_RETURN_IF_ERROR(read_input(given[i].out, "partials.out", partials[i].out));
      LATTE_RETURN_IF_ERROR(read_input(given[i].lse, "partials.lse", partials[i].lse));
    }
    call.partials = partials;
    return merge(backend->backend, call);
  });
}

latte_code latte_write_kv(const latte_backend* backend, const latte_write_kv_args* args, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    latte_write_kv_args full = latte_write_kv_args_init();
    LATTE_RETURN_IF_ERROR(read_struct(args, "args", offsetof(latte_write_kv_args, kv_scale), full));
    WriteKvArgs call;
    LATTE_RETURN_IF_ERROR(read_enum(full.kv_format, kLastKvFormat, "kv_format", call.kv_format));
    LATTE_RETURN_IF_ERROR(read_input(full.kv_c, "kv_c", call.kv_c));
    LATTE_RETURN_IF_ERROR(read_input(full.k_pe, "k_pe", call.k_pe));
    LATTE_RETURN_IF_ERROR(read_tensor(full.kv_cache, "kv_cache", call.kv_cache));
    LATTE_RETURN_IF_ERROR(read_span(full.slot_mapping, full.slot_mapping_count, "slot_mapping", call.slot_mapping));
    call.kv_scale = {.value = full.kv_scale, .ptr = full.kv_scale_ptr};
    call.stream = full.stream;
    return write_kv(backend->backend, call);
  });
}

}  // extern "C"
