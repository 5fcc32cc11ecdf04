// What is said where the system has no memory left: in processes of their own, which may have too little.
#include <cstdio>
#include <functional>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "latte/latte.hpp"

namespace latte {
namespace {

constexpr int kNoLimit = 100;

// This process may map so many bytes more.
void leave_address_space(std::size_t bytes) {
  unsigned long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) _exit(kNoLimit);
  std::fclose(file);
  const rlim_t most = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + bytes;
  const rlimit limit{most, most};
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(kNoLimit);
}

// The code that `body` gives in a process of its own.
Code code_in_child(const std::function<Code()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(static_cast<int>(body()));
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_NE(WEXITSTATUS(status), kNoLimit) << "no way to limit this process's memory";
  return static_cast<Code>(WEXITSTATUS(status));
}

// 0 GB/s would be a ceiling that everything is above.
TEST(ShortOfMemory, CeilingsAreAnErrorAndNotZero) {
  EXPECT_EQ(code_in_child([] {
              const auto backend = Backend::open({.threads = 1});
              if (!backend.ok()) return backend.status().code();
              leave_address_space(std::size_t{256} << 20);
              return backend->measure_ceilings("scalar").status().code();
            }),
            Code::out_of_memory);
}

}  // namespace
}  // namespace latte
