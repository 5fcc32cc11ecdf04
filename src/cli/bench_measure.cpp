#include <algorithm>
#include <chrono>
#include <cmath>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "cli/bench.hpp"
#include "cli/spec_case.hpp"
#include "latte/latte.hpp"
#include "testkit/batch.hpp"
#include "testkit/oracle.hpp"
#include "testkit/prefill_batch.hpp"

namespace latte::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPlanSamples = 101;
constexpr int kMinSamples = 7, kMaxSamples = 20'000;

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double quantile(std::span<const double> sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// Copies of the case in memory of their own, so that a round over them touches the whole working set.
template <class Batch, class Case>
Result<std::vector<Batch>> make_batches(const Backend& backend, const Case& description, std::int64_t working_set) {
  const Result<std::int32_t> copies = copies_that_fit(backend, description, working_set);
  if (!copies) return copies.status();
  std::vector<Batch> batches;
  Case copy = description;
  for (std::int32_t i = 0; i < *copies; ++i) {
    copy.seed = description.seed + static_cast<std::uint64_t>(i);
    batches.emplace_back(copy, testkit::Fill::fast);
  }
  return batches;
}

template <class Build>
Result<Timing> time_plan(Build build) {
  std::vector<double> samples;
  for (int i = 0; i < kPlanSamples; ++i) {
    const Clock::time_point start = Clock::now();
    if (const auto built = build(); !built) return built.status();
    samples.push_back(since_us(start));
  }
  return summarize(samples);
}

// `call(i)` runs on copy i of `copies`.
template <class Call>
Result<Timing> time_calls(const BenchSettings& settings, std::size_t copies, Call call) {
  // One round to warm caches, page tables and clocks, and to report errors before anything is timed.
  for (std::size_t i = 0; i < copies; ++i)
    if (const Status status = call(i); !status.ok()) return status;
  std::vector<double> samples;
  const auto wanted = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMaxSamples);
  const auto least = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMinSamples);
  const Clock::time_point begin = Clock::now();
  while (samples.size() < wanted && (samples.size() < least || since_us(begin) < settings.min_seconds * 1e6)) {
    const std::size_t copy = samples.size() % copies;
    const Clock::time_point start = Clock::now();
    const Status status = call(copy);
    samples.push_back(since_us(start));
    if (!status.ok()) return status;
  }
  return summarize(samples);
}

// Both ops: build a plan many times, then run it many times.
template <class Builder, class Batch, class Case, class Run>
Result<BenchRow> measure_with(const Backend& backend, const BatchSpec& spec, const Case& description,
                              const BenchSettings& settings, Run run) {
  Result<Builder> builder = Builder::create(backend, description.problem(), description.limits(settings.workers),
                                            {.policy = settings.policy});
  if (!builder) return builder.status();
  const Result<std::vector<Batch>> batches = make_batches<Batch>(backend, description, settings.working_set_bytes);
  if (!batches) return batches.status();
  const auto build = [&] { return builder->build(0, batches->front().lengths()); };
  const Result<Timing> plan = time_plan(build);
  if (!plan) return plan.status();
  const auto metadata = build();
  if (!metadata) return metadata.status();
  const Result<Timing> time =
      time_calls(settings, batches->size(), [&](std::size_t i) { return run(*metadata, (*batches)[i].args()); });
  if (!time) return time.status();
  BenchRow row = make_row(spec, description, settings);
  row.kernel = builder->kernel();
  row.policy = builder->plan_config().policy;
  row.time = *time;
  row.plan = *plan;
  if constexpr (std::is_same_v<Builder, PrefillBuilder>) row.math = prefill_math_name(builder->math());
  return row;
}

}  // namespace

double rotating_bytes(const testkit::DecodeCase& description) {
  return static_cast<double>(description.kv_tokens()) * description.kv_token_bytes();
}

double rotating_bytes(const testkit::PrefillCase& description) { return description.bytes(); }

Result<std::int32_t> working_set_copies(double bytes, std::int64_t working_set_bytes) {
  const double copies = std::max(1.0, std::ceil(static_cast<double>(working_set_bytes) / std::max(bytes, 1.0)));
  if (copies > 65536)
    return Status(Code::out_of_limits, "--working-set", "at most 65536 times the batch's bytes",
                  fmt::format("{:.0f} times", copies));
  return static_cast<std::int32_t>(copies);
}

namespace {

template <class Case>
Result<std::int32_t> find_copies_that_fit(const Backend& backend, const Case& description, std::int64_t working_set) {
  const Result<std::int32_t> copies = working_set_copies(rotating_bytes(description), working_set);
  if (!copies) return copies.status();
  const double bytes = *copies * memory_bytes(description);
  if (!backend.on_device()) {
    if (Status status = check_memory(bytes); !status.ok()) return status;
    return *copies;
  }
  const Result<std::size_t> free = free_memory(backend);
  if (!free) return free.status();
  if (bytes > 0.9 * static_cast<double>(*free))
    return Status(Code::out_of_memory, "device memory", fmt::format("{:.1f} GiB for the tensors", bytes / (1 << 30)),
                  fmt::format("{:.1f} GiB free", static_cast<double>(*free) / (1 << 30)));
  return *copies;
}

}  // namespace

Result<std::int32_t> copies_that_fit(const Backend& backend, const testkit::DecodeCase& description,
                                     std::int64_t working_set_bytes) {
  return find_copies_that_fit(backend, description, working_set_bytes);
}
Result<std::int32_t> copies_that_fit(const Backend& backend, const testkit::PrefillCase& description,
                                     std::int64_t working_set_bytes) {
  return find_copies_that_fit(backend, description, working_set_bytes);
}

BenchRow make_row(const BatchSpec& spec, const testkit::DecodeCase& description, const BenchSettings& settings) {
  BenchRow row;
  row.spec = spec.text;
  row.heads = description.heads;
  row.page = description.page_size;
  row.kv = kv_format_name(description.kv_format);
  row.q = dtype_name(description.q_dtype);
  row.mask = mask_name(description.mask);
  row.widths[0] = description.latent, row.widths[1] = description.rope;
  row.workers = settings.workers;
  row.working_set_bytes = settings.working_set_bytes;
  row.bytes = description.bytes();
  row.flops = visible_flops(description);
  return row;
}

BenchRow make_row(const BatchSpec& spec, const testkit::PrefillCase& description, const BenchSettings& settings) {
  BenchRow row;
  row.op = Op::prefill;
  row.spec = spec.text;
  row.heads = description.heads;
  row.kv = dtype_name(description.dtype);
  row.mask = mask_name(description.mask);
  row.widths[0] = description.qk_width, row.widths[1] = description.v_width;
  row.workers = settings.workers;
  row.working_set_bytes = settings.working_set_bytes;
  row.bytes = description.bytes();
  row.flops = description.flops();
  return row;
}

Timing summarize(std::span<double> samples_us) {
  if (samples_us.empty()) return {};
  std::sort(samples_us.begin(), samples_us.end());
  return {.median_us = quantile(samples_us, 0.5),
          .spread_us = quantile(samples_us, 0.75) - quantile(samples_us, 0.25),
          .samples = static_cast<std::int64_t>(samples_us.size())};
}

double BenchRow::floor_us(const Ceilings& ceilings) const {
  const double arithmetic = ceilings.tflops > 0 ? flops / ceilings.tflops / 1e6 : 0;
  const double reading = ceilings.read_gbps > 0 ? bytes / ceilings.read_gbps / 1e3 : 0;
  return std::max(arithmetic, reading);
}

double visible_flops(const testkit::DecodeCase& description) {
  double pairs = 0;
  for (const testkit::RequestLengths& request : description.requests)
    for (std::int32_t j = 0; j < request.query_tokens; ++j)
      pairs += testkit::visible_tokens(description.mask, request.kv_tokens, request.query_tokens, j);
  return 2.0 * description.heads * pairs * (2.0 * description.latent + description.rope);
}

Result<BenchRow> measure(const Backend& backend, const BatchSpec& spec, const testkit::DecodeCase& description,
                         const BenchSettings& settings) {
  return measure_with<MetadataBuilder, testkit::DecodeBatch>(backend, spec, description, settings, decode);
}

Result<BenchRow> measure(const Backend& backend, const BatchSpec& spec, const testkit::PrefillCase& description,
                         const BenchSettings& settings) {
  return measure_with<PrefillBuilder, testkit::PrefillBatch>(backend, spec, description, settings, prefill);
}

}  // namespace latte::cli
