// Bad arguments on a device are told before a launch. What a kernel finds after one: validation_test.cpp.
#include <functional>

#include <gtest/gtest.h>

#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuErrors : public OnGpu {};

TEST_F(GpuErrors, EveryBrokenCallNamesItsField) {
  const struct {
    const char* name;
    Code code;
    const char* field;
    std::function<void(DecodeArgs&)> break_it;
  } cases[] = {
      {"a base that is not aligned", Code::invalid_argument, "q", [](DecodeArgs& a) { a.q.data = a.q.bytes() + 2; }},
      {"q rows that are not aligned", Code::invalid_argument, "q", [](DecodeArgs& a) { a.q.stride[1] += 1; }},
      {"a cache that is not aligned", Code::invalid_argument, "kv_cache",
       [](DecodeArgs& a) { a.kv_cache.data = a.kv_cache.bytes() + 8; }},
      {"tokens that are not aligned", Code::invalid_argument, "kv_cache",
       [](DecodeArgs& a) { a.kv_cache.stride[1] += 4; }},
      {"tokens that overlap", Code::invalid_argument, "kv_cache", [](DecodeArgs& a) { a.kv_cache.stride[1] = 8; }},
      {"tokens too far apart", Code::invalid_argument, "kv_cache",
       [](DecodeArgs& a) { a.kv_cache.stride[1] = std::int64_t{1} << 39; }},
      {"a cache without pages", Code::invalid_argument, "kv_cache", [](DecodeArgs& a) { a.kv_cache.shape[0] = 0; }},
      {"an output that is not aligned", Code::invalid_argument, "out",
       [](DecodeArgs& a) { a.out.data = a.out.bytes() + 4; }},
      {"another dtype", Code::invalid_argument, "q", [](DecodeArgs& a) { a.q.dtype = Dtype::f16; }},
      {"too few rows", Code::invalid_argument, "q", [](DecodeArgs& a) { a.q.shape[0] = 1; }},
      {"no page table", Code::missing_argument, "pages", [](DecodeArgs& a) { a.pages = {}; }},
      {"too few pages for the lengths", Code::invalid_argument, "pages.max_pages",
       [](DecodeArgs& a) { a.pages.max_pages = 1; }},
      {"a list of too many bounds", Code::invalid_argument, "pages.page_indptr",
       [](DecodeArgs& a) {
         a.pages.page_indptr = {a.pages.block_table, 9};
         a.pages.page_indices = {a.pages.block_table, 9};
         a.pages.block_table = nullptr;
         a.pages.max_pages = 0;
       }},
      {"a scale by address", Code::unsupported, "kv_scale",
       [](DecodeArgs& a) { a.kv_scale.ptr = reinterpret_cast<const float*>(a.pages.block_table); }},
      {"a negative scale", Code::invalid_argument, "scale", [](DecodeArgs& a) { a.scale = -1; }},
      {"a workspace that is too small", Code::invalid_argument, "workspace",
       [](DecodeArgs& a) {
         a.workspace = {a.out.bytes(), 64};
       }},
  };
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 70}}, 16));
  const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
  step->batch.poison_outputs();
  const auto poison = step->batch.result_bits();
  ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
  for (const auto& broken : cases) {
    SCOPED_TRACE(broken.name);
    DecodeArgs args = step->args(stream());
    broken.break_it(args);
    const Status status = decode(metadata, args);
    EXPECT_STREQ(code_name(status.code()), code_name(broken.code)) << status.message();
    EXPECT_EQ(status.field(), broken.field) << status.message();
  }
  EXPECT_TRUE(succeeded(backend().synchronize(stream())));
  EXPECT_TRUE(succeeded(step->device.download_outputs(step->batch)));
  EXPECT_EQ(step->batch.result_bits(), poison) << "a broken call has written something";
  EXPECT_TRUE(succeeded(decode(metadata, step->args(stream()))));
  EXPECT_TRUE(succeeded(backend().synchronize(stream())));
}

TEST_F(GpuErrors, EveryBrokenDeviceStepNamesItsField) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 70}}, 16));
  const DeviceLengths good = step->device.lengths();
  const struct {
    Code code;
    const char* field;
    std::function<void(DeviceLengths&)> break_it;
  } cases[] = {
      {Code::out_of_limits, "requests", [](DeviceLengths& l) { l.requests = 3; }},
      {Code::invalid_argument, "requests", [](DeviceLengths& l) { l.requests = -1; }},
      {Code::out_of_limits, "query_tokens", [](DeviceLengths& l) { l.query_tokens = 4; }},
      {Code::missing_argument, "seq_lens", [](DeviceLengths& l) { l.seq_lens = nullptr; }},
      {Code::missing_argument, "query_start", [](DeviceLengths& l) { l.query_start = nullptr; }},
  };
  for (const auto& broken : cases) {
    DeviceLengths lengths = good;
    broken.break_it(lengths);
    const auto built = step->builder.build_on_device(0, lengths, stream());
    EXPECT_STREQ(code_name(built.status().code()), code_name(broken.code)) << built.status().message();
    EXPECT_EQ(built.status().field(), broken.field);
  }
}

TEST_F(GpuErrors, OptionsThatOnlyACpuHasAreRefused) {
  EXPECT_EQ(Backend::open({.name = "cuda", .threads = 4}).status().field(), "threads");
  EXPECT_EQ(Backend::open({.name = "cuda", .kernel = "avx2"}).status().field(), "kernel");
  EXPECT_EQ(Backend::open({.name = "cuda", .device = 1000}).status().field(), "device");
  EXPECT_EQ(Backend::open({.name = "cuda", .device = -1}).status().field(), "device");
}

TEST_F(GpuErrors, AutoIsTheGpuAndAWrongDeviceIsStillAnError) {
  const auto opened = Backend::open({.name = "auto", .threads = 1});
  ASSERT_TRUE(succeeded(opened.status()));
  EXPECT_TRUE(opened->on_device());
  EXPECT_EQ(opened->info().note, "");
  EXPECT_EQ(Backend::open({.name = "auto", .device = 1000}).status().field(), "device");
}

TEST_F(GpuErrors, MetadataOfAnEarlierStepIsStale) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}}, 16));
  const auto old = step->builder.build(0, step->batch.lengths(), stream()).value();
  const auto current = step->builder.build_on_device(0, step->device.lengths(), stream()).value();
  EXPECT_EQ(decode(old, step->args(stream())).code(), Code::stale_metadata);
  EXPECT_TRUE(succeeded(decode(current, step->args(stream()))));
  EXPECT_TRUE(succeeded(backend().synchronize(stream())));
}

TEST_F(GpuErrors, AWorkspaceOfTheCallersServesOnceItIsInitialised) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 3000}, {1, 90}}, 3));
  ASSERT_TRUE(succeeded(step->run(backend(), stream())));
  const auto expected = step->batch.result_bits();
  const DecodeCase& c = step->batch.description();
  auto builder = MetadataBuilder::create(backend(), c.problem(), c.limits(), {.own_workspace = false}).value();
  // The second of two that lie back to back.
  const auto memory = DeviceMemory::allocate(backend(), 2 * builder.workspace_bytes()).value();
  const std::vector<std::byte> garbage(memory.size(), std::byte{0xee});
  ASSERT_TRUE(succeeded(copy_to_device(backend(), memory.data(), garbage.data(), garbage.size())));
  const auto metadata = builder.build(0, step->batch.lengths(), stream()).value();
  EXPECT_EQ(decode(metadata, step->args(stream())).field(), "workspace");

  const std::span<std::byte> workspace(memory.data() + builder.workspace_bytes(), builder.workspace_bytes());
  ASSERT_TRUE(succeeded(builder.init_workspace(workspace, stream())));
  DecodeArgs args = step->args(stream());
  args.workspace = workspace;
  for (int repeat = 0; repeat < 3; ++repeat) {
    step->batch.poison_outputs();
    ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
    ASSERT_TRUE(succeeded(decode(metadata, args)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
    EXPECT_EQ(step->batch.result_bits(), expected);
  }
}

}  // namespace
}  // namespace latte::testkit
