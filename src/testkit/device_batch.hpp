// A batch in a device's memory: copied from a DecodeBatch, or made there.
#pragma once

#include <cstdint>
#include <vector>

#include "latte/decode.hpp"
#include "latte/device.hpp"
#include "testkit/batch.hpp"
#include "testkit/case.hpp"
#include "testkit/device_copy.hpp"

namespace latte::testkit {

class DeviceBatch {
 public:
  // Every tensor and table of the batch with its poison and its guard bands, and the lengths.
  static Result<DeviceBatch> upload(const Backend& backend, const DecodeBatch& batch);
  // Dense random tensors and pages in random order, for benchmarks: the values never pass through the host.
  static Result<DeviceBatch> random(const Backend& backend, const DecodeCase& description);

  // With device addresses; the stream is left to the caller.
  const DecodeArgs& args() const { return args_; }
  const DeviceLengths& lengths() const { return lengths_; }

  // Other lengths at the same addresses, for graphs: at most as many requests and tokens as the batch had.
  Status set_lengths(const StepLengths& lengths) const;
  // The outputs' memory, guard bands included, to and from the batch this one was copied from.
  Status upload_outputs(const DecodeBatch& batch) const;
  Status download_outputs(DecodeBatch& batch) const;

 private:
  explicit DeviceBatch(const Backend& backend) : backend_(backend), copies_(backend) {}
  Status copy_lengths(const StepLengths& lengths);

  Backend backend_;
  DeviceCopies copies_;
  std::vector<std::byte*> outputs_;  // in the order of DecodeBatch::output_memory()
  DecodeArgs args_;
  DeviceLengths lengths_;
};

}  // namespace latte::testkit
