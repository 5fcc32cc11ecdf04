// What `latte run` does for both ops around the call itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/options.hpp"
#include "cli/safetensors.hpp"
#include "latte/device.hpp"
#include "latte/tensor.hpp"
#include "testkit/case.hpp"

namespace latte::cli {

struct RunOptions {
  std::string file;
  std::string out;
  std::string policy = "balanced";
  BackendChoice backend;
};

// A call's outputs on the host. Rows that belong to no request stay zero.
struct Outputs {
  static Result<Outputs> make(std::int64_t rows, std::int32_t heads, std::int32_t width, Dtype dtype);
  Status save(const std::string& path, Op op) const;

  AlignedBytes out_bytes, lse_bytes;
  TensorView out, lse;
};

// Dense tensors of a call on the backend's device. After the first error nothing more is done.
class DeviceTensors {
 public:
  explicit DeviceTensors(const Backend& backend) : backend_(backend) {}

  static std::size_t bytes_of(const ConstTensorView& view);
  void* upload(const void* host, std::size_t bytes);
  template <class View>
  void upload(View& view) {
    view.data = upload(view.data, bytes_of(view));
  }
  void download(const TensorView& host, const TensorView& device);

  Status status;

 private:
  Backend backend_;
  std::vector<DeviceMemory> memory_;
};

// What the file expects, and how near a result must come.
struct Expectation {
  const FileTensor* out = nullptr;
  const FileTensor* lse = nullptr;
  std::int64_t tokens = 0;                        // rows to look at
  std::function<testkit::Tolerance()> tolerance;  // asked only where there is something to compare: it may take long
};

// Writes the outputs if asked, compares them and tells. Returns the exit code.
int conclude(const RunOptions& options, Op op, const Outputs& outputs, const Expectation& expectation);

int replay_decode(const Safetensors& file, const RunOptions& options);
int replay_prefill(const Safetensors& file, const RunOptions& options);

}  // namespace latte::cli
