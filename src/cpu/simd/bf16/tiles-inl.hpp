// AMX tiles, and a stand-in that does the same on memory, so that what is built on tiles is tested on machines that
// have none.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "hwy/highway.h"

#include "core/codec.hpp"

HWY_PUSH_ATTRIBUTES(LATTE_BF16_TARGET)
namespace latte::cpu::HWY_NAMESPACE::bf16 {

// Every tile has 16 rows of 64 bytes.
struct HardwareTiles {
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);

  static void enter() {
    const Config config;
    memory_is_read(&config);
    _tile_loadconfig(&config);
  }
  static void leave() { _tile_release(); }

  // GCC's intrinsic does not say that it reads memory (the 12th version's names 8 of these 64 bytes), so the compiler
  // could drop or delay the stores it depends on. The instructions below are written as they are for that reason, and
  // because intrinsics take tile numbers as literals only.
  HWY_INLINE static void memory_is_read(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

  template <int tile>
  HWY_INLINE static void load(const void* rows, std::int64_t stride_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(tile) : "memory");
  }
  // For what is not read again before L1 has been filled with other things: such a load leaves L1 as it is.
  template <int tile>
  HWY_INLINE static void load_passing(const void* rows, std::int64_t stride_bytes) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(tile) : "memory");
  }
  template <int tile>
  HWY_INLINE static void store(void* rows) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(std::int64_t{64}), "i"(tile) : "memory");
  }
  template <int tile>
  HWY_INLINE static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  // c += a . b
  template <int c, int a, int b>
  HWY_INLINE static void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

struct EmulatedTiles {
  static void enter() {}
  static void leave() {}

  template <int number>
  static void load(const void* rows, std::int64_t stride_bytes) {
    for (int r = 0; r < 16; ++r)
      std::memcpy(tiles[number] + r * 16, static_cast<const char*>(rows) + r * stride_bytes, 64);
  }
  template <int number>
  static void load_passing(const void* rows, std::int64_t stride_bytes) {
    load<number>(rows, stride_bytes);
  }
  template <int number>
  static void store(void* rows) {
    std::memcpy(rows, tiles[number], sizeof(tiles[number]));
  }
  template <int number>
  static void zero() {
    std::memset(tiles[number], 0, sizeof(tiles[number]));
  }
  template <int c, int a, int b>
  static void multiply() {
    float sums[16][16];
    std::memcpy(sums, tiles[c], sizeof(sums));
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t left = tiles[a][m * 16 + k];
        const float low = value(left << 16), high = value(left & 0xffff0000u);
        for (int n = 0; n < 16; ++n) {
          const std::uint32_t right = tiles[b][k * 16 + n];
          sums[m][n] += low * value(right << 16) + high * value(right & 0xffff0000u);
        }
      }
    std::memcpy(tiles[c], sums, sizeof(sums));
  }

  // The hardware takes subnormal operands for zero.
  static float value(std::uint32_t bits) { return (bits & 0x7f800000u) == 0 ? 0.0f : std::bit_cast<float>(bits); }

  static inline thread_local std::uint32_t tiles[8][256];
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
