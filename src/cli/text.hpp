// What people are told, apart from results.
#pragma once

#include <string>
#include <string_view>

#include "latte/status.hpp"

namespace latte::cli {

// To standard error. That nobody can read it there is no reason to stop.
void say(const std::string& text);

// A text that comes from outside, as one part of a line: in quotes, shortened, without control characters.
std::string shown(std::string_view text);

// A file that could not be read or written, by errno.
Status io_error(const std::string& path, const char* expected);

}  // namespace latte::cli
