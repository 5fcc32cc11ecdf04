// The operations around decode: joining partial results and writing new tokens into the cache.
#pragma once

#include <cstdint>
#include <span>

#include "latte/backend.hpp"
#include "latte/decode.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte {

struct Partial {
  ConstTensorView out{};  // [T, H, latent], normalised
  ConstTensorView lse{};  // fp32 [T, H]; -inf = saw nothing
};

struct MergeArgs {
  std::span<const Partial> partials{};  // at least one; cuda takes at most 64 a call
  TensorView out{};                     // [T, H, latent]; may be one of the partials' own
  TensorView lse{};                     // optional, fp32 [T, H]; the same
  Stream stream = nullptr;              // where to queue the work on a device
};

// lse = ln sum e^lse_k and out = sum e^(lse_k - lse) out_k, in the order of the partials. (0, -inf) is neutral.
Status merge(const Backend& backend, const MergeArgs& args);

struct WriteKvArgs {
  ConstTensorView kv_c{};                        // [N, latent]
  ConstTensorView k_pe{};                        // [N, rope]
  std::span<const std::int64_t> slot_mapping{};  // [N]: page * page_size + position; negative = skip
  TensorView kv_cache{};                         // [pages, page_size, W]
  KvFormat kv_format = KvFormat::bf16;
  Fp8Scale kv_scale{};      // fp8_e4m3 only: stored = value / kv_scale; one number
  Stream stream = nullptr;  // where to queue the work on a device
};

// Rounds to nearest even; fp8 saturates at 448. Slots of one call must differ. On a device slot_mapping lies there too;
// slots past the end are skipped like negative ones.
Status write_kv(const Backend& backend, const WriteKvArgs& args);

struct GatherKvArgs {
  ConstTensorView kv_cache{};  // [pages, page_size, W]
  KvFormat kv_format = KvFormat::bf16;
  Fp8Scale kv_scale{};  // fp8_e4m3 only; one number
  PageTable pages{};
  // Row out_start[b] + i gets token first_token + i of request b, for all rows before out_start[b + 1].
  std::int32_t first_token = 0;
  std::span<const std::int32_t> out_start{};  // [B + 1] prefix sums
  std::int32_t tokens = 0;                    // out_start[B], which a device's host cannot read
  TensorView out{};                           // [N, latent + rope], bf16, f16 or f32
  Stream stream = nullptr;
};

// Copies tokens of a paged cache to dense rows, fp8 ones multiplied out. On a device out_start lies there too.
Status gather_kv(const Backend& backend, const GatherKvArgs& args);

}  // namespace latte
