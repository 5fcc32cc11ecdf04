// Prefill plans small enough to work out by hand, and what is refused only there.
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "latte/plan.hpp"

namespace latte {
namespace {

using Ints = std::vector<std::int32_t>;

template <class T>
std::vector<T> to_vector(std::span<const T> values) {
  return {values.begin(), values.end()};
}

// A tile of b blocks costs 100 + 1000 * b; a cut 1000.
PlanConfig example_config(std::int32_t heads, std::int32_t workers, const Policy& policy = {}) {
  return {.op = Op::prefill,
          .heads = heads,
          .row_tile = 128,
          .kv_block = 128,
          .workers = workers,
          .mask = Mask::causal,
          .policy = policy,
          .cost = {.piece_ticks = 100, .split_ticks = 900, .block_ticks = 1000},
          .limits = {.max_requests = 4, .max_query_tokens = 1024, .max_kv_tokens = 4096}};
}

struct Batch {
  Ints seq_lens, query_start;

  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start}; }
};

OwnedPlan planned(const PlanConfig& config, const Batch& batch) {
  Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
  EXPECT_TRUE(owned.ok()) << owned.status().message();
  const Status status = check_plan(config, batch.lengths(), owned->plan());
  EXPECT_TRUE(status.ok()) << status.message();
  return std::move(*owned);
}

// (first row, KV begin, KV end) of a worker's records.
using Work = std::vector<std::vector<std::int32_t>>;
Work work_of(const Plan& plan, std::size_t worker) {
  Work work;
  for (auto r = static_cast<std::size_t>(plan.work_indptr[worker]);
       r < static_cast<std::size_t>(plan.work_indptr[worker + 1]); ++r)
    work.push_back({plan.work_info_set[r].row_begin, plan.work_info_set[r].kv_begin, plan.work_info_set[r].kv_end});
  return work;
}

// The worked example of docs/plan.md: 512 query tokens over 2048, and a prompt of 256.
const Batch kExample = {.seq_lens = {2048, 256}, .query_start = {0, 512, 768}};

TEST(PlanPrefill, TheWorkedExampleIsWholeTilesAndARestCutToFillTheShares) {
  const OwnedPlan owned = planned(example_config(2, 6), kExample);
  const Plan& plan = owned.plan();
  EXPECT_EQ(unsplit_ticks(example_config(2, 6), kExample.lengths()).value(), 123200);
  EXPECT_EQ(plan.makespan_ticks(), 22100);
  EXPECT_EQ(plan.work_meta_data[kMetaSplits], 0);
  // Head 1 begins at row 768.
  EXPECT_EQ(work_of(plan, 0), (Work{{384, 0, 2048}, {0, 0, 512}}));
  EXPECT_EQ(work_of(plan, 1), (Work{{768 + 384, 0, 2048}, {0, 512, 1152}}));
  EXPECT_EQ(work_of(plan, 2), (Work{{256, 0, 1920}, {0, 1152, 1664}, {768, 0, 128}}));
  EXPECT_EQ(work_of(plan, 3), (Work{{768 + 256, 0, 1920}, {768, 128, 896}}));
  EXPECT_EQ(work_of(plan, 4), (Work{{128, 0, 1792}, {768, 896, 1664}}));
  EXPECT_EQ(work_of(plan, 5),
            (Work{{768 + 128, 0, 1792}, {640, 0, 256}, {768 + 640, 0, 256}, {512, 0, 128}, {768 + 512, 0, 128}}));
  EXPECT_EQ(to_vector(plan.reduce_indptr), (Ints{0, 3, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6}));
  EXPECT_EQ(to_vector(plan.reduce_partial_map), (Ints{0, 128, 256, 384, 512, 640}));
  EXPECT_EQ(to_vector(plan.reduce_final_map).at(11), (RowRange{768 + 640, 768 + 768}));
  EXPECT_EQ(plan.work_info_set[1], (WorkRecord{0, 0, 0, 128, 0, 512, 1536, 0}));
}

// The plain grid takes tiles of 13, 13, 14, 14, 15, 15 blocks, then two of 16 where the shortest ended.
TEST(PlanPrefill, UniformIsThePlainGrid) {
  const OwnedPlan owned = planned(example_config(2, 6, Policy::uniform(1)), kExample);
  EXPECT_EQ(work_of(owned.plan(), 0), (Work{{0, 0, 1664}, {384, 0, 2048}}));
  EXPECT_EQ(owned.plan().makespan_ticks(), 13100 + 16100);
}

TEST(PlanPrefill, BatchInvariantCutsAtChunksOrNever) {
  const OwnedPlan whole = planned(example_config(2, 6, Policy::batch_invariant(0)), kExample);
  EXPECT_TRUE(whole.plan().reduce_partial_map.empty());
  EXPECT_EQ(whole.plan().makespan_ticks(), 14100 + 13100);
  EXPECT_EQ(plan_sizes(example_config(2, 6, Policy::batch_invariant(0)))->partials, 0);
  const OwnedPlan chunked = planned(example_config(2, 6, Policy::batch_invariant(1000)), kExample);  // 1024 tokens
  EXPECT_EQ(chunked.plan().work_meta_data[kMetaSplitTiles], 8);
  EXPECT_EQ(chunked.plan().reduce_partial_map.size(), 16u);
}

// 4 heads of 256 tokens each: two at a time fit a cache of 512 tokens, three would not fit 1023.
TEST(PlanPrefill, HeadsAreDealtInGroupsThatFitTheSharedCache) {
  const Batch batch = {.seq_lens = {256}, .query_start = {0, 256}};
  const auto rows = [&](std::int64_t shared_cache_tokens) {
    PlanConfig config = example_config(4, 1);
    config.shared_cache_tokens = shared_cache_tokens;
    const OwnedPlan owned = planned(config, batch);
    Ints first;
    for (const WorkRecord& record : owned.plan().work_info_set) first.push_back(record.row_begin);
    return first;
  };
  const Ints all = {128, 384, 640, 896, 0, 256, 512, 768}, pairs = {128, 384, 0, 256, 640, 896, 512, 768};
  EXPECT_EQ(rows(0), all);
  EXPECT_EQ(rows(1 << 20), all);
  EXPECT_EQ(rows(512), pairs);
  EXPECT_EQ(rows(1023), pairs);
  EXPECT_EQ(rows(1), (Ints{128, 0, 384, 256, 640, 512, 896, 768}));
}

TEST(PlanPrefill, RowsThatSeeNothingAreStillWritten) {
  const Batch batch = {.seq_lens = {0, 100}, .query_start = {0, 200, 500}};
  const OwnedPlan owned = planned(example_config(3, 5), batch);
  EXPECT_EQ(owned.plan().reduce_final_map.size(), 3u * (2 + 3));
  EXPECT_TRUE(owned.plan().reduce_partial_map.empty());
}

TEST(PlanPrefill, NothingIsPlannedAsNothing) {
  for (const Batch& batch : {Batch{{}, {0}}, Batch{{50, 50}, {0, 0, 0}}})
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(64)}) {
      const OwnedPlan owned = planned(example_config(3, 5, policy), batch);
      EXPECT_TRUE(owned.plan().work_info_set.empty());
      EXPECT_EQ(owned.plan().makespan_ticks(), 0);
    }
}

TEST(PlanPrefill, WhatIsRefusedNamesItsField) {
  const auto refused = [](PlanConfig config) { return plan_sizes(config).status().field(); };
  PlanConfig config = example_config(2, 6);
  config.shared_cache_tokens = -1;
  EXPECT_EQ(refused(config), "shared_cache_tokens");
  EXPECT_EQ(refused(example_config(2, 6, Policy::batch_invariant(-1))), "policy.n");
  config = example_config(2, 6, Policy::batch_invariant(0));
  config.op = Op::decode;
  EXPECT_EQ(refused(config), "policy.n");

  const Ints visible(768, 1);
  StepLengths lengths = kExample.lengths();
  lengths.visible = visible;
  EXPECT_EQ(OwnedPlan::make(example_config(2, 6), lengths).status().field(), "visible");
  const OwnedPlan good = planned(example_config(2, 6), kExample);
  EXPECT_EQ(check_plan(example_config(2, 6), lengths, good.plan()).field(), "visible");
}

TEST(PlanPrefill, HugeLimitsDoNotOverflow) {
  constexpr std::int32_t kHuge = std::numeric_limits<std::int32_t>::max();
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(4096), Policy::batch_invariant(1)})
    for (const std::int32_t heads : {1, 128, kHuge})
      for (const std::int32_t tokens : {1, 1 << 20, kHuge})
        for (const std::int32_t ticks : {1, 1 << 28}) {
          PlanConfig config = example_config(heads, 1 << 16, policy);
          config.row_tile = config.kv_block = 1;
          config.cost.block_ticks = config.cost.piece_ticks = ticks;
          config.limits = {.max_requests = kHuge, .max_query_tokens = tokens, .max_kv_tokens = kHuge};
          const Result<PlanSizes> sizes = plan_sizes(config);
          if (!sizes.ok()) {
            EXPECT_EQ(sizes.status().code(), Code::out_of_limits) << sizes.status().message();
          }
        }
}

// The largest loads that sizes allow: a worker's number in the tournament holds them.
TEST(PlanPrefill, TheMostExpensiveStepIsPlanned) {
  PlanConfig config = example_config(1, 1 << 16);
  config.kv_block = 1;
  config.cost = {.piece_ticks = 1 << 28, .split_ticks = 1 << 28, .block_ticks = 1 << 28};
  config.limits = {.max_requests = 2, .max_query_tokens = 256, .max_kv_tokens = (1 << 14) - 10};
  const Batch batch = {.seq_lens = {(1 << 14) - 10, 9000}, .query_start = {0, 256, 512}};
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(7), Policy::batch_invariant(0)}) {
    config.policy = policy;
    planned(config, batch);
  }
}

// Rows behind the last head's would be past 2^31: they are not counted up to.
TEST(PlanPrefill, TheLongestStepDoesNotOverflow) {
  PlanConfig config = example_config(1, 6);
  config.row_tile = 4096;
  config.limits = {.max_requests = 1, .max_query_tokens = 1'200'000'000, .max_kv_tokens = 64};
  planned(config, {.seq_lens = {64}, .query_start = {0, 1'200'000'000}});
}

}  // namespace
}  // namespace latte
