// What this program was built from and with.
#pragma once

#include <string>

#include "cli/commit.hpp"

namespace latte::cli {

inline std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#else
  return "an unknown compiler";
#endif
}

}  // namespace latte::cli
