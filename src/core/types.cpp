// Names and sizes of the public enums.
#include "latte/latte.hpp"

namespace latte {

const char* version() { return LATTE_VERSION_STRING; }

std::size_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return 4;
    case Dtype::bf16:
    case Dtype::f16: return 2;
    case Dtype::fp8_e4m3:
    case Dtype::u8: return 1;
  }
  return 0;
}

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::fp8_e4m3: return "fp8_e4m3";
    case Dtype::u8: return "u8";
  }
  return "unknown";
}

const char* kv_format_name(KvFormat format) {
  switch (format) {
    case KvFormat::bf16: return "bf16";
    case KvFormat::f16: return "f16";
    case KvFormat::f32: return "f32";
    case KvFormat::fp8_e4m3: return "fp8_e4m3";
    case KvFormat::fp8_ds_mla: return "fp8_ds_mla";
  }
  return "unknown";
}

const char* mask_name(Mask mask) { return mask == Mask::causal ? "causal" : "none"; }

const char* op_name(Op op) { return op == Op::decode ? "decode" : "prefill"; }

const char* prefill_math_name(PrefillMath math) {
  switch (math) {
    case PrefillMath::automatic: return "automatic";
    case PrefillMath::half: return "half";
    case PrefillMath::fp8: return "fp8";
  }
  return "unknown";
}

const char* policy_name(PolicyKind kind) {
  switch (kind) {
    case PolicyKind::balanced: return "balanced";
    case PolicyKind::uniform: return "uniform";
    case PolicyKind::batch_invariant: return "batch_invariant";
  }
  return "unknown";
}

Dtype kv_element_dtype(KvFormat format) {
  switch (format) {
    case KvFormat::bf16: return Dtype::bf16;
    case KvFormat::f16: return Dtype::f16;
    case KvFormat::f32: return Dtype::f32;
    case KvFormat::fp8_e4m3: return Dtype::fp8_e4m3;
    case KvFormat::fp8_ds_mla: return Dtype::u8;
  }
  return Dtype::u8;
}

std::int64_t kv_token_elements(KvFormat format, std::int32_t latent, std::int32_t rope) {
  // 512 e4m3 + 4 fp32 scales + 64 bf16.
  if (format == KvFormat::fp8_ds_mla) return 512 + 4 * 4 + 64 * 2;
  return static_cast<std::int64_t>(latent) + rope;
}

}  // namespace latte
