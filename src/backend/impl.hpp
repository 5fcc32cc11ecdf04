// What an open backend holds: the resident threads and the kernel asked for.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "cpu/cpu.hpp"
#include "latte/backend.hpp"

namespace latte::backend {

class Impl {
 public:
  Impl(std::int32_t threads, std::string kernel_name) : workers(threads), kernel(std::move(kernel_name)) {}

  cpu::Workers workers;
  std::string kernel;  // "auto" or a name
};

// The kernel that serves a valid problem on this backend, or why there is none.
Result<const cpu::Kernel*> find_kernel(const Impl& impl, const DecodeProblem& problem);

}  // namespace latte::backend
