// The program's commands. Each adds its subcommand and options to the app; parsing then sets `action`, which runs it
// and returns the exit code.
#pragma once

#include <functional>
#include <string>

#include <CLI/CLI.hpp>

#include "latte/status.hpp"

namespace latte::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;  // a result is not what it should be
inline constexpr int kExitBadInput = 2;     // usage, a file, or something this machine cannot do

using Action = std::function<int()>;

void add_info(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_capture(CLI::App& app, Action& action);

// Prints "latte: <message>" on stderr and gives kExitBadInput.
int fail(const std::string& message);
int fail(const Status& status);

// The whole program, for main() and for tests.
int run_program(int argc, const char* const* argv);

}  // namespace latte::cli
