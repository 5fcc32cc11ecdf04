// What a benchmark measures, apart from how it is asked for and printed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/batch_spec.hpp"
#include "latte/backend.hpp"
#include "testkit/case.hpp"
#include "testkit/prefill_case.hpp"

namespace latte::cli {

struct Timing {
  double median_us = 0;
  double spread_us = 0;  // interquartile range
  std::int64_t samples = 0;
};
// Sorts the samples.
Timing summarize(std::span<double> samples_us);

struct BenchSettings {
  Policy policy;
  std::int64_t working_set_bytes = 0;  // bytes of KV (prefill: of all inputs) to read before any is read again
  std::int32_t workers = 0;            // Limits::workers
  std::int32_t repeats = 0;            // exactly so many; 0 = by time
  double min_seconds = 0.5;
  bool overlap = false;  // device: DecodeArgs::overlap_previous
};

// One measured case. Rates and floor follow from it and the ceilings.
struct BenchRow {
  Op op = Op::decode;
  std::string spec;  // as it was typed
  std::string kernel;
  std::int32_t heads = 0;
  std::int32_t page = 0;  // prefill: 0
  std::string kv;         // cache format; prefill: dtype of q, k and v
  std::string q;          // decode: dtype of q
  std::string mask;
  std::int32_t widths[2]{};  // decode: latent and rope; prefill: of q and k, and of v
  std::string math;          // prefill: half or fp8
  Policy policy;             // as planned
  std::int32_t workers = 0;  // Limits::workers: 0 = all
  Timing time, plan;
  // Device: planning on the host and queueing the upload, while `plan` is the kernel's time. Prefill has only this.
  Timing plan_host;
  bool on_device = false;
  std::int64_t working_set_bytes = 0;
  double bytes = 0;
  double flops = 0;

  double gbps() const { return bytes / time.median_us / 1e3; }
  double tflops() const { return flops / time.median_us / 1e6; }
  // No machine with these ceilings is faster: all bytes read once, all arithmetic done.
  double floor_us(const Ceilings& ceilings) const;
  double over_floor(const Ceilings& ceilings) const { return time.median_us / floor_us(ceilings); }
};

// Multiplications and additions of the (query, KV) pairs that the mask lets through.
double visible_flops(const testkit::DecodeCase& description);

Result<BenchRow> measure(const Backend& backend, const BatchSpec& spec, const testkit::DecodeCase& description,
                         const BenchSettings& settings);
// The same on a device: many calls in one captured graph, so that the host's part is not in the times.
Result<BenchRow> measure_on_device(const Backend& backend, const BatchSpec& spec,
                                   const testkit::DecodeCase& description, const BenchSettings& settings);

// Prefill, the same way.
Result<BenchRow> measure(const Backend& backend, const BatchSpec& spec, const testkit::PrefillCase& description,
                         const BenchSettings& settings);
Result<BenchRow> measure_on_device(const Backend& backend, const BatchSpec& spec,
                                   const testkit::PrefillCase& description, const BenchSettings& settings);

// How many copies of the case make up the working set, if the backend has memory for them.
Result<std::int32_t> copies_that_fit(const Backend& backend, const testkit::DecodeCase& description,
                                     std::int64_t working_set_bytes);
Result<std::int32_t> copies_that_fit(const Backend& backend, const testkit::PrefillCase& description,
                                     std::int64_t working_set_bytes);

// How often `bytes` make up a working set: reading so many copies in turn defeats the caches.
Result<std::int32_t> working_set_copies(double bytes, std::int64_t working_set_bytes);
// What --working-set counts.
double rotating_bytes(const testkit::DecodeCase& description);
double rotating_bytes(const testkit::PrefillCase& description);

// What is known of a row before it is measured.
BenchRow make_row(const BatchSpec& spec, const testkit::DecodeCase& description, const BenchSettings& settings);
BenchRow make_row(const BatchSpec& spec, const testkit::PrefillCase& description, const BenchSettings& settings);

}  // namespace latte::cli
