// Every vector kernel of this build: the sources under simd/ compiled once per target, and the list of what came out.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_kernels.cpp"
// Targets below AVX2 would lie between scalar and AVX2 and are not worth their code; ones above AVX-512 only add
// instructions that no kernel uses. Register blocks are arrays of vectors, which scalable vectors cannot be.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#include "hwy/foreach_target.h"
// Highway's order: these after foreach_target. Its baseline on x86 is scalar, which has a file of its own.
#if HWY_TARGET != HWY_SCALAR
#include "cpu/simd/fp32/kernel-inl.hpp"
#include "cpu/simd/merge-inl.hpp"
#endif
#if HWY_TARGET == HWY_AVX3
#include "cpu/simd/bf16/kernel-inl.hpp"
#endif

#if HWY_ONCE
#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

[[maybe_unused]] constexpr auto kNothing = [] {};
[[maybe_unused]] constexpr auto kTakesAll = [](Dtype, KvFormat) { return true; };

// bf16 kernels read q, K and V without loss, or not at all.
[[maybe_unused]] bool fits_bf16(Dtype q, KvFormat kv) {
  return (q == Dtype::bf16 || q == Dtype::fp8_e4m3) &&
         (kv == KvFormat::bf16 || kv == KvFormat::fp8_e4m3 || kv == KvFormat::fp8_ds_mla);
}

[[maybe_unused]] bool present(bool feature, const char* name, std::string& reason) {
  if (!feature) reason = std::string("the processor has no ") + name;
  return feature;
}

const Kernel kFp32[] = {
#if HWY_TARGETS & HWY_AVX3
    {
        .name = "avx512",
        .serves = "every format and width",
        .usable = [](const Features& f,
                     std::string& reason) { return present(f.avx512, "AVX-512 (F, BW, DQ, VL)", reason); },
        .takes = kTakesAll,
        .run = N_AVX3::fp32::run,
        .merge_row = N_AVX3::merge_row,
        .copy_token = N_AVX3::copy_token,
        .scratch_bytes = N_AVX3::fp32::scratch_bytes,
        .max_row_tile = N_AVX3::fp32::kRowTile,
        .speed = {.block_ns = 2000, .row_block_ns = 560, .granule = 4},
        .prefill_row_tile = N_AVX3::fp32::kPrefillRowTile,
        .prefill_speed = {.block_ns = 5000, .row_block_ns = 380, .granule = 16},
        .burn = N_AVX3::fp32::burn,
        .enter = kNothing,
        .leave = kNothing,
    },
#endif
#if HWY_TARGETS & HWY_AVX2
    {
        .name = "avx2",
        .serves = "every format and width",
        .usable = [](const Features& f,
                     std::string& reason) { return present(f.avx2, "AVX2 with FMA and F16C", reason); },
        .takes = kTakesAll,
        .run = N_AVX2::fp32::run,
        .merge_row = N_AVX2::merge_row,
        .copy_token = N_AVX2::copy_token,
        .scratch_bytes = N_AVX2::fp32::scratch_bytes,
        .max_row_tile = N_AVX2::fp32::kRowTile,
        .speed = {.block_ns = 2000, .row_block_ns = 1120, .granule = 6},
        .prefill_row_tile = N_AVX2::fp32::kPrefillRowTile,
        .prefill_speed = {.block_ns = 3000, .row_block_ns = 430, .granule = 8},
        .burn = N_AVX2::fp32::burn,
        .enter = kNothing,
        .leave = kNothing,
    },
#endif
#if HWY_TARGETS & HWY_NEON
    {
        .name = "neon",
        .serves = "every format and width",
        .usable = [](const Features&, std::string&) { return true; },
        .takes = kTakesAll,
        .run = N_NEON::fp32::run,
        .merge_row = N_NEON::merge_row,
        .copy_token = N_NEON::copy_token,
        .scratch_bytes = N_NEON::fp32::scratch_bytes,
        .max_row_tile = N_NEON::fp32::kRowTile,
        .speed = {.block_ns = 4000, .row_block_ns = 3200, .granule = 6},
        .prefill_row_tile = N_NEON::fp32::kPrefillRowTile,
        .prefill_speed = {.block_ns = 3000, .row_block_ns = 860, .granule = 4},
        .burn = N_NEON::fp32::burn,
        .enter = kNothing,
        .leave = kNothing,
    },
#endif
};

#if HWY_TARGETS & HWY_AVX3
const Kernel kBf16[] = {
    {
        .name = "amx",
        .serves = "bf16 and fp8 keys and values with bf16 or fp8 q",
        .usable =
            [](const Features& f, std::string& reason) {
              if (!present(f.amx_bf16, "AMX-BF16", reason)) return false;
              if (!present(f.avx512_bf16, "AVX-512 BF16", reason)) return false;
              if (!f.amx_permitted) reason = "the operating system did not permit the AMX tile state";
              return f.amx_permitted;
            },
        .takes = fits_bf16,
        .run = N_AVX3::bf16::run_amx<N_AVX3::bf16::HardwareTiles>,
        .merge_row = N_AVX3::merge_row,
        .copy_token = N_AVX3::copy_token,
        .scratch_bytes = N_AVX3::bf16::scratch_bytes,
        .max_row_tile = N_AVX3::bf16::kRowTile,
        .speed = {.block_ns = 4000, .row_block_ns = 100, .granule = 16},
        .prefill_row_tile = N_AVX3::bf16::kPrefillRowTile,
        .prefill_speed = {.block_ns = 4000, .row_block_ns = 45, .granule = 16},
        .burn = N_AVX3::bf16::burn_amx,
        .enter = N_AVX3::bf16::HardwareTiles::enter,
        .leave = N_AVX3::bf16::HardwareTiles::leave,
    },
    {
        .name = "avx512_bf16",
        .serves = "bf16 and fp8 keys and values with bf16 or fp8 q",
        .usable = [](const Features& f, std::string& reason) { return present(f.avx512_bf16, "AVX-512 BF16", reason); },
        .takes = fits_bf16,
        .run = N_AVX3::bf16::run_avx512,
        .merge_row = N_AVX3::merge_row,
        .copy_token = N_AVX3::copy_token,
        .scratch_bytes = N_AVX3::bf16::scratch_bytes,
        .max_row_tile = N_AVX3::bf16::kRowTile,
        .speed = {.block_ns = 1500, .row_block_ns = 285, .granule = 8},
        .prefill_row_tile = N_AVX3::bf16::kPrefillRowTile,
        .prefill_speed = {.block_ns = 6000, .row_block_ns = 220, .granule = 16},
        .burn = N_AVX3::bf16::burn_avx512,
        .enter = kNothing,
        .leave = kNothing,
    },
};

const Kernel kEmulated[] = {
    {
        .name = "amx_emulated",
        .serves = "tests: what amx does, without its speed",
        .usable = [](const Features& f, std::string& reason) { return present(f.avx512_bf16, "AVX-512 BF16", reason); },
        .takes = fits_bf16,
        .run = N_AVX3::bf16::run_amx<N_AVX3::bf16::EmulatedTiles>,
        .merge_row = N_AVX3::merge_row,
        .copy_token = N_AVX3::copy_token,
        .scratch_bytes = N_AVX3::bf16::scratch_bytes,
        .max_row_tile = N_AVX3::bf16::kRowTile,
        .speed = {.block_ns = 4000, .row_block_ns = 4000, .granule = 16},
        .prefill_row_tile = N_AVX3::bf16::kPrefillRowTile,
        .prefill_speed = {.block_ns = 26000, .row_block_ns = 3260, .granule = 16},
        .burn = N_AVX3::bf16::burn_avx512,
        .enter = kNothing,
        .leave = kNothing,
    },
};
#endif

}  // namespace

std::span<const Kernel> fp32_kernels() { return kFp32; }

std::span<const Kernel> bf16_kernels() {
#if HWY_TARGETS & HWY_AVX3
  return kBf16;
#else
  return {};
#endif
}

std::span<const Kernel> emulated_kernels() {
#if HWY_TARGETS & HWY_AVX3
  return kEmulated;
#else
  return {};
#endif
}

}  // namespace latte::cpu
#endif
