// Progress on stderr: a line that is rewritten on a terminal, a handful of plain lines elsewhere.
#pragma once

#include <string>
#include <unistd.h>

#include <fmt/format.h>

#include "cli/text.hpp"

namespace latte::cli {

class Progress {
 public:
  Progress(std::string what, std::size_t total) : what_(std::move(what)), total_(total), terminal_(isatty(2) == 1) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Item `done` of `total` begins.
  void step(std::size_t done, const std::string& item) {
    if (terminal_) {
      say(fmt::format("\r\x1b[K{} {}/{} {}", what_, done + 1, total_, item.substr(0, kItemChars)));
    } else if (total_ <= kQuarters || done * kQuarters / total_ != last_quarter_) {
      last_quarter_ = done * kQuarters / total_;
      say(fmt::format("{} {}/{}\n", what_, done + 1, total_));
    }
  }
  void clear() {
    if (terminal_) say("\r\x1b[K");
  }

 private:
  static constexpr std::size_t kQuarters = 4, kItemChars = 60;
  std::string what_;
  std::size_t total_;
  bool terminal_;
  std::size_t last_quarter_ = kQuarters;
};

}  // namespace latte::cli
