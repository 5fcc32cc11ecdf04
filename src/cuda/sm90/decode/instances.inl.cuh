// Included by the files instances_*.cu alone.
#pragma once

#include "cuda/sm90/decode/instances.cuh"
#include "cuda/sm90/decode/plain.cuh"
#include "cuda/sm90/decode/swapped.cuh"

namespace latte::cuda::sm90 {

// Shared memory, as the kernels' pages have it: docs/kernels/sm90_swapped.md and sm90_plain.md, Budget.
template <int kLatent>
constexpr std::size_t swapped_bytes(int rows) {
  if (kLatent == 512) return rows == 16 ? 167'936 : rows == 32 ? 188'416 : 208'896;
  return rows == 16 ? 94'208 : rows == 32 ? 106'496 : 118'784;
}
template <int kLatent>
constexpr std::size_t kPlainBytes = kLatent == 512 ? 226'304 : 136'192;

template <int kLatent, class Half, int kRows>
Instance swapped_instance() {
  using Shape = Config<kRows, 64, kLatent, Half, kLatent == 512 ? 3 : 1>;  // 9 groups of columns, or 5
  static_assert(sizeof(swapped::Storage<Shape>) == swapped_bytes<kLatent>(kRows));
  return {reinterpret_cast<const void*>(&swapped::decode_swapped<Shape>), sizeof(swapped::Storage<Shape>),
          swapped::kThreads, Shape::kParts, Shape::kBoxTokens};
}

template <int kLatent, class Half>
Instance find_instance(std::int32_t rows, bool whole_slabs) {
  using Plain = Config<64, 48, kLatent, Half>;
  static_assert(sizeof(plain::Storage<Plain>) == kPlainBytes<kLatent>);
  switch (rows) {
    case 16: return swapped_instance<kLatent, Half, 16>();
    case 32: return swapped_instance<kLatent, Half, 32>();
    case 48: return swapped_instance<kLatent, Half, 48>();
    case 64:
      return {whole_slabs ? reinterpret_cast<const void*>(&plain::decode_plain<Plain, false>)
                          : reinterpret_cast<const void*>(&plain::decode_plain<Plain, true>),
              sizeof(plain::Storage<Plain>), plain::kThreads, Plain::kParts, Plain::kBoxTokens};
    default: return {};
  }
}

}  // namespace latte::cuda::sm90
