#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "cli/bench.hpp"
#include "cli/spec_case.hpp"
#include "latte/decode.hpp"
#include "testkit/batch.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPlanSamples = 101;
constexpr int kMinSamples = 7, kMaxSamples = 20'000;

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double kv_bytes(const testkit::DecodeCase& description) {
  return static_cast<double>(description.kv_tokens()) *
         static_cast<double>(kv_token_elements(description.kv_format, description.latent, description.rope)) *
         static_cast<double>(dtype_bytes(kv_element_dtype(description.kv_format)));
}

double quantile(std::span<const double> sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// Copies of the case in memory of their own, so that a round over them touches the whole working set.
Result<std::vector<testkit::DecodeBatch>> make_batches(const testkit::DecodeCase& description,
                                                       std::int64_t working_set) {
  const Result<std::int32_t> copies = working_set_copies(description, working_set);
  if (!copies) return copies.status();
  if (Status status = check_memory(*copies * description.bytes()); !status.ok()) return status;
  std::vector<testkit::DecodeBatch> batches;
  testkit::DecodeCase copy = description;
  for (std::int32_t i = 0; i < *copies; ++i) {
    copy.seed = description.seed + static_cast<std::uint64_t>(i);
    batches.emplace_back(copy, testkit::Fill::fast);
  }
  return batches;
}

}  // namespace

Result<std::int32_t> working_set_copies(const testkit::DecodeCase& description, std::int64_t working_set_bytes) {
  const double one = std::max(kv_bytes(description), 1.0);
  const double copies = std::max(1.0, std::ceil(static_cast<double>(working_set_bytes) / one));
  if (copies > 65536)
    return Status(Code::out_of_limits, "--working-set", "at most 65536 times the batch's KV bytes",
                  fmt::format("{:.0f} times", copies));
  return static_cast<std::int32_t>(copies);
}

Timing summarize(std::span<double> samples_us) {
  if (samples_us.empty()) return {};
  std::sort(samples_us.begin(), samples_us.end());
  return {.median_us = quantile(samples_us, 0.5), .spread_us = quantile(samples_us, 0.75) - quantile(samples_us, 0.25)};
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
  Result<MetadataBuilder> builder =
      MetadataBuilder::create(backend, description.problem(), description.limits(), {.policy = settings.policy});
  if (!builder) return builder.status();
  const Result<std::vector<testkit::DecodeBatch>> batches = make_batches(description, settings.working_set_bytes);
  if (!batches) return batches.status();
  const StepLengths lengths = batches->front().lengths();

  std::vector<double> samples;
  for (int i = 0; i < kPlanSamples; ++i) {
    const Clock::time_point start = Clock::now();
    if (const auto built = builder->build(0, lengths); !built) return built.status();
    samples.push_back(since_us(start));
  }
  BenchRow row{.spec = spec.text,
               .kernel = builder->kernel(),
               .description = description,
               .policy = settings.policy,
               .time = {},
               .plan = summarize(samples),
               .plan_host = {},
               .working_set_bytes = settings.working_set_bytes,
               .bytes = description.bytes(),
               .flops = visible_flops(description)};

  const Result<DecodeMetadata> metadata = builder->build(0, lengths);
  if (!metadata) return metadata.status();
  std::vector<DecodeArgs> args;
  for (const testkit::DecodeBatch& batch : *batches) args.push_back(batch.args());
  // One round to warm caches, page tables and clocks, and to report errors before anything is timed.
  for (const DecodeArgs& call : args)
    if (const Status status = decode(*metadata, call); !status.ok()) return status;

  samples.clear();
  const auto wanted = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMaxSamples);
  const auto least = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMinSamples);
  const Clock::time_point begin = Clock::now();
  while (samples.size() < wanted && (samples.size() < least || since_us(begin) < settings.min_seconds * 1e6)) {
    const DecodeArgs& call = args[samples.size() % args.size()];
    const Clock::time_point start = Clock::now();
    const Status status = decode(*metadata, call);
    samples.push_back(since_us(start));
    if (!status.ok()) return status;
  }
  row.time = summarize(samples);
  return row;
}

}  // namespace latte::cli
