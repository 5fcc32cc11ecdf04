// A fault of the device is a value of the calls that come after it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

// Operations on the memory of a step that has done its own work: nothing in them is wrong.
class SoundOps {
 public:
  SoundOps(const Backend& backend, const DecodeArgs& step)
      : backend_(backend), step_(step), memory_(DeviceMemory::allocate(backend, 4096).value()) {
    // A slot that is skipped, one row that begins at 0 and ends at 1, and room for it.
    const std::int64_t slots[] = {-1};
    const std::int32_t rows[] = {0, 1};
    if (!copy_to_device(backend, memory_.data(), slots, sizeof slots) ||
        !copy_to_device(backend, memory_.data() + 64, rows, sizeof rows))
      throw std::runtime_error("no copies");
  }

  Status merge_parts() const {
    const Partial same[] = {{step_.out, step_.lse}, {step_.out, step_.lse}};
    return merge(backend_, {same, step_.out, step_.lse, step_.stream});
  }
  Status write() const {
    WriteKvArgs args;
    args.kv_c = dense(static_cast<const void*>(memory_.data() + 1024), Dtype::bf16, {1, 512});
    args.k_pe = dense(static_cast<const void*>(memory_.data() + 1024), Dtype::bf16, {1, 64});
    args.slot_mapping = {reinterpret_cast<const std::int64_t*>(memory_.data()), 1};
    args.kv_cache = {.data = const_cast<void*>(step_.kv_cache.data),
                     .dtype = step_.kv_cache.dtype,
                     .rank = step_.kv_cache.rank,
                     .shape = step_.kv_cache.shape,
                     .stride = step_.kv_cache.stride};
    args.stream = step_.stream;
    return write_kv(backend_, args);
  }
  Status gather() const {
    GatherKvArgs args;
    args.kv_cache = step_.kv_cache;
    args.pages = step_.pages;
    args.out_start = {reinterpret_cast<const std::int32_t*>(memory_.data() + 64), 2};
    args.tokens = 1;
    args.out = dense(static_cast<void*>(memory_.data() + 1024), Dtype::bf16, {1, 576});
    args.stream = step_.stream;
    return gather_kv(backend_, args);
  }
  Status run() const {
    for (const Status& status : {merge_parts(), write(), gather(), backend_.synchronize(step_.stream)})
      if (!status) return status;
    return {};
  }

 private:
  const Backend& backend_;
  const DecodeArgs step_;
  const DeviceMemory memory_;
};

// Returns what was wrong with the answers, if anything was. Afterwards this process has no use for the device any more.
std::string answers_to_a_fault() {
  const Backend backend = Backend::open({.name = "cuda"}).value();
  const OwnedStream stream = OwnedStream::create(backend).value();
  // Pages that the copy engine does not load: threads read the cache.
  auto step = DeviceStep::make(backend, gpu_case({{1, 200}, {2, 70}}, 16, 7));
  if (const Status status = step->run(backend, stream.get()); !status) return "before the fault: " + status.message();
  auto boxes = DeviceStep::make(backend, gpu_case({{1, 200}}, 16, 64));
  if (const Status status = boxes->run(backend, stream.get()); !status) return "before the fault: " + status.message();
  const auto boxes_metadata = boxes->builder.build(0, boxes->batch.lengths(), stream.get()).value();
  auto prefill_step = DevicePrefillStep::make(backend, gpu_prefill({{40, 40}}, 2));
  if (const Status status = prefill_step->run(backend, stream.get()); !status)
    return "prefill before the fault: " + status.message();
  const auto prefill_metadata = prefill_step->builder.build(0, prefill_step->batch().lengths(), stream.get()).value();

  const auto metadata = step->builder.build(0, step->batch.lengths(), stream.get()).value();
  const DecodeArgs sound = step->args(stream.get());
  const SoundOps ops(backend, sound);
  if (const Status status = ops.run(); !status) return "operations before the fault: " + status.message();
  DecodeArgs args = sound;
  // Aligned and shaped as it should be, and mapped nowhere: only the kernel can find out.
  args.kv_cache.data = reinterpret_cast<const void*>(std::uintptr_t{1} << 20);
  if (const Status status = decode(metadata, args); !status) return "the call itself: " + status.message();

  const std::pair<const char*, Status> answers[] = {
      {"synchronize", backend.synchronize(stream.get())},
      {"synchronize again", backend.synchronize(stream.get())},
      {"decode", decode(metadata, sound)},
      {"decode by the copy engine", decode(boxes_metadata, boxes->args(stream.get()))},
      {"build", step->builder.build(0, step->batch.lengths(), stream.get()).status()},
      {"build_on_device", step->builder.build_on_device(0, step->device.lengths(), stream.get()).status()},
      {"prefill", prefill(prefill_metadata, prefill_step->args(stream.get()))},
      {"build of prefill", prefill_step->builder.build(0, prefill_step->batch().lengths(), stream.get()).status()},
      {"merge", ops.merge_parts()},
      {"write_kv", ops.write()},
      {"gather_kv", ops.gather()},
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
