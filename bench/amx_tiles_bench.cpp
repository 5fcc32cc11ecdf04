// What a tile product costs with its loads from L1, by how many of the eight tiles are in use. The kernel's choice of
// seven (docs/kernels/amx.md) rests on the difference between an idle and a busy sibling hardware thread: compare one
// thread with all.
#include <cstdint>
#include <immintrin.h>
#include <string_view>
#include <thread>

#include <benchmark/benchmark.h>

#include "latte/latte.hpp"

namespace {

constexpr std::int64_t kProducts = 4;  // of one turn
alignas(64) std::uint16_t operands[6][512];

struct alignas(64) Config {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The library asks Linux for the tile state when it looks at the machine.
bool has_amx() {
  static const bool usable = [] {
    const auto backend = latte::Backend::open({.threads = 1});
    if (!backend.ok()) return false;
    for (const latte::KernelInfo& kernel : backend->info().kernels)
      if (std::string_view(kernel.name) == "amx") return kernel.usable;
    return false;
  }();
  return usable;
}

template <class Turn>
__attribute__((target("amx-tile,amx-bf16"))) void measure(benchmark::State& state, const Turn& turn) {
  if (!has_amx()) {
    state.SkipWithError("no AMX here");
    return;
  }
  const Config config;
  // GCC 12's intrinsic names only 8 of the 64 bytes it reads.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  for (auto _ : state) turn();
  _tile_release();
  state.counters["ns_per_product"] =
      benchmark::Counter(static_cast<double>(kProducts * state.iterations()) * 1e-9,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert | benchmark::Counter::kAvgThreads);
}

void products_alone(benchmark::State& state) {
  measure(
      state, []() __attribute__((target("amx-tile,amx-bf16"))) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      });
}

void two_by_two_in_eight_tiles(benchmark::State& state) {
  measure(
      state, []() __attribute__((target("amx-tile,amx-bf16"))) {
        _tile_loadd(4, operands[0], 64);
        _tile_loadd(5, operands[1], 64);
        _tile_loadd(6, operands[2], 64);
        _tile_loadd(7, operands[3], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      });
}

void two_by_two_in_seven_tiles(benchmark::State& state) {
  measure(
      state, []() __attribute__((target("amx-tile,amx-bf16"))) {
        _tile_loadd(4, operands[0], 64);
        _tile_loadd(5, operands[1], 64);
        _tile_loadd(6, operands[2], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, operands[3], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
      });
}

void two_by_one_in_four_tiles(benchmark::State& state) {
  measure(
      state, []() __attribute__((target("amx-tile,amx-bf16"))) {
        for (int step = 0; step < 2; ++step) {
          _tile_loadd(6, operands[0], 64);
          _tile_loadd(4, operands[1], 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(4, operands[2], 64);
          _tile_dpbf16ps(1, 4, 6);
        }
      });
}

const int kAll = static_cast<int>(std::thread::hardware_concurrency());

BENCHMARK(products_alone)->Threads(1)->Threads(kAll)->UseRealTime();
BENCHMARK(two_by_two_in_eight_tiles)->Threads(1)->Threads(kAll)->UseRealTime();
BENCHMARK(two_by_two_in_seven_tiles)->Threads(1)->Threads(kAll)->UseRealTime();
BENCHMARK(two_by_one_in_four_tiles)->Threads(1)->Threads(kAll)->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
