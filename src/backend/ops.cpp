#include "latte/ops.hpp"

#include <array>
#include <vector>

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "backend/validate.hpp"

namespace latte {
namespace {

cpu::MergePart merge_part(const Partial& part) {
  return {.out = part.out.bytes(),
          .token_stride = part.out.stride[0],
          .head_stride = part.out.stride[1],
          .dtype = part.out.dtype,
          .lse = static_cast<const float*>(part.lse.data),
          .lse_token_stride = part.lse.stride[0],
          .lse_head_stride = part.lse.stride[1]};
}

}  // namespace

Status merge(const Backend& backend, std::span<const Partial> partials, const TensorView& out, const TensorView& lse) {
  LATTE_RETURN_IF_ERROR(backend::validate_merge_args(partials, out, lse));
  if (out.shape[0] == 0) return {};
  // Context parallelism and chunked prefill join a handful; only more than that goes to the heap.
  std::array<cpu::MergePart, 32> few;
  std::vector<cpu::MergePart> many(partials.size() > few.size() ? partials.size() : 0);
  const std::span<cpu::MergePart> parts = many.empty() ? std::span(few).first(partials.size()) : std::span(many);
  for (std::size_t i = 0; i < partials.size(); ++i) parts[i] = merge_part(partials[i]);
  cpu::run_merge(backend.impl().workers, parts, out.shape[0], static_cast<std::int32_t>(out.shape[1]),
                 static_cast<std::int32_t>(out.shape[2]),
                 {.out = out.bytes(),
                  .out_token_stride = out.stride[0],
                  .out_head_stride = out.stride[1],
                  .dtype = out.dtype,
                  .lse = static_cast<float*>(lse.data),
                  .lse_token_stride = lse.stride[0],
                  .lse_head_stride = lse.stride[1]});
  return {};
}

Status write_kv(const Backend& backend, const WriteKvArgs& args) {
  LATTE_RETURN_IF_ERROR(backend::validate_write_kv_args(args));
  if (args.slot_mapping.empty()) return {};
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
  cpu::run_write_kv(backend.impl().workers, {.kv_c = args.kv_c.bytes(),
                                             .k_pe = args.k_pe.bytes(),
                                             .kv_c_stride = args.kv_c.stride[0],
                                             .k_pe_stride = args.k_pe.stride[0],
                                             .dtype = args.kv_c.dtype,
                                             .slots = args.slot_mapping,
                                             .cache = args.kv_cache.bytes(),
                                             .page_stride_bytes = args.kv_cache.stride[0] * element_bytes,
                                             .token_stride_bytes = args.kv_cache.stride[1] * element_bytes,
                                             .page_size = static_cast<std::int32_t>(args.kv_cache.shape[1]),
                                             .latent = static_cast<std::int32_t>(args.kv_c.shape[1]),
                                             .rope = static_cast<std::int32_t>(args.k_pe.shape[1]),
                                             .format = args.format,
                                             .kv_scale = args.kv_scale});
  return {};
}

}  // namespace latte
