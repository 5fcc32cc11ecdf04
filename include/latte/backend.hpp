// A backend: the machine that runs the kernels. Opening one starts its resident workers; everything else is passed in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte {

struct BackendOptions {
  std::string_view name = "cpu";
  std::int32_t threads = 0;          // 0 = what the affinity mask and the cgroup allow
  std::string_view kernel = "auto";  // or the name of one: amx, avx512_bf16, avx512, avx2, scalar, ...
};

// One kernel of a backend and whether this machine can run it.
struct KernelInfo {
  std::string name;
  bool usable = false;
  std::string reason;  // why not, or what it needs
  std::string serves;  // "bf16, fp8"
};

struct MachineInfo {
  std::string backend;
  std::string cpu;
  std::int32_t threads = 0;
  std::string features;
  std::vector<KernelInfo> kernels;  // best first
};

// The answer of supports(): whether, by which kernel, and if not, why not.
struct Support {
  bool ok = false;
  std::string kernel;
  std::string reason;
};

// What this machine can do at best, measured now, on the same threads that run decode.
struct Ceilings {
  double read_gbps = 0;  // streaming reads from memory
  double tflops = 0;     // the arithmetic the kernel in question uses (AMX bf16, AVX-512 bf16 dot, fp32 FMA, ...)
};

namespace backend {
class Impl;
}

class Backend {
 public:
  static Result<Backend> open(const BackendOptions& options = {});
  Backend(const Backend&) = default;  // a handle: copies share the workers, and moving is copying
  Backend& operator=(const Backend&) = default;

  MachineInfo info() const;
  std::int32_t workers() const;
  Support supports(const DecodeProblem& problem) const;
  // How a problem would be planned here: the kernel's tile sizes and the cost constants of this machine.
  Result<PlanConfig> plan_config(const DecodeProblem& problem, const Limits& limits, const Policy& policy = {}) const;
  // Runs for about a second. `kernel` is a name from info().
  Result<Ceilings> measure_ceilings(std::string_view kernel) const;

  backend::Impl& impl() const { return *impl_; }

 private:
  explicit Backend(std::shared_ptr<backend::Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<backend::Impl> impl_;
};

// One row of the support table: what a backend takes, generated from the code that decides it.
struct SupportRow {
  std::string feature;
  std::string cpu;
  std::string cuda;
};
std::vector<SupportRow> support_table();

}  // namespace latte
