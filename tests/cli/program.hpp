// Runs the built program and catches what it says.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/wait.h>
#include <vector>

namespace latte::cli_test {

struct ProgramRun {
  int exit_code = -1;  // 128 + signal when it was killed
  std::string out, err;
};

// A directory of this test program, removed when it ends.
inline const std::filesystem::path& scratch() {
  struct Directory {
    std::filesystem::path path;
    Directory() {
      std::string name = (std::filesystem::temp_directory_path() / "latte_cli_XXXXXX").string();
      if (mkdtemp(name.data()) != nullptr) path = name;
    }
    ~Directory() {
      std::error_code ignored;
      if (!path.empty()) std::filesystem::remove_all(path, ignored);
    }
  };
  static const Directory directory;
  return directory.path;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline ProgramRun run_latte(const std::vector<std::string>& arguments) {
  const auto quoted = [](const std::string& text) {
    std::string result = "'";
    for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
  };
  const auto out = scratch() / "stdout", err = scratch() / "stderr";
  std::string command = quoted(LATTE_PROGRAM_PATH);
  for (const std::string& argument : arguments) command += " " + quoted(argument);
  command += " >" + quoted(out.string()) + " 2>" + quoted(err.string()) + " </dev/null";
  const int status = std::system(command.c_str());
  ProgramRun run;
  run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  run.out = read_file(out);
  run.err = read_file(err);
  return run;
}

}  // namespace latte::cli_test
