// A prefill batch in a device's memory: copied from a PrefillBatch, or made there.
#pragma once

#include <cstdint>
#include <vector>

#include "latte/device.hpp"
#include "latte/prefill.hpp"
#include "testkit/device_copy.hpp"
#include "testkit/prefill_batch.hpp"

namespace latte::testkit {

class DevicePrefill {
 public:
  // Every tensor and table of the batch with its poison and its guard bands.
  static Result<DevicePrefill> upload(const Backend& backend, const PrefillBatch& batch);
  // Dense random tensors for benchmarks, scales by value, no context.
  static Result<DevicePrefill> random(const Backend& backend, const PrefillCase& description);

  // With device addresses; stream and hook are left to the caller.
  const PrefillArgs& args() const { return args_; }

  // Another batch of the same layouts and lengths at the same addresses, for graphs.
  Status upload_inputs(const PrefillBatch& batch) const;
  // The outputs' memory, guard bands included, to and from the batch this one was copied from.
  Status upload_outputs(const PrefillBatch& batch) const;
  Status download_outputs(PrefillBatch& batch) const;

 private:
  explicit DevicePrefill(const Backend& backend) : backend_(backend), copies_(backend) {}

  Backend backend_;
  DeviceCopies copies_;
  std::vector<std::byte*> inputs_, outputs_;  // in the order of input_memory() and output_memory()
  PrefillArgs args_;
};

}  // namespace latte::testkit
