// What a NaN that a row sees does: to that row, and to nobody else's.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class Nan : public EachKernel {};

// A few heads and many: kernels may have products of their own for a few rows.
TEST_P(Nan, InAVisibleKeyIsInTheRowAndItsLseAndInNoOtherRequest) {
  constexpr std::int64_t kLatent = 512, kRow = 576, kPage = 64;
  const std::int32_t seq_lens[] = {50, 50}, query_start[] = {0, 1, 2}, pages[] = {0, 1};
  for (const std::int32_t heads : {3, 40}) {
    for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8_e4m3}) {
      const DecodeProblem problem{.heads = heads, .out_dtype = Dtype::f32, .kv_format = format, .page_size = kPage};
      auto builder = MetadataBuilder::create(backend, problem, {.max_requests = 2, .max_kv_tokens = kPage}).value();
      const auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start}).value();
      const Dtype dtype = kv_element_dtype(format);
      const std::size_t size = dtype_bytes(dtype), rows = 2 * static_cast<std::size_t>(heads);
      const std::vector<std::uint16_t> q(rows * kRow, 0x3f80);
      std::vector<std::byte> ones(2 * kPage * kRow * size);
      for (std::size_t i = 0; i < ones.size(); i += size) store(dtype, 1.0, &ones[i]);
      // In the latent part of a key, which is also a value, and in its rope part, which is not.
      for (const std::size_t column : {3, 540}) {
        for (const std::size_t token : {0, 17, 49}) {
          std::vector<std::byte> cache = ones;
          store(dtype, std::nan(""), &cache[(token * kRow + column) * size]);
          std::vector<float> out(rows * kLatent), lse(rows);
          const Status status = decode(step, {.q = dense(q.data(), Dtype::bf16, {2, heads, kRow}),
                                              .kv_cache = dense(cache.data(), dtype, {2, kPage, kRow}),
                                              .pages = {.block_table = pages, .block_table_stride = 1, .max_pages = 1},
                                              .out = dense(out.data(), Dtype::f32, {2, heads, kLatent}),
                                              .lse = dense(lse.data(), Dtype::f32, {2, heads}),
                                              .scale = 0.01f});
          ASSERT_TRUE(status.ok()) << status.message();
          for (std::size_t row = 0; row < rows; ++row) {
            const bool hit = row < rows / 2;
            EXPECT_EQ(std::isnan(lse[row]), hit)
                << lse[row] << " token " << token << " column " << column << " row " << row;
            for (const std::size_t at : {0, 3, 511})
              EXPECT_EQ(std::isnan(out[row * kLatent + at]), hit) << "token " << token << " column " << column;
            if (!hit) {
              EXPECT_NEAR(out[row * kLatent], 1, 1e-2);
            }
          }
        }
      }
    }
  }
}

TEST_P(Nan, InAVisibleKeyOfAPromptIsInItsRowsAndInNoOtherRequest) {
  constexpr std::int64_t kHeads = 2, kTokens = 70, kQk = 192, kV = 128;
  const PrefillProblem problem{.heads = kHeads, .dtype = Dtype::bf16, .out_dtype = Dtype::f32, .mask = Mask::none};
  auto builder =
      PrefillBuilder::create(backend, problem, {.max_requests = 2, .max_query_tokens = 3, .max_kv_tokens = kTokens})
          .value();
  constexpr std::uint16_t kOne = 0x3f80, kNotANumber = 0x7fc0;
  const std::int32_t query_start[] = {0, 3, 6}, kv_start[] = {0, kTokens, 2 * kTokens};
  const auto step = builder.build(0, {.query_start = query_start, .kv_start = kv_start}).value();
  const std::vector<std::uint16_t> q(6 * kHeads * kQk, kOne), v(2 * kTokens * kHeads * kV, kOne);
  for (const std::int64_t token : {0, 31, 69}) {
    std::vector<std::uint16_t> k(2 * kTokens * kHeads * kQk, kOne);
    k[static_cast<std::size_t>(token * kHeads * kQk + 5)] = kNotANumber;  // of the first head
    std::vector<float> out(6 * kHeads * kV), lse(6 * kHeads);
    const Status status = prefill(step, {.q = dense(q.data(), Dtype::bf16, {6, kHeads, kQk}),
                                         .k = dense(k.data(), Dtype::bf16, {2 * kTokens, kHeads, kQk}),
                                         .v = dense(v.data(), Dtype::bf16, {2 * kTokens, kHeads, kV}),
                                         .out = dense(out.data(), Dtype::f32, {6, kHeads, kV}),
                                         .lse = dense(lse.data(), Dtype::f32, {6, kHeads}),
                                         .scale = 0.01f});
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::size_t row = 0; row < 6 * kHeads; ++row) {
      const bool hit = row < 3 * kHeads && row % kHeads == 0;
      EXPECT_EQ(std::isnan(lse[row]), hit) << lse[row] << " token " << token << " row " << row;
      EXPECT_EQ(std::isnan(out[row * kV]), hit) << out[row * kV] << " token " << token << " row " << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Nan, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
