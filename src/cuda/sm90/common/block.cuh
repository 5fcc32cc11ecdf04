// What a thread block of every kernel is: warpgroups, registers, the shared memory it may have, and rings of stages.
#pragma once

#include <cstdint>

namespace latte::cuda::sm90 {

inline constexpr int kRowBytes = 128;  // a swizzled row: 64 values of 16 bits
inline constexpr int kAtomBytes = 8 * kRowBytes;
inline constexpr int kWarpgroup = 128;
inline constexpr int kSharedLimit = 232448;  // bytes a thread block may have
// Registers a thread has at the launch of a block that takes a whole multiprocessor: a multiple of 8. Roles may only
// pass on to each other what the launch got.
constexpr int launch_registers(int threads) { return 65536 / threads / 8 * 8; }

// Counts blocks, or anything else that goes round `kSlots` places: where the next one is and its barriers' parity.
template <int kSlots>
struct Ring {
  std::uint32_t count = 0;

  __device__ int slot() const { return static_cast<int>(count % kSlots); }
  __device__ std::uint32_t full() const { return count / kSlots % 2; }
  __device__ std::uint32_t empty() const { return (count / kSlots + 1) % 2; }
  __device__ Ring ahead(std::uint32_t more) const { return {count + more}; }
  __device__ Ring back(std::uint32_t fewer) const { return {count - fewer}; }
};

}  // namespace latte::cuda::sm90
