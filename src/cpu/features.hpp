// What the processor has and the operating system lets us use.
#pragma once

#include <string>

namespace latte::cpu {

struct Features {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;    // look-up of bytes
  bool amx_bf16 = false;       // the processor has it
  bool amx_permitted = false;  // and Linux granted the tile state to this process
  std::string name;            // "AMD EPYC ..."
};

// Detected once. Asks Linux for the AMX tile state where the processor has it.
const Features& features();
std::string to_string(const Features& features);

}  // namespace latte::cpu
