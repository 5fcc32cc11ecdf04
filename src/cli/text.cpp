#include "cli/text.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace latte::cli {

void say(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

std::string shown(std::string_view text) {
  std::string result = "'";
  for (char c : text.substr(0, 60)) result += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return result + (text.size() > 60 ? "...'" : "'");
}

Status io_error(const std::string& path, const char* expected) {
  return {Code::invalid_argument, "file " + path, expected,
          errno != 0 ? std::strerror(errno) : "an input/output error"};
}

}  // namespace latte::cli
