#include "cpu/features.hpp"

#include <fstream>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace latte::cpu {
namespace {

std::string name_from_proc() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown processor";
}

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

unsigned long long enabled_state() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

// Linux hands out the 8 KiB of tile registers only to processes that ask.
bool request_tile_state() {
  constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

Features detect() {
  const auto bit = [](unsigned value, int index) { return ((value >> index) & 1u) != 0; };
  Features f;
  f.name = name_from_proc();
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  if (!bit(basic.c, 27)) return f;  // no XSAVE in use: no vector state beyond SSE
  const unsigned long long state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
  f.avx2 = ymm && bit(extended.b, 5) && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 8);
  f.avx512 = f.avx2 && zmm && bit(extended.b, 16) && bit(extended.b, 17) && bit(extended.b, 30) && bit(extended.b, 31);
  f.avx512_bf16 = f.avx512 && bit(more.a, 5);
  f.avx512_vbmi = f.avx512 && bit(extended.c, 1);
  f.amx_bf16 = bit(extended.d, 22) && bit(extended.d, 24);
  f.amx_permitted = f.amx_bf16 && f.avx512_bf16 && tiles && request_tile_state();
  return f;
}

#else

Features detect() {
  Features f;
  f.name = name_from_proc();
  return f;
}

#endif

}  // namespace

const Features& features() {
  static const Features detected = detect();
  return detected;
}

std::string to_string(const Features& f) {
  std::string text;
  const auto add = [&](bool present, const char* name) {
    if (!present) return;
    if (!text.empty()) text += ' ';
    text += name;
  };
  add(f.avx2, "avx2");
  add(f.avx512, "avx512");
  add(f.avx512_bf16, "avx512_bf16");
  add(f.avx512_vbmi, "avx512_vbmi");
  add(f.amx_bf16, f.amx_permitted ? "amx_bf16" : "amx_bf16(not permitted)");
  return text.empty() ? "none of the vector extensions latte knows" : text;
}

}  // namespace latte::cpu
