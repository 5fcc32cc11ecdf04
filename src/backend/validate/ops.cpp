#include <limits>
#include <string>

#include "backend/errors.hpp"
#include "backend/validate/validate.hpp"
#include "backend/views.hpp"
#include "core/checked.hpp"
#include "cuda/host/cuda.hpp"

namespace latte::backend {
namespace {

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

bool fits_int32(std::int64_t extent) { return extent >= 0 && extent <= kMaxInt; }

// Of a cache [pages, page_size, W]; other ranks are for validate_cache to refuse.
Status check_page_size(const ConstTensorView& cache) {
  if (cache.rank != 3 || (cache.shape[1] >= 1 && cache.shape[1] <= kMaxInt)) return {};
  return invalid("kv_cache", "pages of 1 .. " + text(kMaxInt) + " tokens", text(cache.shape[1]));
}

bool same_layout(const ConstTensorView& a, const ConstTensorView& b) {
  bool same = a.dtype == b.dtype;
  for (std::size_t axis = 0; axis + 1 < static_cast<std::size_t>(a.rank); ++axis)
    same = same && (a.shape[axis] <= 1 || a.stride[axis] == b.stride[axis]);
  return same && (a.rank == 3 || a.shape[1] <= 1 || a.stride[1] == b.stride[1]);
}

std::string part_field(std::size_t index, const char* name) { return "partials[" + text(index) + "]." + name; }

// Each check names partials[k].out; the name is put in when there is an error to tell, not before.
Status in_part(const Status& status, std::size_t index, const char* name) {
  return {status.code(), part_field(index, name), status.expected(), status.got()};
}

Status check_partial(const Partial& part, std::size_t index, const ConstTensorView& out, const ConstTensorView& lse,
                     Place place) {
  Status status = check_view(part.out, {.rank = 3,
                                        .shape = {out.shape[0], out.shape[1], out.shape[2]},
                                        .exact_first = true,
                                        .dtypes = kFloatDtypes,
                                        .align_bytes = required_alignment(place)});
  if (!status.ok()) return in_part(status, index, "out");
  status = check_view(part.lse, {.rank = 2,
                                 .shape = {out.shape[0], out.shape[1]},
                                 .exact_first = true,
                                 .dtypes = dtype_bit(Dtype::f32),
                                 .dense_last = false});
  if (!status.ok()) return in_part(status, index, "lse");
  // In place works row by row, so a shared tensor must have its rows in the same places.
  if (part.out.data == out.data && out.data != nullptr && !same_layout(part.out, out))
    return invalid("out", "the dtype and strides of " + part_field(index, "out") + ", whose memory it shares",
                   "others");
  if (given(lse) && part.lse.data == lse.data && lse.data != nullptr && !same_layout(part.lse, lse))
    return invalid("lse", "the strides of " + part_field(index, "lse") + ", whose memory it shares", "others");
  return {};
}

Status check_slots(std::span<const std::int64_t> slots, std::int64_t tokens, std::int64_t capacity, Place place) {
  const auto count = static_cast<std::int64_t>(slots.size());
  if (count != tokens) return invalid("slot_mapping", text(tokens) + " entries, as kv_c has", text(count));
  if (count > 0 && slots.data() == nullptr) return missing("slot_mapping", "a pointer", "null");
  if (place == Place::device) return {};
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i] >= capacity)
      return invalid("slot_mapping", "slots below " + text(capacity), text(slots[i]) + " at [" + text(i) + "]");
  return {};
}

// Rows of out_start, as far as the host can read it.
class GatherDemand final : public PageDemand {
 public:
  GatherDemand(const GatherKvArgs& args, Place where)
      : PageDemand(where, static_cast<std::int32_t>(args.kv_cache.shape[1]),
                   static_cast<std::int64_t>(args.out_start.size()) - 1, where == Place::host),
        args_(args) {}
  std::int64_t tokens(std::size_t request) const override {
    const std::int64_t rows = std::int64_t{args_.out_start[request + 1]} - args_.out_start[request];
    return rows > 0 ? args_.first_token + rows : 0;
  }

 private:
  const GatherKvArgs& args_;
};

Status check_out_start(const GatherKvArgs& args, Place place) {
  const std::span<const std::int32_t> starts = args.out_start;
  if (starts.empty()) return missing("out_start", "B + 1 entries");
  if (starts.data() == nullptr) return missing("out_start", "a pointer", "null");
  if (starts.size() == 1 && args.tokens > 0) return invalid("tokens", "0, as there are no requests", text(args.tokens));
  if (place == Place::device) return {};
  if (starts[0] != 0) return invalid("out_start[0]", "0", text(starts[0]));
  for (std::size_t b = 0; b + 1 < starts.size(); ++b) {
    if (starts[b + 1] < starts[b])
      return invalid("out_start[" + text(b + 1) + "]", ">= " + text(starts[b]), text(starts[b + 1]));
    if (starts[b + 1] - starts[b] > kMaxInt - args.first_token)
      return invalid("first_token", "token positions below 2^31", text(args.first_token));
  }
  if (starts.back() != args.tokens)
    return invalid("tokens", text(starts.back()) + ", the last of out_start", text(args.tokens));
  return {};
}

}  // namespace

Status validate_gather_kv_args(const GatherKvArgs& args, Place place) {
  if (args.kv_format > kLastKvFormat)
    return invalid("kv_format", "a KvFormat", text(static_cast<std::int64_t>(args.kv_format)));
  if (args.first_token < 0) return invalid("first_token", ">= 0", text(args.first_token));
  if (args.tokens < 0) return invalid("tokens", ">= 0", text(args.tokens));
  LATTE_RETURN_IF_ERROR(check_out_start(args, place));
  const TensorView& out = args.out;
  LATTE_RETURN_IF_ERROR(check_view(out, {.field = "out",
                                         .rank = 2,
                                         .shape = {args.tokens, out.shape[1]},
                                         .dtypes = kFloatDtypes,
                                         .align_bytes = required_alignment(place)}));
  constexpr std::int64_t kMaxWidth = 1 << 14;
  if (out.shape[1] < 16 || out.shape[1] > kMaxWidth || out.shape[1] % 16 != 0)
    return unsupported("out", "rows of a multiple of 16 up to " + text(kMaxWidth) + " values", text(out.shape[1]));
  if (args.kv_format == KvFormat::fp8_ds_mla && out.shape[1] != 576)
    return invalid("out", "rows of 576 values, as fp8_ds_mla has", text(out.shape[1]));
  if (!rows_disjoint(args.tokens, out.stride[0], 1, 0, out.shape[1]))
    return invalid("out", "rows that do not overlap", "stride " + text(out.stride[0]));
  LATTE_RETURN_IF_ERROR(check_page_size(args.kv_cache));
  // Only the sum of the two widths matters here.
  const DecodeProblem cache{
      .heads = 1,
      .latent = static_cast<std::int32_t>(out.shape[1]),
      .rope = 0,
      .kv_format = args.kv_format,
      .page_size = args.kv_cache.rank == 3 ? static_cast<std::int32_t>(args.kv_cache.shape[1]) : 1};
  LATTE_RETURN_IF_ERROR(validate_cache(cache, args.kv_cache, place));
  LATTE_RETURN_IF_ERROR(validate_kv_scale(args.kv_format, args.kv_scale, place));
  return validate_pages(GatherDemand(args, place), args.pages, args.kv_cache.shape[0]);
}

Status validate_merge_args(const MergeArgs& args, Place place) {
  const std::span<const Partial> partials = args.partials;
  const TensorView& out = args.out;
  const TensorView& lse = args.lse;
  if (partials.empty()) return missing("partials", "at least one");
  if (partials.data() == nullptr) return missing("partials", "a pointer", "null");
  if (place == Place::device && partials.size() > cuda::kMaxMergeParts)
    return unsupported("partials", "at most " + text(cuda::kMaxMergeParts) + " in one call on a device",
                       text(partials.size()));
  LATTE_RETURN_IF_ERROR(check_view(out, {.field = "out",
                                         .rank = 3,
                                         .shape = {0, out.shape[1], out.shape[2]},
                                         .dtypes = kFloatDtypes,
                                         .align_bytes = required_alignment(place)}));
  for (std::size_t axis = 1; axis < 3; ++axis)
    if (out.shape[axis] < 1 || !fits_int32(out.shape[axis]))
      return invalid("out", "1 .. " + text(kMaxInt) + " heads and values", shape_text({out.shape.data(), 3}));
  if (out.shape[2] % 16 != 0) return unsupported("out", "a width that is a multiple of 16", text(out.shape[2]));
  LATTE_RETURN_IF_ERROR(check_disjoint(out, "out", out.shape[0], out.shape[2]));
  if (given(lse)) {
    LATTE_RETURN_IF_ERROR(check_view(lse, {.field = "lse",
                                           .rank = 2,
                                           .shape = {out.shape[0], out.shape[1]},
                                           .exact_first = true,
                                           .dtypes = dtype_bit(Dtype::f32),
                                           .dense_last = false}));
    LATTE_RETURN_IF_ERROR(check_disjoint(lse, "lse", out.shape[0], 1));
  }
  for (std::size_t index = 0; index < partials.size(); ++index)
    LATTE_RETURN_IF_ERROR(check_partial(partials[index], index, out, lse, place));
  return {};
}

Status validate_write_kv_args(const WriteKvArgs& args, Place place) {
  const ConstTensorView& kv_c = args.kv_c;
  const ConstTensorView& k_pe = args.k_pe;
  const TensorView& cache = args.kv_cache;
  LATTE_RETURN_IF_ERROR(check_view(kv_c, {.field = "kv_c",
                                          .rank = 2,
                                          .shape = {0, kv_c.shape[1]},
                                          .dtypes = kFloatDtypes,
                                          .align_bytes = required_alignment(place)}));
  LATTE_RETURN_IF_ERROR(check_view(k_pe, {.field = "k_pe",
                                          .rank = 2,
                                          .shape = {kv_c.shape[0], k_pe.shape[1]},
                                          .exact_first = true,
                                          .dtypes = dtype_bit(kv_c.dtype),
                                          .align_bytes = required_alignment(place)}));
  if (!fits_int32(kv_c.shape[1])) return invalid("kv_c", "a 32-bit width", text(kv_c.shape[1]));
  if (!fits_int32(k_pe.shape[1])) return invalid("k_pe", "a 32-bit width", text(k_pe.shape[1]));
  LATTE_RETURN_IF_ERROR(check_page_size(cache));
  const DecodeProblem problem{.heads = 1,
                              .latent = static_cast<std::int32_t>(kv_c.shape[1]),
                              .rope = static_cast<std::int32_t>(k_pe.shape[1]),
                              .kv_format = args.kv_format,
                              .page_size = cache.rank == 3 ? static_cast<std::int32_t>(cache.shape[1]) : 1};
  LATTE_RETURN_IF_ERROR(validate_problem(problem));
  LATTE_RETURN_IF_ERROR(validate_cache(problem, cache, place));
  LATTE_RETURN_IF_ERROR(check_disjoint(cache, "kv_cache", cache.shape[0], cache.shape[2]));
  LATTE_RETURN_IF_ERROR(validate_kv_scale(args.kv_format, args.kv_scale, place));
  std::int64_t capacity = 0;
  if (!checked_mul(cache.shape[0], cache.shape[1], capacity)) capacity = std::numeric_limits<std::int64_t>::max();
  return check_slots(args.slot_mapping, kv_c.shape[0], capacity, place);
}

}  // namespace latte::backend
