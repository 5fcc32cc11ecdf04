// AMX tiles, and a stand-in that does the same on memory, so that what is built on tiles is tested on machines that
// have none. Tile numbers are template arguments: the compiler wants them as literals in the instruction's name.
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

  // GCC's intrinsics do not say that they read memory (its 12th version names 8 of the configuration's 64 bytes), so
  // the compiler could drop or delay the stores they depend on.
  HWY_INLINE static void memory_is_read(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

#define LATTE_FOR_TILE(tile, statement) \
  if constexpr (number == tile) statement

  template <int number>
  HWY_INLINE static void load(const void* rows, std::int64_t stride_bytes) {
    memory_is_read(rows);
    LATTE_FOR_TILE(0, _tile_loadd(0, rows, stride_bytes));
    LATTE_FOR_TILE(1, _tile_loadd(1, rows, stride_bytes));
    LATTE_FOR_TILE(2, _tile_loadd(2, rows, stride_bytes));
    LATTE_FOR_TILE(3, _tile_loadd(3, rows, stride_bytes));
    LATTE_FOR_TILE(4, _tile_loadd(4, rows, stride_bytes));
    LATTE_FOR_TILE(5, _tile_loadd(5, rows, stride_bytes));
    LATTE_FOR_TILE(6, _tile_loadd(6, rows, stride_bytes));
  }
  template <int number>
  HWY_INLINE static void store(void* rows) {
    LATTE_FOR_TILE(0, _tile_stored(0, rows, 64));
    LATTE_FOR_TILE(1, _tile_stored(1, rows, 64));
    LATTE_FOR_TILE(2, _tile_stored(2, rows, 64));
    LATTE_FOR_TILE(3, _tile_stored(3, rows, 64));
  }
  template <int number>
  HWY_INLINE static void zero() {
    LATTE_FOR_TILE(0, _tile_zero(0));
    LATTE_FOR_TILE(1, _tile_zero(1));
    LATTE_FOR_TILE(2, _tile_zero(2));
    LATTE_FOR_TILE(3, _tile_zero(3));
  }
  // Tile `number` += tile `a` (4 or 5) times tile 6.
  template <int number, int a>
  HWY_INLINE static void multiply() {
    static_assert(a == 4 || a == 5);
    if constexpr (a == 4) {
      LATTE_FOR_TILE(0, _tile_dpbf16ps(0, 4, 6));
      LATTE_FOR_TILE(1, _tile_dpbf16ps(1, 4, 6));
      LATTE_FOR_TILE(2, _tile_dpbf16ps(2, 4, 6));
      LATTE_FOR_TILE(3, _tile_dpbf16ps(3, 4, 6));
    } else {
      LATTE_FOR_TILE(0, _tile_dpbf16ps(0, 5, 6));
      LATTE_FOR_TILE(1, _tile_dpbf16ps(1, 5, 6));
      LATTE_FOR_TILE(2, _tile_dpbf16ps(2, 5, 6));
      LATTE_FOR_TILE(3, _tile_dpbf16ps(3, 5, 6));
    }
  }
#undef LATTE_FOR_TILE
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
  static void store(void* rows) {
    std::memcpy(rows, tiles[number], sizeof(tiles[number]));
  }
  template <int number>
  static void zero() {
    std::memset(tiles[number], 0, sizeof(tiles[number]));
  }
  template <int number, int a>
  static void multiply() {
    float sums[16][16];
    std::memcpy(sums, tiles[number], sizeof(sums));
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t left = tiles[a][m * 16 + k];
        const float low = std::bit_cast<float>(left << 16), high = std::bit_cast<float>(left & 0xffff0000u);
        for (int n = 0; n < 16; ++n) {
          const std::uint32_t right = tiles[6][k * 16 + n];
          sums[m][n] += low * std::bit_cast<float>(right << 16) + high * std::bit_cast<float>(right & 0xffff0000u);
        }
      }
    std::memcpy(tiles[number], sums, sizeof(sums));
  }

  static inline thread_local std::uint32_t tiles[8][256];
};

}  // namespace latte::cpu::HWY_NAMESPACE::bf16
HWY_POP_ATTRIBUTES
