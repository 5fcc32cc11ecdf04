// What the GPU tests share: the device, a stream, and a step that runs there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "latte/latte.hpp"
#include "testkit/device_batch.hpp"
#include "testkit/run_case.hpp"

namespace latte::testkit {

// Success, or the status' message.
::testing::AssertionResult succeeded(const Status& status);

template <class T>
DeviceMemory upload(const Backend& backend, const std::vector<T>& values) {
  auto memory = DeviceMemory::allocate(backend, values.size() * sizeof(T)).value();
  EXPECT_TRUE(succeeded(copy_to_device(backend, memory.data(), values.data(), memory.size())));
  return memory;
}

// Skips its tests where the cuda backend cannot be opened, or fails them if LATTE_REQUIRE_GPU is set.
class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override;
  const Backend& backend() const { return *backend_; }
  Stream stream() const { return stream_->get(); }
  template <class T>
  DeviceMemory upload(const std::vector<T>& values) const {
    return testkit::upload(backend(), values);
  }

 private:
  std::optional<Backend> backend_;
  std::optional<OwnedStream> stream_;
};

// bf16 unless told otherwise, with strides a device takes.
DecodeCase gpu_case(std::vector<RequestLengths> requests, std::int32_t heads, std::int32_t page_size = 64);

// Lengths with room of their own.
struct Lengths {
  std::vector<std::int32_t> seq_lens, query_start{0}, visible;

  explicit Lengths(const std::vector<RequestLengths>& requests);
  StepLengths view() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}; }
};

// A batch on the device beside its host copy, and a builder for it.
struct DeviceStep {
  DecodeBatch batch;
  DeviceBatch device;
  MetadataBuilder builder;

  static std::unique_ptr<DeviceStep> make(const Backend& backend, const DecodeCase& description,
                                          const BuilderOptions& options = {});
  static std::unique_ptr<DeviceStep> make(const Backend& backend, DecodeBatch batch, const BuilderOptions& options,
                                          const Limits& limits);

  DecodeArgs args(Stream stream) const;
  // Poisons the outputs, runs decode once with a plan made on the host, and brings the outputs back. With the batch's
  // own lengths, or with others.
  Status run(const Backend& backend, Stream stream) { return run(backend, stream, batch.lengths()); }
  Status run(const Backend& backend, Stream stream, const StepLengths& lengths);
};

}  // namespace latte::testkit
