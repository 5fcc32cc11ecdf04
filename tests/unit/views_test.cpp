// The overlap test of output views against every pair of elements, and the support table that the validation gives.
#include "backend/views.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/errors.hpp"
#include "latte/backend.hpp"

namespace latte::backend {
namespace {

bool disjoint_by_counting(std::int64_t extent0, std::int64_t stride0, std::int64_t extent1, std::int64_t stride1,
                          std::int64_t width) {
  std::set<std::int64_t> seen;
  for (std::int64_t i = 0; i < extent0; ++i)
    for (std::int64_t j = 0; j < extent1; ++j)
      for (std::int64_t k = 0; k < width; ++k)
        if (!seen.insert(i * stride0 + j * stride1 + k).second) return false;
  return true;
}

TEST(Views, RowsAreDisjointExactlyWhenNoElementIsShared) {
  int overlapping = 0, apart = 0;
  for (std::int64_t extent0 = 0; extent0 <= 4; ++extent0)
    for (std::int64_t extent1 = 0; extent1 <= 4; ++extent1)
      for (std::int64_t width = 1; width <= 3; ++width)
        for (std::int64_t stride0 = -10; stride0 <= 10; ++stride0)
          for (std::int64_t stride1 = -10; stride1 <= 10; ++stride1) {
            const bool expected = disjoint_by_counting(extent0, stride0, extent1, stride1, width);
            ++(expected ? apart : overlapping);
            ASSERT_EQ(rows_disjoint(extent0, stride0, extent1, stride1, width), expected)
                << "[" << extent0 << ", " << extent1 << ", " << width << "] strides " << stride0 << ", " << stride1;
          }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(Views, FreeStridesAndMissingRowsAreTaken) {
  std::vector<float> memory(64);
  const ViewRule rule{.field = "x", .rank = 3, .shape = {2, 2, 4}, .dtypes = dtype_bit(Dtype::f32)};
  TensorView view = dense(memory.data(), Dtype::f32, {3, 2, 4});
  EXPECT_TRUE(check_view(view, rule).ok());
  view.stride = {4, 12, 1};  // transposed
  EXPECT_TRUE(check_view(view, rule).ok());
  view.data = memory.data() + 32;
  view.stride = {-8, 4, 1};  // backwards
  EXPECT_TRUE(check_view(view, rule).ok());
  view.shape[0] = 1;
  EXPECT_EQ(check_view(view, rule).got(), "[1, 2, 4]");
  EXPECT_EQ(check_view(view, rule).expected(), "shape [>= 2, 2, 4]");
  // An empty tensor may have no address.
  const ViewRule empty{.field = "x", .rank = 3, .shape = {0, 2, 4}, .dtypes = dtype_bit(Dtype::f32)};
  EXPECT_TRUE(check_view(dense(static_cast<void*>(nullptr), Dtype::f32, {0, 2, 4}), empty).ok());
}

std::string row(const SupportTable& table, const std::string& feature, const std::string& backend = "cpu") {
  const auto column = std::find(table.backends.begin(), table.backends.end(), backend) - table.backends.begin();
  for (const SupportRow& entry : table.rows)
    if (entry.feature == feature) return entry.answers.at(static_cast<std::size_t>(column));
  return "no such row";
}

TEST(SupportTable, SaysWhatTheContractPromises) {
  const SupportTable table = support_table();
  EXPECT_EQ(row(table, "decode, bf16 cache: query dtypes"), "bf16, f16, f32");
  EXPECT_EQ(row(table, "decode, fp8_e4m3 cache: query dtypes"), "bf16, f16, f32, fp8_e4m3");
  EXPECT_NE(row(table, "decode, fp8_ds_mla cache: query dtypes").find("bf16, f16"), std::string::npos);
  EXPECT_EQ(row(table, "output dtypes"), "bf16, f16, f32");
  EXPECT_EQ(row(table, "query heads"), "any >= 1");
  EXPECT_EQ(row(table, "latent/rope widths"), "512/64, 256/64, other multiples of 16");
  EXPECT_EQ(row(table, "page sizes"), "any >= 1");
  EXPECT_EQ(row(table, "page lists"), "block table (free row stride), CSR");
  EXPECT_EQ(row(table, "query layouts"), "one tensor, q_nope + q_pe (free strides)");
  EXPECT_EQ(row(table, "masks"), "causal, none, visible tokens per query");
  EXPECT_EQ(row(table, "LSE"), "optional, f32 (free strides)");
  EXPECT_EQ(row(table, "planning policies"), "balanced, uniform, batch_invariant");
  EXPECT_EQ(row(table, "prefill: q, k and v dtypes"), "bf16, f16, f32, fp8_e4m3");
  EXPECT_EQ(row(table, "prefill: output dtypes"), "bf16, f16, f32");
  EXPECT_EQ(row(table, "prefill: heads"), "any >= 1");
  EXPECT_EQ(row(table, "prefill: qk/v widths"), "192/128, other multiples of 16");
  EXPECT_EQ(row(table, "prefill: masks"), "causal, none");
  EXPECT_EQ(row(table, "prefill: planning policies"), "balanced, uniform, batch_invariant");
  EXPECT_EQ(row(table, "prefill: caches of older tokens"), "bf16, f16, f32, fp8_e4m3, fp8_ds_mla");
  EXPECT_EQ(row(table, "merge dtypes"), "bf16, f16, f32");
  EXPECT_EQ(row(table, "merge partials"), "any >= 1");
  EXPECT_EQ(row(table, "write_kv formats"), "bf16, f16, f32, fp8_e4m3, fp8_ds_mla");
}

TEST(SupportTable, HasAnAnswerOfEveryBackendInEveryRow) {
  const SupportTable table = support_table();
  EXPECT_EQ(table.backends, (std::vector<std::string>{"cpu", "cuda"}));
  for (const SupportRow& entry : table.rows) EXPECT_EQ(entry.answers.size(), table.backends.size()) << entry.feature;
}

// Decided without a GPU, so the table is the same in every build.
TEST(SupportTable, SaysWhatCudaServes) {
  const SupportTable table = support_table();
  const auto cuda = [&](const std::string& feature) { return row(table, feature, "cuda"); };
  EXPECT_EQ(cuda("decode, bf16 cache: query dtypes"), "bf16");
  EXPECT_EQ(cuda("decode, f16 cache: query dtypes"), "f16");
  EXPECT_EQ(cuda("decode, fp8_e4m3 cache: query dtypes"), "no");
  EXPECT_EQ(cuda("output dtypes"), "bf16, f16, f32");
  EXPECT_EQ(cuda("query heads"), "any >= 1");
  EXPECT_EQ(cuda("latent/rope widths"), "512/64, 256/64");
  EXPECT_EQ(cuda("page sizes"), "any >= 1");
  EXPECT_EQ(cuda("page lists"), "block table (free row stride), CSR");
  EXPECT_EQ(cuda("query layouts"), "one tensor, q_nope + q_pe (free strides)");
  EXPECT_EQ(cuda("masks"), "causal, none, visible tokens per query");
  EXPECT_EQ(cuda("planning policies"), "balanced, uniform, batch_invariant");
  EXPECT_EQ(cuda("prefill: q, k and v dtypes"), "bf16, f16, fp8_e4m3");
  EXPECT_EQ(cuda("prefill: output dtypes"), "bf16, f16, f32");
  EXPECT_EQ(cuda("prefill: heads"), "any >= 1");
  EXPECT_EQ(cuda("prefill: qk/v widths"), "192/128");
  EXPECT_EQ(cuda("prefill: masks"), "causal, none");
  EXPECT_EQ(cuda("merge partials"), "1 to 64");
}

}  // namespace
}  // namespace latte::backend
