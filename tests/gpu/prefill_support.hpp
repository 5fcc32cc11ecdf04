// What the GPU's prefill tests share: a prefill step that runs there.
#pragma once

#include <memory>
#include <vector>

#include "testkit/context_expander.hpp"
#include "testkit/device_prefill.hpp"
#include "testkit/run_prefill.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {

// bf16 unless told otherwise, with strides a device takes.
PrefillCase gpu_prefill(std::vector<PrefillRequest> requests, std::int32_t heads);

// Runs the case and expects it to agree with the oracle; returns what ran.
PrefillMath expect_agreement(const Backend& backend, const PrefillCase& description, const BuilderOptions& options = {},
                             const Limits* limits = nullptr);

// A batch on the device beside its host copy and its truth, and a builder for it.
struct DevicePrefillStep {
  PreparedPrefill prepared;
  DevicePrefill device;
  PrefillBuilder builder;

  static std::unique_ptr<DevicePrefillStep> make(const Backend& backend, const PrefillCase& description,
                                                 const BuilderOptions& options = {});
  static std::unique_ptr<DevicePrefillStep> make(const Backend& backend, PrefillBatch batch,
                                                 const BuilderOptions& options, const Limits& limits);

  PrefillBatch& batch() { return prepared.batch; }
  PrefillArgs args(Stream stream) const;
  // Makes the outputs NaN, here and there.
  Status poison();
  // Poisons the outputs, builds, runs prefill once and brings the outputs back. Not for batches with context.
  Status run(const Backend& backend, Stream stream);
  // Brings the outputs back and compares them.
  Comparison compared();
};

}  // namespace latte::testkit
