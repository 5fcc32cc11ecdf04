// The GPU's kernels against the oracle: the shared grid, and what only they care about.
#include "testkit/grid.hpp"

#include <gtest/gtest.h>

#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

constexpr std::size_t kShards = 6;

class GpuGrid : public OnGpu, public ::testing::WithParamInterface<std::size_t> {};

void expect_agreement(const Backend& backend, const DecodeCase& description, const BuilderOptions& options = {},
                      const Limits* limits = nullptr) {
  PreparedCase prepared(description);
  const auto report = run_case(backend, prepared, options, limits != nullptr ? *limits : description.limits());
  if (!report)
    ADD_FAILURE() << description.name() << ": " << report.status().message();
  else
    EXPECT_TRUE(report->ok()) << report->message() << " policy " << policy_name(options.policy.kind);
}

const Policy& policy_of(std::size_t index) {
  static const Policy kPolicies[] = {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(128)};
  return kPolicies[index % std::size(kPolicies)];
}

// Poisoned outputs, guard bands and wild page ids included.
TEST_P(GpuGrid, AgreesWithTheOracle) {
  const std::vector<DecodeCase> cases = case_grid(GridSize::full);
  int ran = 0;
  for (std::size_t i = GetParam(); i < cases.size(); i += kShards) {
    if (!backend().supports(cases[i].problem()).ok) continue;
    expect_agreement(backend(), for_backend(backend(), cases[i]), {.policy = policy_of(i / kShards)});
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

INSTANTIATE_TEST_SUITE_P(Shards, GpuGrid, ::testing::Range<std::size_t>(0, kShards));

class GpuDecode : public OnGpu {};

// Heads that reach every kernel, with whole tiles and with rows that are not there, by page sizes that reach both
// loaders.
TEST_F(GpuDecode, EveryKernelTakesEveryPageSize) {
  std::size_t index = 0;
  for (std::int32_t page : {1, 7, 8, 16, 24, 32, 64, 100, 128})
    for (std::int32_t heads : {1, 16, 32, 40, 48, 50, 64, 100, 128}) {
      DecodeCase c = gpu_case({{1, 130}, {1, page}, {1, 0}, {1, 77}}, heads, page);
      if (index % 2 == 1) c.kv_format = KvFormat::f16, c.q_dtype = c.out_dtype = Dtype::f16;
      c.latent = index % 5 == 4 ? 256 : 512;
      c.query_form = index % 3 == 1 ? QueryForm::split : QueryForm::joined;
      c.page_form = index % 4 == 2 ? PageForm::csr : PageForm::block_table;
      c.bounds = index % 7 == 3 ? Bounds::random : Bounds::mask;
      c.cache_layout = index % 3 == 2 ? Layout::gapped : Layout::dense;
      c.seed = 40 + index;
      expect_agreement(backend(), c, {.policy = policy_of(index)});
      ++index;
    }
}

TEST_F(GpuDecode, MixedQueryLengthsAndTilesThatSpanTokens) {
  for (std::int32_t heads : {1, 3, 5, 12, 16, 24, 100}) {
    DecodeCase c = gpu_case({{1, 40}, {0, 33}, {6, 130}, {4, 0}, {5, 3}, {9, 9}, {0, 0}, {2, 64}, {7, 300}}, heads, 16);
    expect_agreement(backend(), c);
    c.mask = Mask::none;
    expect_agreement(backend(), c);
    c.bounds = Bounds::random;
    c.query_form = QueryForm::split;
    c.out_layout = c.lse_layout = Layout::transposed;
    expect_agreement(backend(), c);
  }
}

TEST_F(GpuDecode, LseHasFreeStridesAndIsOptional) {
  for (Layout layout : {Layout::dense, Layout::gapped, Layout::transposed})
    for (bool with_lse : {true, false}) {
      DecodeCase c = gpu_case({{2, 200}, {1, 70}}, 12);
      c.lse_layout = layout;
      c.with_lse = with_lse;
      expect_agreement(backend(), c);
    }
}

TEST_F(GpuDecode, EveryOutputDtype) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16})
    for (Dtype out : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
      DecodeCase c = gpu_case({{1, 500}, {2, 65}}, 16);
      c.kv_format = format;
      c.q_dtype = kv_element_dtype(format);
      c.out_dtype = out;
      expect_agreement(backend(), c);
    }
}

// Also odd numbers, and one: nothing may depend on how many share the work. Above 64 rows two share a tile, so there
// one alone is refused.
TEST_F(GpuDecode, FewerWorkersThanTheDeviceHas) {
  for (std::int32_t heads : {16, 32, 48, 64, 128})
    for (std::int32_t workers : {1, 2, 3, 7, 66, 101}) {
      const DecodeCase c = gpu_case({{1, 2000}, {1, 300}, {1, 64}}, heads);
      const Limits limits = c.limits(workers);
      if (heads > 64 && workers == 1) {
        EXPECT_EQ(MetadataBuilder::create(backend(), c.problem(), limits).status().field(), "limits.workers");
        continue;
      }
      expect_agreement(backend(), c, {}, &limits);
    }
}

TEST_F(GpuDecode, ManyRequestsAndOneLongOne) {
  DecodeCase c = gpu_case({}, 8);
  c.requests.assign(300, {1, 5});
  expect_agreement(backend(), c);
  expect_agreement(backend(), gpu_case({{1, 12'345}}, 16));
  expect_agreement(backend(), gpu_case({{1, 4097}}, 128));
}

// Scales that make all tokens count the same, or one of them alone.
TEST_F(GpuDecode, SmallAndLargeScales) {
  for (std::int32_t heads : {16, 48, 64, 128})
    for (float scale : {1e-6f, 0.7f}) {
      DecodeCase c = gpu_case({{1, 700}, {2, 131}, {3, 2}}, heads);
      c.scale = scale;
      expect_agreement(backend(), c);
    }
}

// Joined by slices: fewer partials than rows, as many, more of them than a row has values.
TEST_F(GpuDecode, TilesInAnyNumberOfPieces) {
  std::size_t index = 0;
  for (std::int32_t heads : {1, 3, 16, 48, 64, 128})
    for (std::int32_t pieces : {2, 3, 4, 5, 8, 17, 40, 131}) {
      DecodeCase c = gpu_case({{1, 64 * 140}, {1, 100}}, heads);
      if (index % 3 == 1) c.kv_format = KvFormat::f16, c.q_dtype = Dtype::f16, c.out_dtype = Dtype::f32;
      c.latent = (index / 8 + index % 8) % 3 == 2 ? 256 : 512;
      c.seed = 900 + static_cast<std::uint64_t>(heads + pieces);
      expect_agreement(backend(), c, {.policy = Policy::uniform(pieces)});
      ++index;
    }
  expect_agreement(backend(), gpu_case({{1, 65'536}}, 1), {.policy = Policy::uniform(1024)});
}

// Partials are half precision, the cache need not be within its range.
TEST_F(GpuDecode, SplitTilesKeepTheRangeOfTheCache) {
  for (float spread : {0x1p-60f, 0x1p20f, 0x1p60f})
    for (std::int32_t heads : {3, 16, 48, 64, 128}) {
      DecodeCase c = gpu_case({{1, 900}, {2, 300}}, heads);
      c.kv_spread = spread;
      c.out_dtype = heads % 16 == 0 ? Dtype::bf16 : Dtype::f32;
      for (std::int32_t pieces : {2, 4, 9}) expect_agreement(backend(), c, {.policy = Policy::uniform(pieces)});
    }
}

// The pages of an ordinary batch, spread over a cache whose element offsets pass 2^32.
TEST_F(GpuDecode, PagesBeyondTwoToThe32ElementsAreFound) {
  constexpr std::int64_t kElements = (std::int64_t{1} << 32) + (std::int64_t{1} << 28);
  const struct {
    std::int32_t heads, page_size;
  } shapes[] = {{4, 16}, {4, 7}, {32, 16}, {32, 7}, {64, 16}, {64, 7}};  // swapped16, plain and pairs
  for (const auto [heads, page_size] : shapes) {
    PreparedCase prepared(gpu_case({{1, 300}, {2, 70}, {1, 16}}, heads, page_size));
    DecodeBatch& batch = prepared.batch;
    const DecodeCase& c = batch.description();
    const DecodeArgs host = batch.args();
    const auto page_bytes = static_cast<std::size_t>(host.kv_cache.stride[0]) * 2;
    const std::int64_t far_pages = kElements / host.kv_cache.stride[0], pages = host.kv_cache.shape[0];
    const auto memory = DeviceMemory::allocate(backend(), static_cast<std::size_t>(far_pages) * page_bytes);
    if (!memory) GTEST_SKIP() << memory.status().message();
    const auto far_page = [&](std::int64_t page) { return far_pages - 1 - page * (far_pages / (2 * pages)); };
    for (std::int64_t page = 0; page < pages; ++page)
      ASSERT_TRUE(succeeded(copy_to_device(backend(), memory->data() + far_page(page) * page_bytes,
                                           host.kv_cache.bytes() + page * page_bytes, page_bytes)));
    std::vector<std::int32_t> table;
    for (std::size_t b = 0; b < c.requests.size(); ++b)
      for (std::int64_t i = 0; i < host.pages.max_pages; ++i) {
        const std::int32_t page =
            host.pages.block_table[static_cast<std::int64_t>(b) * host.pages.block_table_stride + i];
        table.push_back(page >= 0 && page < pages ? static_cast<std::int32_t>(far_page(page)) : page);
      }
    const auto far_table = DeviceMemory::allocate(backend(), table.size() * sizeof(std::int32_t)).value();
    ASSERT_TRUE(
        succeeded(copy_to_device(backend(), far_table.data(), table.data(), table.size() * sizeof(std::int32_t))));

    auto step = DeviceStep::make(backend(), c);
    DecodeArgs args = step->args(stream());
    args.kv_cache.data = memory->data();
    args.kv_cache.shape[0] = far_pages;
    args.pages = {.block_table = reinterpret_cast<const std::int32_t*>(far_table.data()),
                  .block_table_stride = host.pages.max_pages,
                  .max_pages = host.pages.max_pages};
    ASSERT_TRUE(succeeded(decode(step->builder.build(0, batch.lengths(), stream()).value(), args)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(batch)));
    const Comparison result = compare(host.out, host.lse, prepared.oracle, c.tolerance(prepared.oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

}  // namespace
}  // namespace latte::testkit
