#include "backend/c_abi/c_abi.hpp"

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
static_assert(same(PrefillMath::automatic, LATTE_MATH_AUTOMATIC) && same(PrefillMath::half, LATTE_MATH_HALF) &&
              same(PrefillMath::fp8, LATTE_MATH_FP8));
static_assert(same(WorkspaceChecks::debug_builds, LATTE_CHECKS_DEBUG_BUILDS) &&
              same(WorkspaceChecks::on, LATTE_CHECKS_ON) && same(WorkspaceChecks::off, LATTE_CHECKS_OFF));
static_assert(same(PolicyKind::balanced, LATTE_POLICY_BALANCED) && same(PolicyKind::uniform, LATTE_POLICY_UNIFORM) &&
              same(PolicyKind::batch_invariant, LATTE_POLICY_BATCH_INVARIANT));
// Frozen: these lie in arrays and inside other structs.
static_assert(sizeof(latte_tensor) == sizeof(void*) + 8 + 64 && sizeof(latte_partial) == 2 * sizeof(latte_tensor));
static_assert(sizeof(latte_fp8_scale) == 8 + sizeof(void*));
static_assert(kMaxRank == 4);

// Copies `text` to where an error struct of `room` bytes has its field at [offset, offset + N).
void copy_field(char* base, std::size_t room, std::size_t offset, std::size_t width, const char* text) {
  if (room <= offset) return;
  const std::size_t length = std::min({std::strlen(text), width - 1, room - offset - 1});
  std::memcpy(base + offset, text, length);
  base[offset + length] = '\0';
}

template <class T>
const std::int32_t* words(std::span<const T> values) {
  return reinterpret_cast<const std::int32_t*>(values.data());
}

template <class T>
std::int64_t count(std::span<const T> values) {
  return static_cast<std::int64_t>(values.size());
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
  LATTE_RETURN_IF_ERROR(read_enum(full.kv_format, kLastKvFormat, "kv_format", problem.kv_format));
  return read_enum(full.mask, Mask::none, "mask", problem.mask);
}

Status read_input(const latte_tensor& tensor, const char* field, ConstTensorView& view) {
  TensorView any;
  LATTE_RETURN_IF_ERROR(read_tensor(tensor, field, any));
  view = any;
  return {};
}

Status read_limits(const latte_limits* given, Limits& limits) {
  latte_limits full = LATTE_LIMITS_INIT;
  LATTE_RETURN_IF_ERROR(read_struct(given, "limits", sizeof(latte_limits), full));
  limits = {.max_requests = full.max_requests,
            .max_query_tokens = full.max_query_tokens,
            .max_total_query_tokens = full.max_total_query_tokens,
            .max_kv_tokens = full.max_kv_tokens,
            .max_total_kv_tokens = full.max_total_kv_tokens,
            .workers = full.workers};
  return {};
}

Status read_options(const latte_builder_options* given, BuilderOptions& options) {
  latte_builder_options full = LATTE_BUILDER_OPTIONS_INIT;
  if (given != nullptr)
    LATTE_RETURN_IF_ERROR(read_struct(given, "options", offsetof(latte_builder_options, policy_n), full));
  LATTE_RETURN_IF_ERROR(read_enum(full.policy, PolicyKind::batch_invariant, "policy.kind", options.policy.kind));
  options.policy.n = full.policy_n;
  options.slots = full.slots;
  options.own_workspace = full.own_workspace != 0;
  options.validate = full.validate != 0;
  return read_memory(full.plan_memory, full.plan_memory_bytes, "options.plan_memory", options.plan_memory);
}

Status read_memory(void* data, std::uint64_t bytes, const char* field, std::span<std::byte>& memory) {
  if (data == nullptr && bytes > 0) return backend::missing(field, "a pointer", "null");
  if (data != nullptr && bytes == 0)
    return backend::invalid(field, "its size in " + std::string(field) + "_bytes", "0 bytes");
  memory = {static_cast<std::byte*>(data), static_cast<std::size_t>(bytes)};
  return {};
}

Status write_needs(const Result<BuilderNeeds>& needs, latte_workspace_need* plan, latte_workspace_need* workspace) {
  if (!needs.ok()) return needs.status();
  if (plan == nullptr) return backend::missing("plan", "where to put the need", "null");
  if (workspace == nullptr) return backend::missing("workspace", "where to put the need", "null");
  // The names are literals: terminated, and there for ever.
  const auto write = [](const WorkspaceNeed& need) {
    return latte_workspace_need{
        .name = need.name.data(), .bytes = need.bytes, .alignment = need.alignment, .phases = need.phases};
  };
  *plan = write(needs->plan);
  *workspace = write(needs->workspace);
  return {};
}

void write_support(const Support& answer, latte_support* support) {
  latte_support full = LATTE_SUPPORT_INIT;
  full.supported = answer.ok ? 1 : 0;
  copy_text(answer.kernel, full.kernel);
  copy_text(answer.reason, full.reason);
  write_struct(full, support);
}

void write_plan(const Plan& made, latte_plan* plan) {
  write_struct({.size = 0,
                .workers = made.workers(),
                .work_meta_data = words(made.work_meta_data),
                .work_meta_data_count = count(made.work_meta_data),
                .work_indptr = words(made.work_indptr),
                .work_indptr_count = count(made.work_indptr),
                .work_info_set = words(made.work_info_set),
                .work_info_set_count = count(made.work_info_set),
                .reduce_indptr = words(made.reduce_indptr),
                .reduce_indptr_count = count(made.reduce_indptr),
                .reduce_final_map = words(made.reduce_final_map),
                .reduce_final_map_count = count(made.reduce_final_map),
                .reduce_partial_map = words(made.reduce_partial_map),
                .reduce_partial_map_count = count(made.reduce_partial_map),
                .makespan_ticks = made.makespan_ticks()},
               plan);
}

}  // namespace latte::c_abi

extern "C" {

const char* latte_version(void) { return latte::version(); }

const char* latte_code_name(latte_code code) { return latte::code_name(static_cast<latte::Code>(code)); }

}  // extern "C"
