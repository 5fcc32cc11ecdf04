#include <cstdio>
#include <exception>
#include <new>

#include <fmt/format.h>

#include "cli/commands.hpp"
#include "cli/commit.hpp"
#include "cli/options.hpp"
#include "cli/text.hpp"
#include "latte/latte.hpp"

namespace latte::cli {
namespace {

constexpr const char* kDescription =
    "latte: multi-head latent attention (MLA) with planned, persistent workers.\n"
    "\n"
    "  latte info                                what this machine runs, and why\n"
    "  latte check --quick                       is it right?\n"
    "  latte bench --spec 16q1s4k_4q4s1k         how fast is it?\n"
    "  latte plan --spec 1q1s64k_63q1s2k --workers 132 --svg plan.svg\n"
    "  latte run case.safetensors                replay a captured call";

constexpr const char* kFooter =
    "A batch spec is <n>q<query>[k]s<kv>[k], joined by '_': 16q1s4k_4q4s1k = 16 requests with 1 query token\n"
    "over 4096 KV tokens and 4 with 4 over 1024. No <n>: one request. No s: KV = query. k = x 1024.\n"
    "Exit codes: 0 ok; 1 a check failed; 2 bad usage or input.\n"
    "`latte COMMAND --help` tells more; so does latte(1).";

int parse_and_run(int argc, const char* const* argv) {
  CLI::App app(kDescription, "latte");
  app.footer(kFooter);
  app.set_version_flag("--version", fmt::format("latte {} ({})", version(), kCommit));
  app.require_subcommand(1);
  Action action;
  add_info(app, action);
  add_check(app, action);
  add_bench(app, action);
  add_plan(app, action);
  add_run(app, action);
  add_capture(app, action);
  for (CLI::App* command : app.get_subcommands({}))
    for (CLI::Option* option : command->get_options())
      if (const std::string type = option->get_type_name(); type == "INT" || type == "UINT")
        option->check(decimal(type == "INT"));
  // CLI11 would only say that a subcommand is missing.
  const auto is_first_word = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_first_word).empty())
    return fail(fmt::format("there is no command '{}' (see latte --help)", argv[1]));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return fail(fmt::format("{} (see latte --help)", error.what()));
  }
  return action();
}

}  // namespace

int fail(const std::string& message) {
  std::fflush(stdout);
  say(fmt::format("latte: {}\n", message));
  return kExitBadInput;
}

int fail(const Status& status) { return fail(status.message()); }

int run_program(int argc, const char* const* argv) {
  int code = kExitBadInput;
  try {
    code = parse_and_run(argc, argv);
  } catch (const std::bad_alloc&) {
    return fail("not enough memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return fail("cannot write to standard output");
  return code;
}

}  // namespace latte::cli
