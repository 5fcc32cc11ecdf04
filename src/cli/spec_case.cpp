#include "cli/spec_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <unistd.h>

#include <fmt/format.h>

namespace latte::cli {
namespace {

// What Linux says can be had without swapping; all memory when it does not say.
double available_bytes() {
  double kib = 0;
  if (std::FILE* file = std::fopen("/proc/meminfo", "r")) {
    char line[128];
    while (kib == 0 && std::fgets(line, sizeof line, file) != nullptr)
      if (std::sscanf(line, "MemAvailable: %lf kB", &kib) != 1) kib = 0;
    std::fclose(file);
  }
  if (kib > 0) return kib * 1024;
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace

testkit::DecodeCase make_case(const BatchSpec& spec, const Shape& shape) {
  const DecodeProblem& problem = shape.problem;
  testkit::DecodeCase result{.heads = problem.heads,
                             .latent = problem.latent,
                             .rope = problem.rope,
                             .page_size = problem.page_size,
                             .kv_format = problem.kv_format,
                             .q_dtype = problem.q_dtype,
                             .out_dtype = problem.out_dtype,
                             .mask = problem.mask,
                             .scale = shape.scale};
  for (const RequestGroup& group : spec.groups)
    result.requests.insert(result.requests.end(), static_cast<std::size_t>(group.count),
                           {.query_tokens = group.query_tokens, .kv_tokens = group.kv_tokens});
  return result;
}

testkit::PrefillCase make_case(const BatchSpec& spec, const PrefillShape& shape) {
  const PrefillProblem& problem = shape.problem;
  testkit::PrefillCase result{.heads = problem.heads,
                              .qk_width = problem.qk_width,
                              .v_width = problem.v_width,
                              .dtype = problem.dtype,
                              .out_dtype = problem.out_dtype,
                              .mask = problem.mask,
                              .math = problem.math,
                              .scale = shape.scale,
                              .q_scale = 1,
                              .k_scale = 1,
                              .v_scale = 1};
  for (const RequestGroup& group : spec.groups)
    result.requests.insert(result.requests.end(), static_cast<std::size_t>(group.count),
                           {.query_tokens = group.query_tokens, .kv_tokens = group.kv_tokens});
  return result;
}

double memory_bytes(const testkit::DecodeCase& description) {
  const double page = description.page_size;
  double pages = 0;
  for (const testkit::RequestLengths& request : description.requests) pages += std::ceil(request.kv_tokens / page);
  const double unused_tokens = std::max(1.0, pages) * page - static_cast<double>(description.kv_tokens());
  return description.bytes() + unused_tokens * description.kv_token_bytes();
}

double memory_bytes(const testkit::PrefillCase& description) { return description.bytes(); }

Status check_memory(double bytes) {
  const double available = available_bytes();
  if (bytes < 0.85 * available) return {};
  return {Code::out_of_memory, "memory", fmt::format("{:.1f} GiB for the tensors", bytes / (1 << 30)),
          fmt::format("{:.1f} GiB available", available / (1 << 30))};
}

}  // namespace latte::cli
