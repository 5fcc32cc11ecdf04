// What goes wrong with prefill on a device and how it is told, before anything is launched.
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuPrefillErrors : public OnGpu {};

struct BrokenCall {
  const char* name;
  Code code;
  const char* field;
  std::function<void(PrefillArgs&)> break_it;
};

using A = PrefillArgs;
using enum Code;

// Of a step with 3 heads, 192 / 128 columns and bf16 throughout.
const BrokenCall kBrokenCalls[] = {
    // pointers
    {"no q", missing_argument, "q", [](A& a) { a.q = {}; }},
    {"no k", missing_argument, "k", [](A& a) { a.k = {}; }},
    {"no v", missing_argument, "v", [](A& a) { a.v = {}; }},
    {"no out", missing_argument, "out", [](A& a) { a.out = {}; }},
    {"q without address", missing_argument, "q", [](A& a) { a.q.data = nullptr; }},
    {"k without address", missing_argument, "k", [](A& a) { a.k.data = nullptr; }},
    {"v without address", missing_argument, "v", [](A& a) { a.v.data = nullptr; }},
    {"out without address", missing_argument, "out", [](A& a) { a.out.data = nullptr; }},
    {"lse without address", missing_argument, "lse", [](A& a) { a.lse.data = nullptr; }},
    {"scales a head without address", missing_argument, "k_scale", [](A& a) { a.k_scale.per_head = true; }},
    // alignment
    {"a base of q that is not aligned", invalid_argument, "q", [](A& a) { a.q.data = a.q.bytes() + 2; }},
    {"a base of k that is not aligned", invalid_argument, "k", [](A& a) { a.k.data = a.k.bytes() + 8; }},
    {"a base of v that is not aligned", invalid_argument, "v", [](A& a) { a.v.data = a.v.bytes() + 4; }},
    {"an output that is not aligned", invalid_argument, "out", [](A& a) { a.out.data = a.out.bytes() + 8; }},
    {"an lse that is not aligned", invalid_argument, "lse", [](A& a) { a.lse.data = a.lse.bytes() + 2; }},
    {"heads of q that are not aligned", invalid_argument, "q", [](A& a) { a.q.stride[1] += 1; }},
    {"tokens of k that are not aligned", invalid_argument, "k", [](A& a) { a.k.stride[0] += 4; }},
    {"tokens of v that are not aligned", invalid_argument, "v", [](A& a) { a.v.stride[0] += 2; }},
    {"tokens of out that are not aligned", invalid_argument, "out", [](A& a) { a.out.stride[0] += 4; }},
    // strides
    {"heads of q on one another", invalid_argument, "q", [](A& a) { a.q.stride[1] = 184; }},
    {"one token of k for all", invalid_argument, "k", [](A& a) { a.k.stride[0] = 0; }},
    {"tokens of v from the last to the first", invalid_argument, "v", [](A& a) { a.v.stride[0] *= -1; }},
    {"tokens of q too far apart", invalid_argument, "q", [](A& a) { a.q.stride[0] = std::int64_t{1} << 38; }},
    {"heads of v too far apart", invalid_argument, "v", [](A& a) { a.v.stride[1] = std::int64_t{1} << 38; }},
    {"tokens of k whose offsets overflow", invalid_argument, "k", [](A& a) { a.k.stride[0] = INT64_MAX / 2; }},
    {"q not dense", invalid_argument, "q", [](A& a) { a.q.stride[2] = 2; }},
    {"v not dense", invalid_argument, "v", [](A& a) { a.v.stride[2] = 2; }},
    {"out not dense", invalid_argument, "out", [](A& a) { a.out.stride[2] = 2; }},
    {"heads of out on one another", invalid_argument, "out", [](A& a) { a.out.stride[1] = 64; }},
    {"an lse of one number", invalid_argument, "lse",
     [](A& a) {
       a.lse.stride = {0, 0};
     }},
    // dtypes
    {"q of another dtype", invalid_argument, "q", [](A& a) { a.q.dtype = Dtype::f16; }},
    {"k of another dtype", invalid_argument, "k", [](A& a) { a.k.dtype = Dtype::fp8_e4m3; }},
    {"v of another dtype", invalid_argument, "v", [](A& a) { a.v.dtype = Dtype::f32; }},
    {"out of another dtype", invalid_argument, "out", [](A& a) { a.out.dtype = Dtype::f32; }},
    {"lse of another dtype", invalid_argument, "lse", [](A& a) { a.lse.dtype = Dtype::bf16; }},
    // shapes
    {"q of v's width", invalid_argument, "q", [](A& a) { a.q.shape[2] = 128; }},
    {"k of another width", invalid_argument, "k", [](A& a) { a.k.shape[2] = 64; }},
    {"v of k's width", invalid_argument, "v", [](A& a) { a.v.shape[2] = 192; }},
    {"out of k's width", invalid_argument, "out", [](A& a) { a.out.shape[2] = 192; }},
    {"k with fewer heads", invalid_argument, "k", [](A& a) { a.k.shape[1] = 1; }},
    {"lse with more heads", invalid_argument, "lse", [](A& a) { a.lse.shape[1] = 4; }},
    {"q of rank 2", invalid_argument, "q", [](A& a) { a.q.rank = 2; }},
    {"too few rows of q", invalid_argument, "q", [](A& a) { a.q.shape[0] = 1; }},
    {"too few rows of v", invalid_argument, "v", [](A& a) { a.v.shape[0] -= 1; }},
    {"too few rows of out", invalid_argument, "out", [](A& a) { a.out.shape[0] -= 1; }},
    // the rest
    {"no scale", invalid_argument, "scale", [](A& a) { a.scale = 0; }},
    {"a scale that nobody uses", invalid_argument, "q_scale", [](A& a) { a.q_scale.value = 2; }},
    {"scales by address that nobody uses", invalid_argument, "v_scale",
     [](A& a) { a.v_scale.ptr = static_cast<const float*>(a.lse.data); }},
    {"a workspace that is too small", invalid_argument, "workspace",
     [](A& a) {
       a.workspace = {a.out.bytes(), 64};
     }},
    {"a cache that the problem does not know of", invalid_argument, "kv_cache", [](A& a) { a.kv_cache = a.k; }},
};

// Bytes of every output, guard bands included, as the device has them.
std::vector<std::byte> outputs_of(DevicePrefillStep& step) {
  EXPECT_TRUE(succeeded(step.device.download_outputs(step.batch())));
  std::vector<std::byte> bytes;
  for (const Buffer& memory : step.batch().output_memory())
    bytes.insert(bytes.end(), memory.data(), memory.data() + memory.size());
  return bytes;
}

TEST_F(GpuPrefillErrors, EveryBrokenCallNamesItsFieldAndWritesNothing) {
  auto step = DevicePrefillStep::make(backend(), gpu_prefill({{70, 130}, {40, 40}, {3, 0}}, 3));
  const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
  ASSERT_TRUE(succeeded(step->poison()));
  const std::vector<std::byte> untouched = outputs_of(*step);
  for (const BrokenCall& broken : kBrokenCalls) {
    SCOPED_TRACE(broken.name);
    PrefillArgs args = step->args(stream());
    broken.break_it(args);
    const Status status = prefill(metadata, args);
    EXPECT_STREQ(code_name(status.code()), code_name(broken.code)) << status.message();
    EXPECT_EQ(status.field(), broken.field) << status.message();
    EXPECT_FALSE(status.expected().empty());
    EXPECT_FALSE(status.got().empty());
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    EXPECT_EQ(outputs_of(*step), untouched);
  }
  ASSERT_TRUE(succeeded(prefill(metadata, step->args(stream())))) << "what is not broken runs";
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  const Comparison result = step->compared();
  EXPECT_TRUE(result.ok) << result.message;
}

TEST_F(GpuPrefillErrors, ABuilderWithoutWorkspaceAsksForOne) {
  const PrefillCase c = gpu_prefill({{70, 130}, {40, 40}}, 3);
  auto step = DevicePrefillStep::make(backend(), c, {.policy = Policy::uniform(2), .own_workspace = false});
  ASSERT_GT(step->builder.workspace_bytes(), 0u);
  ASSERT_TRUE(succeeded(step->poison()));
  const std::vector<std::byte> untouched = outputs_of(*step);
  const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
  const Status status = prefill(metadata, step->args(stream()));
  EXPECT_EQ(status.code(), missing_argument) << status.message();
  EXPECT_EQ(status.field(), "workspace");
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  EXPECT_EQ(outputs_of(*step), untouched);
}

// Words of 1 look like what the first launch writes, the others like nothing.
TEST_F(GpuPrefillErrors, AWorkspaceMayHaveHeldAnything) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3})
    for (std::uint32_t word : {1u, 0xeeeeeeeeu}) {
      PrefillCase c = gpu_prefill({{70, 300}, {140, 140}}, 3);
      c.dtype = dtype;
      auto step = DevicePrefillStep::make(backend(), c, {.policy = Policy::uniform(2), .own_workspace = false});
      const std::vector<std::uint32_t> garbage(step->builder.workspace_bytes() / sizeof(std::uint32_t), word);
      const auto memory = DeviceMemory::allocate(backend(), step->builder.workspace_bytes()).value();
      const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
      PrefillArgs args = step->args(stream());
      args.workspace = {memory.data(), memory.size()};
      for (int use = 0; use < 2; ++use) {
        ASSERT_TRUE(succeeded(copy_to_device(backend(), memory.data(), garbage.data(), memory.size())));
        ASSERT_TRUE(succeeded(step->builder.init_workspace(args.workspace, stream())));
        for (int call = 0; call < 3; ++call) {
          ASSERT_TRUE(succeeded(step->poison()));
          ASSERT_TRUE(succeeded(prefill(metadata, args)));
          ASSERT_TRUE(succeeded(backend().synchronize(stream())));
          const Comparison result = step->compared();
          EXPECT_TRUE(result.ok) << dtype_name(dtype) << " use " << use << " call " << call << ": " << result.message;
        }
      }
    }
}

// The stride of a dimension of one element says nothing, so it may say anything.
TEST_F(GpuPrefillErrors, StridesThatNobodyWalksAreNotLookedAt) {
  for (const auto& [requests, heads, axis] :
       {std::tuple{std::vector<PrefillRequest>{{70, 130}, {40, 40}}, 1, std::size_t{1}},
        std::tuple{std::vector<PrefillRequest>{{1, 1}}, 3, std::size_t{0}}}) {
    for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
      PrefillCase c = gpu_prefill(requests, heads);
      c.dtype = dtype;
      auto step = DevicePrefillStep::make(backend(), c);
      const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
      for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-3}, INT64_MAX}) {
        PrefillArgs args = step->args(stream());
        args.q.stride[axis] = args.k.stride[axis] = args.v.stride[axis] = stride;
        ASSERT_TRUE(succeeded(step->poison()));
        ASSERT_TRUE(succeeded(prefill(metadata, args)));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        const Comparison result = step->compared();
        EXPECT_TRUE(result.ok) << result.message << " axis " << axis << " stride " << stride;
      }
    }
  }
}

}  // namespace
}  // namespace latte::testkit
