// A fault of the device is a value of the calls that come after it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

// Returns what was wrong with the answers, if anything was. Afterwards this process has no use for the device any more.
std::string answers_to_a_fault() {
  const Backend backend = Backend::open({.name = "cuda"}).value();
  const OwnedStream stream = OwnedStream::create(backend).value();
  // Pages that the copy engine does not load: threads read the cache.
  auto step = DeviceStep::make(backend, gpu_case({{1, 200}, {2, 70}}, 16, 7));
  if (const Status status = step->run(backend, stream.get()); !status) return "before the fault: " + status.message();

  const auto metadata = step->builder.build(0, step->batch.lengths(), stream.get()).value();
  const DecodeArgs sound = step->args(stream.get());
  DecodeArgs args = sound;
  // Aligned and shaped as it should be, and mapped nowhere: only the kernel can find out.
  args.kv_cache.data = reinterpret_cast<const void*>(std::uintptr_t{1} << 20);
  if (const Status status = decode(metadata, args); !status) return "the call itself: " + status.message();

  const std::pair<const char*, Status> answers[] = {
      {"synchronize", backend.synchronize(stream.get())},
      {"synchronize again", backend.synchronize(stream.get())},
      {"decode", decode(metadata, sound)},
      {"build", step->builder.build(0, step->batch.lengths(), stream.get()).status()},
      {"allocate", DeviceMemory::allocate(backend, 1 << 20).status()},
      {"download", step->device.download_outputs(step->batch)},
  };
  for (const auto& [call, status] : answers)
    if (status.code() != Code::device_fault || status.field() != "device" || status.expected().empty() ||
        status.got().find("queued before") == std::string::npos)
      return std::string(call) + ": " + status.message();
  return {};
}

// Exits, where an abort or a signal would not: what the step owned was given back by then.
[[noreturn]] void report_answers_to_a_fault() {
  const std::string wrong = answers_to_a_fault();
  std::fprintf(stderr, "%s\n", wrong.empty() ? "device_fault from every call" : wrong.c_str());
  std::exit(wrong.empty() ? EXIT_SUCCESS : EXIT_FAILURE);
}

// In a process of its own, a fresh run of this program, as a fault takes the whole context with it.
TEST(GpuFaultDeathTest, IsTheAnswerOfEveryLaterCallAndEndsNoProcess) {
  if (const auto backend = Backend::open({.name = "cuda"}); !backend) GTEST_SKIP() << backend.status().message();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(report_answers_to_a_fault(), ::testing::ExitedWithCode(EXIT_SUCCESS), "device_fault from every call");
}

}  // namespace
}  // namespace latte::testkit
