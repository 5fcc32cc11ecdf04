// Threads that never asked the CUDA run time for a device: the driver has no context for them then, not even where the
// backend is on device 0. An engine's worker may make any call first.
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuFreshThread : public OnGpu {
 protected:
  // What the call returns in a thread of its own.
  static Status fresh(const std::function<Status()>& call) {
    Status status;
    std::thread([&] { status = call(); }).join();
    return status;
  }
};

// Pages that the copy engine loads: its descriptor is made by the driver.
TEST_F(GpuFreshThread, MayDecodeFirst) {
  for (std::int32_t heads : {16, 64, 128}) {
    const DecodeCase c = gpu_case({{1, 200}, {2, 70}}, heads);
    auto step = DeviceStep::make(backend(), c);
    const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
    step->batch.poison_outputs();
    ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(fresh([&] { return decode(metadata, step->args(stream())); })));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
    const DecodeArgs args = step->batch.args();
    const OracleResult oracle = decode_oracle(c.problem(), step->batch.lengths(), args);
    const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

TEST_F(GpuFreshThread, MayPrefillFirst) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
    PrefillCase c = gpu_prefill({{70, 300}, {5, 5}}, 2);
    c.dtype = dtype;
    auto step = DevicePrefillStep::make(backend(), c);
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
    ASSERT_TRUE(succeeded(step->poison()));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(fresh([&] { return prefill(metadata, step->args(stream())); })));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    const Comparison result = step->compared();
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

TEST_F(GpuFreshThread, MayDoEverything) {
  ASSERT_TRUE(succeeded(fresh([]() -> Status {
    const auto opened = Backend::open({.name = "cuda"});
    if (!opened) return opened.status();
    PreparedCase prepared(gpu_case({{1, 300}, {3, 65}}, 16));
    const auto report = run_case(*opened, prepared, {});
    if (!report) return report.status();
    EXPECT_TRUE(report->ok()) << report->message();
    return {};
  })));
}

}  // namespace
}  // namespace latte::testkit
