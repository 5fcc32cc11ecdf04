// Which backend a command runs on. Apart from the other options, as parsers are fuzzed without any backend.
#include <fmt/format.h>

#include "cli/options.hpp"
#include "cli/text.hpp"

namespace latte::cli {

void BackendChoice::add_to(CLI::App& command) {
  command.add_option("--backend", name, kBackendHelp)->capture_default_str();
  command.add_option("--device", device, "Which GPU, as the driver numbers them")->capture_default_str();
  command.add_option("--kernel", kernel, "auto, or a kernel that `latte info` lists")->capture_default_str();
  command.add_option("--threads", threads, "Worker threads; 0 = all this process may use")->capture_default_str();
}

Result<Backend> BackendChoice::open(bool tell) const {
  Result<Backend> backend = Backend::open(
      {.name = name, .threads = threads, .kernel = kernel, .device = device, .serial_launches = serial_launches});
  if (!backend || !tell) return backend;
  const MachineInfo info = backend->info();
  if (!info.note.empty()) say(fmt::format("latte: {}, as {}\n", info.backend, info.note));
  return backend;
}

}  // namespace latte::cli
