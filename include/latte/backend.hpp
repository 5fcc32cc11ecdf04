// A backend: the machine that runs the kernels. Opening one starts its resident workers or takes hold of a device;
// everything else is passed in.
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
  // cpu, cuda, or auto: cuda where it can be opened with these options, else cpu, with the reason in MachineInfo::note.
  // With auto `threads` and `device` count for the backend that has them, and naming a kernel asks for cpu.
  std::string_view name = "cpu";
  std::int32_t threads = 0;          // cpu: 0 = what the affinity mask and the cgroup allow
  std::string_view kernel = "auto";  // cpu: or the name of one: amx, avx512_bf16, avx512, avx2, scalar, ...
  std::int32_t device = 0;           // cuda: which GPU, as the driver numbers them
  // cuda: launch everything in ordinary stream order; overlap_previous then has no effect. For engines whose kernels do
  // not wait as decode() requires.
  bool serial_launches = false;
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
  std::string processor;     // the name of what computes: the CPU, or the GPU
  std::int32_t threads = 0;  // cpu: worker threads; cuda: multiprocessors
  std::string features;
  std::vector<KernelInfo> kernels;  // cpu: best first; cuda: those for the smallest tiles first
  std::string device{};             // the GPU's name; empty on cpu
  std::string driver{};             // "driver 580.65.06, CUDA 13.0"; empty on cpu
  std::string note{};               // of a backend opened as auto: why it is not cuda; else empty
};

// The answer of supports(): whether, by which kernel, and if not, why not.
struct Support {
  bool ok = false;
  std::string kernel;
  std::string reason;
};

// What this machine can do at best, measured now, on the same threads or multiprocessors that run decode.
struct Ceilings {
  double read_gbps = 0;  // streaming reads from memory
  double tflops = 0;     // the arithmetic the kernel in question uses (AMX bf16, AVX-512 bf16 dot, tensor cores, ...)
  double clock_mhz = 0;  // of a device while it did that arithmetic; 0 = not measured
};

// Which kernel serves a problem under given limits, why that one, and how its steps are planned.
struct KernelChoice {
  std::string kernel;
  std::string reason;
  PlanConfig plan;
};

// The same for prefill, with the arithmetic that will run (never automatic).
struct PrefillChoice {
  std::string kernel;
  std::string reason;
  PrefillMath math = PrefillMath::half;
  PlanConfig plan;
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
  // Whether tensors, page tables and slot mappings have to lie in a device's memory (latte/device.hpp helps).
  bool on_device() const;
  Support supports(const DecodeProblem& problem) const;
  // How a problem would be run here: the kernel, the reasons for it, and how its steps are planned.
  Result<KernelChoice> choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy = {}) const;
  Support supports(const PrefillProblem& problem) const;
  Result<PrefillChoice> choose(const PrefillProblem& problem, const Limits& limits, const Policy& policy = {}) const;
  // Runs for about a second. `kernel` is a name from info().
  Result<Ceilings> measure_ceilings(std::string_view kernel) const;
  // Waits until everything queued in the stream is done, and tells what went wrong on the device since it was last
  // asked: faults, and what the validation kernels of this backend's builders found. Nothing to wait for on cpu.
  Status synchronize(Stream stream = nullptr) const;

  backend::Impl& impl() const { return *impl_; }

 private:
  explicit Backend(std::shared_ptr<backend::Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<backend::Impl> impl_;
};

// What a machine that is not at hand would choose: for looking at plans, and for sizing buffers, without the device.
struct PlanTarget {
  std::string_view backend{};  // a name that Backend::open takes, except auto
  std::int32_t workers = 0;    // >= 1: threads, multiprocessors
};
Result<KernelChoice> choose_for(const PlanTarget& target, const DecodeProblem& problem, const Limits& limits,
                                const Policy& policy = {});
Result<PrefillChoice> choose_for(const PlanTarget& target, const PrefillProblem& problem, const Limits& limits,
                                 const Policy& policy = {});

// What each backend takes, generated from the code that decides it.
struct SupportRow {
  std::string feature;
  std::vector<std::string> answers;  // in the order of SupportTable::backends
};
struct SupportTable {
  std::vector<std::string> backends;  // as Backend::open names them
  std::vector<SupportRow> rows;
};
SupportTable support_table();

}  // namespace latte
