// Resident worker threads. run() hands every worker the same task and returns when all are done; no thread is made and
// nothing is allocated per call. The calling thread is worker 0; in a child of fork, which has no other, it is all of
// them.
#pragma once

#include <cfenv>
#include <cstdint>
#include <memory>
#include <string>

namespace latte::cpu {

// Hardware threads this process may use: the affinity mask, cut by the cgroup's CPU quota (cpu/cgroup.hpp, as is root).
std::int32_t available_threads(const std::string& root = "");

// The caller may have set another rounding mode or flush-to-zero; results must depend neither on that nor on which
// worker ran a piece.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&callers_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t callers_;
};

class Workers {
 public:
  using Task = void (*)(void* context, std::int32_t worker);

  explicit Workers(std::int32_t count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  std::int32_t count() const;
  // Calls task(context, w) for w in [0, active), active <= count(). Concurrent callers take turns.
  void run(std::int32_t active, Task task, void* context);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace latte::cpu
