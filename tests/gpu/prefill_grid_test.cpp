// The GPU's prefill kernels against the oracle: the shared grid, and what only they care about.
#include "testkit/prefill_grid.hpp"

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

constexpr std::size_t kShards = 6;
constexpr std::uint64_t kRandomCases = 60;

class GpuPrefillGrid : public OnGpu, public ::testing::WithParamInterface<std::size_t> {};

const Policy& policy_of(std::size_t index) {
  static const Policy kPolicies[] = {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(256)};
  return kPolicies[index % std::size(kPolicies)];
}

// Poisoned outputs, guard bands and NaN in everything that must not be read included.
TEST_P(GpuPrefillGrid, AgreesWithTheOracle) {
  const std::vector<PrefillCase> cases = prefill_grid(GridSize::full);
  int ran = 0;
  for (std::size_t i = GetParam(); i < cases.size(); i += kShards) {
    if (!backend().supports(cases[i].problem()).ok) continue;
    expect_agreement(backend(), for_backend(backend(), cases[i]), {.policy = policy_of(i / kShards)});
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

INSTANTIATE_TEST_SUITE_P(Shards, GpuPrefillGrid, ::testing::Range<std::size_t>(0, kShards));

class GpuPrefill : public OnGpu {};

TEST_F(GpuPrefill, RandomCasesAgreeWithTheOracle) {
  int ran = 0;
  for (std::uint64_t seed = 5000; seed < 5000 + kRandomCases; ++seed) {
    const PrefillCase c = for_backend(backend(), random_prefill_case(seed));
    if (!backend().supports(c.problem()).ok) continue;
    expect_agreement(backend(), c, {.policy = policy_of(seed)});
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

// The formats an engine has must be served; nothing below may quietly skip them.
TEST_F(GpuPrefill, ServesTheUsualFormats) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (PrefillMath math : {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8})
      for (std::int32_t heads : {1, 3, 16, 24, 128}) {
        PrefillCase c = gpu_prefill({{8, 8}}, heads);
        c.dtype = dtype;
        c.math = math;
        const Support support = backend().supports(c.problem());
        EXPECT_TRUE(support.ok) << c.name() << ": " << support.reason;
      }
}

// Lengths around every tile size, alone and behind each other: the last tile of one request ends in the next one.
TEST_F(GpuPrefill, EveryLengthAroundATile) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (Mask mask : {Mask::causal, Mask::none}) {
      PrefillCase c = gpu_prefill({}, 2);
      c.dtype = dtype;
      c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
      c.mask = mask;
      for (std::int32_t tile : {64, 128, 176, 192, 256})
        for (std::int32_t length : {tile - 1, tile, tile + 1}) c.requests.push_back({length, length});
      expect_agreement(backend(), c);
      for (std::size_t i = 0; i < c.requests.size(); ++i)  // more KV than queries, and less
        c.requests[i].kv_tokens += (i % 3 == 0 ? -1 : 1) * static_cast<std::int32_t>(i * 7);
      expect_agreement(backend(), c);
    }
}

TEST_F(GpuPrefill, OutputsOfEveryDtypeAndLayoutWithAndWithoutLse) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (Dtype out : {Dtype::bf16, Dtype::f16, Dtype::f32})
      for (Layout layout : {Layout::dense, Layout::gapped, Layout::transposed})
        for (bool with_lse : {true, false}) {
          PrefillCase c = gpu_prefill({{130, 200}, {65, 65}, {70, 3}}, 3);
          c.dtype = dtype;
          c.out_dtype = out;
          c.out_layout = c.lse_layout = layout;
          c.with_lse = with_lse;
          expect_agreement(backend(), c);
        }
}

// q, k and v cut out of larger tensors, each with strides of its own.
TEST_F(GpuPrefill, StridesOfTheInputsAreFree) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3})
    for (Layout q : {Layout::dense, Layout::gapped, Layout::transposed})
      for (Layout k : {Layout::dense, Layout::gapped, Layout::transposed})
        for (Layout v : {Layout::dense, Layout::gapped, Layout::transposed}) {
          PrefillCase c = gpu_prefill({{130, 150}, {66, 66}}, 3);
          c.dtype = dtype;
          c.q_layout = q;
          c.k_layout = k;
          c.v_layout = v;
          expect_agreement(backend(), c);
        }
}

// As engines have it: k and v are two parts of one projection [T, H, 128 + 128], and k's rope part is elsewhere, so k
// is a tensor of its own while v is a slice.
TEST_F(GpuPrefill, ValuesAsASliceOfTheProjection) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
    PrefillCase c = gpu_prefill({{200, 200}, {70, 70}}, 4);
    c.dtype = dtype;
    auto step = DevicePrefillStep::make(backend(), c);
    const PrefillArgs host = step->batch().args();
    const std::int64_t tokens = host.v.shape[0], heads = 4, nope = 128, width = 128, bytes = dtype_bytes(dtype);
    std::vector<std::byte> joined(static_cast<std::size_t>(tokens * heads * (nope + width) * bytes), std::byte{0xff});
    const auto* v = static_cast<const std::byte*>(host.v.data);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h)
        std::copy_n(v + (t * host.v.stride[0] + h * host.v.stride[1]) * bytes, width * bytes,
                    &joined[static_cast<std::size_t>(((t * heads + h) * (nope + width) + nope) * bytes)]);
    const auto memory = DeviceMemory::allocate(backend(), joined.size()).value();
    ASSERT_TRUE(succeeded(copy_to_device(backend(), memory.data(), joined.data(), joined.size())));
    PrefillArgs args = step->args(stream());
    args.v.data = memory.data() + nope * bytes;
    args.v.stride = {heads * (nope + width), nope + width, 1};
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
    ASSERT_TRUE(succeeded(step->poison()));
    ASSERT_TRUE(succeeded(prefill(metadata, args)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    const Comparison result = step->compared();
    EXPECT_TRUE(result.ok) << dtype_name(dtype) << ": " << result.message;
  }
}

TEST_F(GpuPrefill, HeadsOfEveryNumber) {
  for (std::int32_t heads : {1, 2, 3, 7, 16, 24, 100, 128})
    for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
      PrefillCase c = gpu_prefill({{40, 40}, {1, 90}, {17, 3}}, heads);
      c.dtype = dtype;
      c.scale_form = ScaleForm::per_head;
      expect_agreement(backend(), c);
    }
}

// Few tiles and many tokens: pieces of a tile are joined. Any number of pieces, any number of workers.
TEST_F(GpuPrefill, SplitTilesAreJoined) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
    PrefillCase c = gpu_prefill({{130, 6000}, {5, 3000}, {64, 1}}, 1);
    c.dtype = dtype;
    expect_agreement(backend(), c);
    for (std::int32_t pieces : {2, 5, 17, 40}) expect_agreement(backend(), c, {.policy = Policy::uniform(pieces)});
    for (std::int32_t chunk : {0, 512, 1024})
      expect_agreement(backend(), c, {.policy = Policy::batch_invariant(chunk)});
    for (std::int32_t workers : {1, 2, 7, 66, 131}) {
      const Limits limits = c.limits(workers);
      expect_agreement(backend(), c, {}, &limits);
    }
  }
}

TEST_F(GpuPrefill, ManyRequestsAndOneLongOne) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
    PrefillCase c = gpu_prefill({}, 4);
    c.dtype = dtype;
    c.requests.assign(200, {3, 5});
    expect_agreement(backend(), c);
    c.requests.assign(15, {100, 100});
    c.requests.insert(c.requests.begin() + 7, {1500, 1500});
    expect_agreement(backend(), c);
  }
  expect_agreement(backend(), gpu_prefill({{5000, 5000}}, 1));
}

// Scales that make all tokens count the same, or one of them alone.
TEST_F(GpuPrefill, SmallAndLargeScales) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (float scale : {1e-6f, 0.7f}) {
      PrefillCase c = gpu_prefill({{300, 300}, {2, 131}, {130, 2}}, 3);
      c.dtype = dtype;
      c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
      c.scale = scale;
      c.math = PrefillMath::half;
      expect_agreement(backend(), c);
    }
}

// Rows without a score above zero, and rows that get one late, as KV goes from the last token to the first: what is
// highest is found in two ways.
TEST_F(GpuPrefill, ScoresBelowZero) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3})
    for (Mask mask : {Mask::causal, Mask::none})
      for (float scale : {0.0f, 0.3f}) {
        PrefillCase c = gpu_prefill({{300, 1200}, {700, 700}, {64, 1000}}, 2);
        c.dtype = dtype;
        c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
        c.mask = mask;
        c.scale = scale;
        c.opposed = true;
        expect_agreement(backend(), c);
      }
}

}  // namespace
}  // namespace latte::testkit
