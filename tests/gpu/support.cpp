#include "tests/gpu/support.hpp"

#include <cstdlib>
#include <utility>

namespace latte::testkit {

void OnGpu::SetUp() {
  auto opened = Backend::open({.name = "cuda"});
  if (!opened && std::getenv("LATTE_REQUIRE_GPU") != nullptr) FAIL() << opened.status().message();
  if (!opened) GTEST_SKIP() << opened.status().message();
  backend_ = *opened;
  stream_.emplace(OwnedStream::create(*backend_).value());
}

DecodeCase gpu_case(std::vector<RequestLengths> requests, std::int32_t heads, std::int32_t page_size) {
  DecodeCase c;
  c.requests = std::move(requests);
  c.heads = heads;
  c.page_size = page_size;
  c.align_bytes = 16;
  return c;
}

Lengths::Lengths(const std::vector<RequestLengths>& requests) {
  for (const RequestLengths& request : requests) {
    seq_lens.push_back(request.kv_tokens);
    query_start.push_back(query_start.back() + request.query_tokens);
  }
}

std::unique_ptr<DeviceStep> DeviceStep::make(const Backend& backend, const DecodeCase& description,
                                             const BuilderOptions& options) {
  return make(backend, DecodeBatch(description), options, description.limits());
}

std::unique_ptr<DeviceStep> DeviceStep::make(const Backend& backend, DecodeBatch batch, const BuilderOptions& options,
                                             const Limits& limits) {
  auto builder = MetadataBuilder::create(backend, batch.description().problem(), limits, options).value();
  auto device = DeviceBatch::upload(backend, batch).value();
  return std::unique_ptr<DeviceStep>(new DeviceStep{std::move(batch), std::move(device), std::move(builder)});
}

DecodeArgs DeviceStep::args(Stream stream) const {
  DecodeArgs args = device.args();
  args.stream = stream;
  return args;
}

Status DeviceStep::run(const Backend& backend, Stream stream, const StepLengths& lengths) {
  batch.poison_outputs();
  if (Status status = device.upload_outputs(batch); !status) return status;
  const auto metadata = builder.build(0, lengths, stream);
  if (!metadata) return metadata.status();
  if (Status status = decode(*metadata, args(stream)); !status) return status;
  if (Status status = backend.synchronize(stream); !status) return status;
  return device.download_outputs(batch);
}

::testing::AssertionResult succeeded(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status.message();
}

}  // namespace latte::testkit
