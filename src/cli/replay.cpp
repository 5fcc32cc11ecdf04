#include "cli/replay.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "cli/captured_parts.hpp"
#include "cli/commands.hpp"
#include "testkit/codec.hpp"
#include "testkit/compare.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {
namespace {

std::vector<double> values_of(Dtype dtype, const std::byte* data, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  testkit::load_row(dtype, data, count, values.data());
  return values;
}

testkit::Comparison compare_with_file(const Outputs& outputs, const Expectation& expectation) {
  testkit::OracleResult expected{.tokens = expectation.tokens,
                                 .heads = static_cast<std::int32_t>(outputs.out.shape[1]),
                                 .latent = static_cast<std::int32_t>(outputs.out.shape[2])};
  const std::int64_t rows = expected.tokens * expected.heads;
  // What the file does not tell is compared with itself.
  const auto values = [](const FileTensor* tensor, const TensorView& own, std::int64_t count) {
    return tensor != nullptr ? values_of(library_dtype(tensor->dtype), tensor->bytes.data(), count)
                             : values_of(own.dtype, own.bytes(), count);
  };
  expected.out = values(expectation.out, outputs.out, rows * expected.latent);
  expected.lse = values(expectation.lse, outputs.lse, rows);
  return testkit::compare(outputs.out, outputs.lse, expected, expectation.tolerance());
}

}  // namespace

Result<Outputs> Outputs::make(std::int64_t rows, std::int32_t heads, std::int32_t width, Dtype dtype) {
  // Rows x heads are those of a tensor in memory, and no width is above 65536: the product fits.
  const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads);
  const std::size_t out_size = count * static_cast<std::size_t>(width) * dtype_bytes(dtype);
  Result<AlignedBytes> out_bytes = AlignedBytes::make(std::max<std::size_t>(out_size, 1));
  Result<AlignedBytes> lse_bytes = AlignedBytes::make(std::max<std::size_t>(count * sizeof(float), 1));
  if (!out_bytes) return out_bytes.status();
  if (!lse_bytes) return lse_bytes.status();
  std::memset(out_bytes->data(), 0, out_bytes->size());
  std::memset(lse_bytes->data(), 0, lse_bytes->size());
  Outputs outputs{.out_bytes = std::move(*out_bytes), .lse_bytes = std::move(*lse_bytes), .out = {}, .lse = {}};
  outputs.out = dense(static_cast<void*>(outputs.out_bytes.data()), dtype, {rows, heads, width});
  outputs.lse = dense(static_cast<void*>(outputs.lse_bytes.data()), Dtype::f32, {rows, heads});
  return outputs;
}

Status Outputs::save(const std::string& path, Op op) const {
  const TensorToWrite tensors[] = {to_write("out", out), to_write("lse", lse)};
  return save_safetensors(path, tensors, {{"op", op_name(op)}});
}

std::size_t DeviceTensors::bytes_of(const ConstTensorView& view) {
  if (view.rank == 0) return 0;
  std::size_t bytes = dtype_bytes(view.dtype);
  for (std::int32_t axis = 0; axis < view.rank; ++axis)
    bytes *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(axis)]);
  return bytes;
}

void* DeviceTensors::upload(const void* host, std::size_t bytes) {
  if (host == nullptr || !status.ok()) return nullptr;
  Result<DeviceMemory> memory = DeviceMemory::allocate(backend_, bytes);
  status = memory ? copy_to_device(backend_, memory->data(), host, bytes) : memory.status();
  if (!status.ok()) return nullptr;
  memory_.push_back(std::move(*memory));
  return memory_.back().data();
}

void DeviceTensors::download(const TensorView& host, const TensorView& device) {
  if (status.ok()) status = copy_to_host(backend_, host.data, device.data, bytes_of(device));
}

int conclude(const RunOptions& options, Op op, const Outputs& outputs, const Expectation& expectation) {
  if (!options.out.empty()) {
    if (const Status status = outputs.save(options.out, op); !status.ok()) return fail(status);
    fmt::print("wrote {}\n", options.out);
  }
  if (expectation.out == nullptr && expectation.lse == nullptr) {
    fmt::print("nothing to compare with: the file has neither expect.out nor expect.lse\n");
    return kExitOk;
  }
  const testkit::Comparison comparison = compare_with_file(outputs, expectation);
  if (expectation.out != nullptr)
    fmt::print("out  error {:.3e}, allowed {:.3e}\n", comparison.out_error, comparison.out_allowed);
  if (expectation.lse != nullptr)
    fmt::print("lse  error {:.3e}, allowed {:.3e}\n", comparison.lse_error, comparison.tolerance.lse);
  fmt::print("{}\n", comparison.ok ? "matches" : "DIFFERS: " + comparison.message);
  return comparison.ok ? kExitOk : kExitCheckFailed;
}

}  // namespace latte::cli
