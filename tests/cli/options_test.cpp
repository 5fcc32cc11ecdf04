#include "cli/options.hpp"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "cli/spec_case.hpp"
#include "cli/table.hpp"

namespace latte::cli {
namespace {

TEST(Options, PoliciesAreReadAndWrittenTheSame) {
  for (const char* text : {"balanced", "uniform:1", "uniform:16", "batch_invariant", "batch_invariant:2048"}) {
    const auto policy = parse_policy(text);
    ASSERT_TRUE(policy.ok()) << text;
    EXPECT_EQ(policy_text(*policy), text);
  }
  for (const char* text : {"", "uniform", "uniform:", "uniform:0", "uniform:-1", "uniform:4x", "uniform:99999999999",
                           "balanced:1", "batch_invariant:", "fair", "uniform:4:4"})
    EXPECT_FALSE(parse_policy(text).ok()) << text;
}

TEST(Options, BytesTakeSuffixes) {
  EXPECT_EQ(parse_bytes("0").value(), 0);
  EXPECT_EQ(parse_bytes("1000").value(), 1000);
  EXPECT_EQ(parse_bytes("3K").value(), 3 << 10);
  EXPECT_EQ(parse_bytes("256M").value(), 256 << 20);
  EXPECT_EQ(parse_bytes("1G").value(), 1 << 30);
  EXPECT_EQ(parse_bytes("9223372036854775807").value(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_bytes("8589934591G").value(), std::int64_t{8589934591} << 30);
  for (const char* text :
       {"8589934592G", "9223372036854775808", "", "M", "-1", "1T", "1GG", "1.5G", "99999999999999999999"})
    EXPECT_FALSE(parse_bytes(text).ok()) << text;
}

TEST(Options, AModelSetsHeadsWidthsAndScale) {
  ShapeOptions options;
  options.model = "deepseek-v3";
  options.tp = 8;
  const auto v3 = resolve(options);
  ASSERT_TRUE(v3.ok()) << v3.status().message();
  EXPECT_EQ(v3->problem.heads, 16);
  EXPECT_EQ(v3->problem.latent, 512);
  EXPECT_EQ(v3->problem.rope, 64);
  EXPECT_NEAR(v3->scale, 1.3688879 * 1.3688879 / std::sqrt(192.0), 1e-6);
  options.model = "kimi-k2";
  EXPECT_EQ(resolve(options).value().problem.heads, 8);
  options.model = "deepseek-v2-lite";
  options.tp = 1;
  EXPECT_EQ(resolve(options).value().problem.heads, 16);
  options.tp = 3;
  EXPECT_FALSE(resolve(options).ok()) << "3 ranks cannot share 16 heads";
  options.tp = 0;
  EXPECT_FALSE(resolve(options).ok());
  options.model = "other";
  EXPECT_FALSE(resolve(options).ok());
}

TEST(Options, TheQueryDtypeFollowsTheCache) {
  const struct {
    const char* kv;
    Dtype q, out;
  } rows[] = {{"bf16", Dtype::bf16, Dtype::bf16},     {"f16", Dtype::f16, Dtype::f16},
              {"fp16", Dtype::f16, Dtype::f16},       {"f32", Dtype::f32, Dtype::f32},
              {"fp8_e4m3", Dtype::bf16, Dtype::bf16}, {"fp8_ds_mla", Dtype::bf16, Dtype::bf16}};
  for (const auto& row : rows) {
    ShapeOptions options;
    options.kv = row.kv;
    const auto shape = resolve(options);
    ASSERT_TRUE(shape.ok()) << row.kv;
    EXPECT_EQ(shape->problem.q_dtype, row.q) << row.kv;
    EXPECT_EQ(shape->problem.out_dtype, row.out) << row.kv;
  }
  ShapeOptions options;
  options.kv = "int4";
  EXPECT_FALSE(resolve(options).ok());
  options.kv = "fp8_e4m3";
  options.q = "fp8_e4m3";
  EXPECT_EQ(resolve(options).value().problem.out_dtype, Dtype::bf16);
}

TEST(Options, ACaseHasTheRequestsOfItsSpec) {
  const auto description = make_case(parse_batch_spec("2q1s100_1q4s50").value(), resolve(ShapeOptions{}).value());
  EXPECT_EQ(description.spec(), "2q1s100_1q4s50");
  EXPECT_EQ(description.heads, 16);
  EXPECT_FLOAT_EQ(description.softmax_scale(), 1 / 24.0f);
}

TEST(Options, MemoryIsCountedInWholePages) {
  testkit::DecodeCase description{
      .requests = {{.query_tokens = 0, .kv_tokens = 1}, {.query_tokens = 0, .kv_tokens = 1}}, .page_size = 1 << 20};
  EXPECT_DOUBLE_EQ(memory_bytes(description), 2.0 * (1 << 20) * 576 * 2);
  description.page_size = std::numeric_limits<std::int32_t>::max();
  EXPECT_DOUBLE_EQ(memory_bytes(description), 2.0 * 2147483647 * 576 * 2);
  description.page_size = 64;
  description.requests = {{.query_tokens = 0, .kv_tokens = 128}, {.query_tokens = 0, .kv_tokens = 129}};
  EXPECT_DOUBLE_EQ(memory_bytes(description), 5.0 * 64 * 576 * 2);
  description.requests = {};
  EXPECT_DOUBLE_EQ(memory_bytes(description), 64.0 * 576 * 2) << "a cache has a page";
  description.requests = {{.query_tokens = 3, .kv_tokens = 64}};
  EXPECT_DOUBLE_EQ(memory_bytes(description), description.bytes()) << "no page has room left";
}

TEST(Options, MemoryThatIsNotThereIsRefused) {
  EXPECT_TRUE(check_memory(1 << 20).ok());
  EXPECT_EQ(check_memory(1e18).code(), Code::out_of_memory);
}

TEST(Table, ColumnsAreAligned) {
  Table table({"name", ">n"});
  table.add({"a", "1"});
  table.add({"µs", "100"});
  EXPECT_EQ(table.text(), "name    n\n----  ---\na       1\nµs    100\n");
}

}  // namespace
}  // namespace latte::cli
