// Rows of narrow numbers to fp32 and back, for the vector target being compiled.
#if defined(LATTE_CPU_CONVERT_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef LATTE_CPU_CONVERT_INL_
#undef LATTE_CPU_CONVERT_INL_
#else
#define LATTE_CPU_CONVERT_INL_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"

#include "core/codec.hpp"
#include "cpu/kernel.hpp"

HWY_BEFORE_NAMESPACE();
namespace latte::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<std::uint32_t>;
using I32 = hn::ScalableTag<std::int32_t>;
using VF32 = hn::Vec<F32>;
inline constexpr std::int32_t kLanes = static_cast<std::int32_t>(HWY_LANES(float));

// kLanes consecutive values of a format, as fp32.
HWY_INLINE VF32 load_bf16(const std::uint16_t* src) {
  const hn::Rebind<std::uint16_t, F32> d16;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(d16, src))));
}

HWY_INLINE VF32 load_f16(const std::uint16_t* src) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(F32(), f16_to_f32(*src));
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(src)));
#endif
}

// An e4m3 value has the bits of an f16 value 2^8 times smaller, subnormal ones included; only NaN is different.
HWY_INLINE VF32 load_e4m3(const std::uint8_t* src) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(F32(), e4m3_to_f32(*src));
#else
  const F32 d;
  const hn::Rebind<std::int8_t, F32> d8;
  const hn::Rebind<std::int16_t, F32> d16;
  const auto extended = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(src)));
  const auto bits = hn::And(hn::ShiftLeft<7>(extended), hn::Set(d16, static_cast<std::int16_t>(0xbf80)));
  const auto magnitude = hn::Set(d16, 0x3f80);
  const auto nan = hn::VecFromMask(d16, hn::Eq(hn::And(bits, magnitude), magnitude));
  const auto half = hn::BitCast(hn::Rebind<hwy::float16_t, F32>(), hn::Or(bits, hn::And(nan, hn::Set(d16, 0x7c00))));
  return hn::Mul(hn::PromoteTo(d, half), hn::Set(d, 256.0f));
#endif
}

// dst[i] = load(i), for `count` values, a multiple of 16.
template <class Load>
HWY_INLINE void store_each(std::int32_t count, float* HWY_RESTRICT dst, const Load& load) {
  for (std::int32_t i = 0; i < count; i += 16) {
    HWY_UNROLL(16)
    for (std::int32_t lane = i; lane < i + 16; lane += kLanes) hn::StoreU(load(lane), F32(), dst + lane);
  }
}

// `count` values (a multiple of 16) to fp32.
HWY_INLINE void to_f32(const std::byte* src, Dtype dtype, std::int32_t count, float* HWY_RESTRICT dst) {
  const auto* p32 = reinterpret_cast<const float*>(src);
  const auto* p16 = reinterpret_cast<const std::uint16_t*>(src);
  const auto* p8 = reinterpret_cast<const std::uint8_t*>(src);
  switch (dtype) {
    case Dtype::f32: return store_each(count, dst, [=](std::int32_t i) { return hn::LoadU(F32(), p32 + i); });
    case Dtype::bf16: return store_each(count, dst, [=](std::int32_t i) { return load_bf16(p16 + i); });
    case Dtype::f16: return store_each(count, dst, [=](std::int32_t i) { return load_f16(p16 + i); });
    case Dtype::fp8_e4m3:
    case Dtype::u8: return store_each(count, dst, [=](std::int32_t i) { return load_e4m3(p8 + i); });
  }
}

// The latent part of one fp8_ds_mla token, scales applied.
HWY_INLINE void ds_mla_latent_to_f32(const std::byte* token, float* HWY_RESTRICT dst) {
  const F32 d;
  for (std::int32_t group = 0; group < kDsMlaGroups; ++group) {
    float scale;
    std::memcpy(&scale, token + kDsMlaScaleOffset + group * static_cast<std::int32_t>(sizeof(float)), sizeof(float));
    const auto* src = reinterpret_cast<const std::uint8_t*>(token) + group * kDsMlaGroup;
    for (std::int32_t i = 0; i < kDsMlaGroup; i += kLanes)
      hn::StoreU(hn::Mul(load_e4m3(src + i), hn::Set(d, scale)), d, dst + group * kDsMlaGroup + i);
  }
}

// A token's key, or in prefill its values. fp8_e4m3 stays unscaled: its scale is folded into the scores and the output.
HWY_INLINE void token_to_f32(const std::byte* token, KvFormat format, std::int32_t width, float* HWY_RESTRICT dst) {
  if (format == KvFormat::fp8_ds_mla) {
    ds_mla_latent_to_f32(token, dst);
    to_f32(token + kDsMlaRopeOffset, Dtype::bf16, kDsMlaRope, dst + kDsMlaLatent);
  } else {
    to_f32(token, kv_element_dtype(format), width, dst);
  }
}

// dst = src * factor in the output's dtype.
HWY_INLINE void store_scaled(const float* HWY_RESTRICT src, float factor, std::int32_t count, std::byte* dst,
                             Dtype dtype) {
  const F32 d;
  auto* out16 = reinterpret_cast<std::uint16_t*>(dst);
  if (dtype == Dtype::bf16) {
    for (std::int32_t i = 0; i < count; ++i) out16[i] = f32_to_bf16(src[i] * factor);
  } else if (dtype == Dtype::f16) {
#if HWY_TARGET == HWY_SCALAR
    for (std::int32_t i = 0; i < count; ++i) out16[i] = f32_to_f16(src[i] * factor);
#else
    const hn::Rebind<hwy::float16_t, F32> d16;
    for (std::int32_t i = 0; i < count; i += kLanes)
      hn::StoreU(hn::DemoteTo(d16, hn::Mul(hn::LoadU(d, src + i), hn::Set(d, factor))), d16,
                 reinterpret_cast<hwy::float16_t*>(out16 + i));
#endif
  } else {
    auto* out32 = reinterpret_cast<float*>(dst);
    for (std::int32_t i = 0; i < count; i += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, src + i), hn::Set(d, factor)), d, out32 + i);
  }
}

// A cached token as a row of another dtype. 16-bit rows of the cache's own dtype keep their bits.
HWY_NOINLINE void copy_token(const TokenCopy& copy) {
  constexpr std::int32_t kColumns = 1024;  // converted at a time, on the stack
  const Dtype from = kv_element_dtype(copy.format);
  const auto in_bytes = static_cast<std::int64_t>(dtype_bytes(from));
  const auto out_bytes = static_cast<std::int64_t>(dtype_bytes(copy.dtype));
  if (from == copy.dtype) {
    std::memcpy(copy.out, copy.token, static_cast<std::size_t>(copy.width * out_bytes));
    return;
  }
  alignas(64) float values[kColumns];
  if (copy.format == KvFormat::fp8_ds_mla) {
    static_assert(kDsMlaLatent + kDsMlaRope <= kColumns);
    token_to_f32(copy.token, copy.format, copy.width, values);
    return store_scaled(values, 1.0f, copy.width, copy.out, copy.dtype);
  }
  for (std::int32_t begin = 0; begin < copy.width; begin += kColumns) {
    const std::int32_t columns = std::min(kColumns, copy.width - begin);
    to_f32(copy.token + begin * in_bytes, from, columns, values);
    store_scaled(values, copy.scale, columns, copy.out + begin * out_bytes, copy.dtype);
  }
}

}  // namespace latte::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
