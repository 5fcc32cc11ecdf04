#include "cli/bench.hpp"

#include <vector>

#include <gtest/gtest.h>

namespace latte::cli {
namespace {

TEST(Bench, TheMedianAndTheInterquartileRangeAreThoseOfTheSamples) {
  std::vector<double> odd = {5, 1, 4, 2, 3};
  EXPECT_DOUBLE_EQ(summarize(odd).median_us, 3);
  EXPECT_DOUBLE_EQ(summarize(odd).spread_us, 2);
  std::vector<double> even = {4, 1, 3, 2};
  EXPECT_DOUBLE_EQ(summarize(even).median_us, 2.5);
  std::vector<double> one = {7};
  EXPECT_DOUBLE_EQ(summarize(one).median_us, 7);
  EXPECT_DOUBLE_EQ(summarize(one).spread_us, 0);
}

TEST(Bench, TheFloorIsTheLargerOfReadingAndArithmetic) {
  BenchRow row;
  row.bytes = 1e9;
  row.flops = 1e12;
  row.time.median_us = 4e6;
  EXPECT_DOUBLE_EQ(row.floor_us({.read_gbps = 10, .tflops = 0.5}), 2e6);
  EXPECT_DOUBLE_EQ(row.over_floor({.read_gbps = 10, .tflops = 0.5}), 2);
  EXPECT_DOUBLE_EQ(row.floor_us({.read_gbps = 0.5, .tflops = 10}), 2e6);
  EXPECT_DOUBLE_EQ(row.gbps(), 0.25);
  EXPECT_DOUBLE_EQ(row.tflops(), 0.25);
}

TEST(Bench, OnlyPairsThatTheMaskLetsThroughAreWork) {
  testkit::DecodeCase description{
      .requests = {{.query_tokens = 3, .kv_tokens = 10}}, .heads = 2, .latent = 512, .rope = 64};
  const double pair = 2.0 * 2 * (576 + 512);
  EXPECT_DOUBLE_EQ(visible_flops(description), pair * (8 + 9 + 10));
  description.mask = Mask::none;
  EXPECT_DOUBLE_EQ(visible_flops(description), pair * 30);
  description.requests = {{.query_tokens = 1, .kv_tokens = 10}};
  description.mask = Mask::causal;
  EXPECT_DOUBLE_EQ(visible_flops(description), description.flops()) << "one query token sees everything";
}

}  // namespace
}  // namespace latte::cli
