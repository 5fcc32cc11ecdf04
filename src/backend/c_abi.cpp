#include "backend/c_abi.hpp"

#include "latte/latte.hpp"

namespace latte::c_abi {
namespace {

template <class A, class B>
constexpr bool same(A a, B b) {
  return static_cast<int>(a) == static_cast<int>(b);
}
static_assert(same(Code::invalid_argument, LATTE_INVALID_ARGUMENT) && same(Code::out_of_limits, LATTE_OUT_OF_LIMITS) &&
              same(Code::unsupported, LATTE_UNSUPPORTED) && same(Code::stale_metadata, LATTE_STALE_METADATA) &&
              same(Code::missing_argument, LATTE_MISSING_ARGUMENT) && same(Code::corrupt_plan, LATTE_CORRUPT_PLAN) &&
              same(Code::out_of_memory, LATTE_OUT_OF_MEMORY) && same(Code::internal, LATTE_INTERNAL) &&
              same(Code::device_fault, LATTE_DEVICE_FAULT));
static_assert(same(Dtype::f32, LATTE_F32) && same(Dtype::bf16, LATTE_BF16) && same(Dtype::f16, LATTE_F16) &&
              same(Dtype::fp8_e4m3, LATTE_FP8_E4M3) && same(Dtype::u8, LATTE_U8));
static_assert(same(KvFormat::bf16, LATTE_KV_BF16) && same(KvFormat::f16, LATTE_KV_F16) &&
              same(KvFormat::f32, LATTE_KV_F32) && same(KvFormat::fp8_e4m3, LATTE_KV_FP8_E4M3) &&
              same(KvFormat::fp8_ds_mla, LATTE_KV_FP8_DS_MLA));
static_assert(same(Mask::causal, LATTE_MASK_CAUSAL) && same(Mask::none, LATTE_MASK_NONE));
static_assert(same(PolicyKind::balanced, LATTE_POLICY_BALANCED) && same(PolicyKind::uniform, LATTE_POLICY_UNIFORM) &&
              same(PolicyKind::batch_invariant, LATTE_POLICY_BATCH_INVARIANT));
// Frozen: these lie in arrays and inside other structs.
static_assert(sizeof(latte_tensor) == sizeof(void*) + 8 + 64 && sizeof(latte_partial) == 2 * sizeof(latte_tensor));
static_assert(kMaxRank == 4);

// Copies `text` to where an error struct of `room` bytes has its field at [offset, offset + N).
void copy_field(char* base, std::size_t room, std::size_t offset, std::size_t width, const char* text) {
  if (room <= offset) return;
  const std::size_t length = std::min({std::strlen(text), width - 1, room - offset - 1});
  std::memcpy(base + offset, text, length);
  base[offset + length] = '\0';
}

}  // namespace

void fill_error(latte_error* error, Code code, const char* field, const char* expected, const char* got) noexcept {
  if (error == nullptr || error->size < offsetof(latte_error, field) || error->size > kMaxStructBytes) return;
  error->code = static_cast<latte_code>(code);
  auto* base = reinterpret_cast<char*>(error);
  copy_field(base, error->size, offsetof(latte_error, field), sizeof error->field, field);
  copy_field(base, error->size, offsetof(latte_error, expected), sizeof error->expected, expected);
  copy_field(base, error->size, offsetof(latte_error, got), sizeof error->got, got);
}

latte_code report(const Status& status, latte_error* error) noexcept {
  fill_error(error, status.code(), status.field().c_str(), status.expected().c_str(), status.got().c_str());
  return static_cast<latte_code>(status.code());
}

Status check_size(const char* name, std::uint32_t size, std::size_t least) {
  if (size >= least && size <= kMaxStructBytes && size % 8 == 0) return {};
  return backend::invalid(
      std::string(name) + ".size",
      "sizeof the struct: a multiple of 8 from " + backend::text(least) + " to " + backend::text(kMaxStructBytes),
      backend::text(size));
}

Status need_backend(const latte_backend* handle) {
  return handle != nullptr ? Status() : backend::missing("backend", "an open backend", "null");
}

Status read_tensor(const latte_tensor& tensor, const char* field, TensorView& view) {
  if (tensor.data == nullptr && tensor.rank == 0) return {};
  LATTE_RETURN_IF_ERROR(read_enum(tensor.dtype, Dtype::u8, field, view.dtype));
  view.data = tensor.data;
  view.rank = tensor.rank;
  std::copy(std::begin(tensor.shape), std::end(tensor.shape), view.shape.begin());
  std::copy(std::begin(tensor.stride), std::end(tensor.stride), view.stride.begin());
  return {};
}

Status read_problem(const latte_problem* given, DecodeProblem& problem) {
  latte_problem full = LATTE_PROBLEM_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "problem", offsetof(latte_problem, latent), full));
  problem.heads = full.heads;
  problem.latent = full.latent;
  problem.rope = full.rope;
  problem.page_size = full.page_size;
  LATTE_RETURN_IF_ERROR(read_enum(full.q_dtype, Dtype::u8, "q_dtype", problem.q_dtype));
  LATTE_RETURN_IF_ERROR(read_enum(full.out_dtype, Dtype::u8, "out_dtype", problem.out_dtype));
  LATTE_RETURN_IF_ERROR(read_enum(full.kv_format, KvFormat::fp8_ds_mla, "kv_format", problem.kv_format));
  return read_enum(full.mask, Mask::none, "mask", problem.mask);
}

}  // namespace latte::c_abi

extern "C" {

const char* latte_version(void) { return latte::version(); }

const char* latte_code_name(latte_code code) { return latte::code_name(static_cast<latte::Code>(code)); }

}  // extern "C"
