// Plans small enough to work out by hand, and the error of every way to ask for an impossible one.
#include "latte/plan.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "plan/arithmetic.hpp"

namespace latte {
namespace {

struct Batch {
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start;
  std::vector<std::int32_t> visible = {};

  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}; }
};

template <class T>
std::vector<T> to_vector(std::span<const T> values) {
  return {values.begin(), values.end()};
}

using Ints = std::vector<std::int32_t>;

Limits roomy_limits() { return {.max_requests = 8, .max_query_tokens = 4, .max_kv_tokens = 4096}; }

// Ticks of a block: 1. A piece costs as much as 16 blocks, as in the worked example of the persistent backend.
PlanConfig example_config(std::int32_t workers, const Policy& policy) {
  return {.heads = 1,
          .row_tile = 16,
          .kv_block = 16,
          .workers = workers,
          .mask = Mask::causal,
          .policy = policy,
          .cost = {.piece_ticks = 16},
          .limits = roomy_limits()};
}

const Batch kExample = {.seq_lens = {100, 1000, 40}, .query_start = {0, 1, 2, 3}};

void expect_consistent(const PlanConfig& config, const Batch& batch, const Plan& plan) {
  const Status status = check_plan(config, batch.lengths(), plan);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(plan.makespan_ticks(), makespan_ticks(config, plan));
}

// Tiles cost 16 + 7, 16 + 63 and 16 + 3 = 121 ticks: shares end at 30, 60 and 90. The first lies in the fixed cost of
// the long request and moves to its edge; the others are 21 and 51 blocks into it. Loads: 23, 37, 46, 28 + 19 = 47.
TEST(Plan, TheExampleOfThePersistentBackendIsCutIntoEqualShares) {
  const PlanConfig config = example_config(4, Policy::balanced());
  const Result<OwnedPlan> owned = OwnedPlan::make(config, kExample.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  const Plan& plan = owned->plan();
  EXPECT_EQ(to_vector(plan.work_indptr), (Ints{0, 1, 2, 3, 5}));
  EXPECT_EQ(to_vector(plan.work_info_set), (std::vector<WorkRecord>{
                                               {0, -1, 0, 1, 0, 100, 0, 0},
                                               {1, 0, 1, 2, 0, 336, 664, 1},
                                               {1, 1, 1, 2, 336, 816, 184, 1},
                                               {1, 2, 1, 2, 816, 1000, 0, 1},
                                               {2, -1, 2, 3, 0, 40, 0, 2},
                                           }));
  EXPECT_EQ(to_vector(plan.reduce_indptr), (Ints{0, 0, 3, 3}));
  EXPECT_EQ(to_vector(plan.reduce_partial_map), (Ints{0, 1, 2}));
  EXPECT_EQ(to_vector(plan.reduce_final_map), (std::vector<RowRange>{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(plan.makespan_ticks(), 47);
  EXPECT_EQ(plan.work_meta_data[kMetaSplits], 0);
  EXPECT_EQ(unsplit_ticks(config, kExample.lengths()).value(), 121);
  expect_consistent(config, kExample, plan);
}

// Pieces in order: 3 + 4, 31 + 32 and 1 + 2 blocks, dealt to workers 0 1 2 0 1 2.
TEST(Plan, UniformDealsItsPiecesInTurn) {
  const PlanConfig config = example_config(3, Policy::uniform(2));
  const Result<OwnedPlan> owned = OwnedPlan::make(config, kExample.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  const Plan& plan = owned->plan();
  EXPECT_EQ(to_vector(plan.work_indptr), (Ints{0, 2, 4, 6}));
  EXPECT_EQ(to_vector(plan.work_info_set), (std::vector<WorkRecord>{
                                               {0, 0, 0, 1, 0, 48, 52, 0},
                                               {1, 3, 1, 2, 496, 1000, 0, 1},
                                               {0, 1, 0, 1, 48, 100, 0, 0},
                                               {2, 4, 2, 3, 0, 16, 24, 2},
                                               {1, 2, 1, 2, 0, 496, 504, 1},
                                               {2, 5, 2, 3, 16, 40, 0, 2},
                                           }));
  EXPECT_EQ(to_vector(plan.reduce_indptr), (Ints{0, 2, 4, 6}));
  EXPECT_EQ(to_vector(plan.reduce_partial_map), (Ints{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(plan.makespan_ticks(), 19 + 48);
  expect_consistent(config, kExample, plan);
}

// Ten tiles of 16 + 64 ticks on eleven workers: any cut costs more than it moves, so each tile has a worker of its own.
TEST(Plan, BalancedLeavesOutWorkersEvenly) {
  const Batch batch = {.seq_lens = Ints(10, 1024), .query_start = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};
  PlanConfig config = example_config(11, Policy::balanced());
  config.limits.max_requests = 10;
  const Result<OwnedPlan> balanced = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(balanced.ok()) << balanced.status().message();
  EXPECT_EQ(balanced->plan().work_meta_data[kMetaSplits], -72);  // more blocks than a tile has
  EXPECT_EQ(to_vector(balanced->plan().work_indptr), (Ints{0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10}));
  expect_consistent(config, batch, balanced->plan());

  config.policy = Policy::uniform(1);
  const Result<OwnedPlan> uniform = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(uniform.ok()) << uniform.status().message();
  EXPECT_EQ(to_vector(uniform->plan().work_indptr), (Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10}));
  EXPECT_EQ(to_vector(uniform->plan().work_info_set), to_vector(balanced->plan().work_info_set));
}

// 32 + 4 * 8 blocks of 10 ticks on ten workers; a cut costs 10 with its piece. Equal shares of 65 ticks come to 82: one
// has 5 blocks behind a cut, and 2 of the next tile. Eight pieces of 8 blocks are 2 + 8 + 80; with two of the workers
// at rest the 80 beyond a cut's 10 count 819/1024: 63.
TEST(Plan, WhereMemoryIsSharedEqualPiecesOnFewerWorkersMayWin) {
  const Batch batch = {.seq_lens = {512, 128, 128, 128, 128}, .query_start = {0, 1, 2, 3, 4, 5}};
  PlanConfig config = example_config(10, Policy::balanced());
  config.cost = {.piece_ticks = 2, .split_ticks = 2, .block_ticks = 10, .alone_percent = 50};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  const Plan& plan = owned->plan();
  EXPECT_EQ(plan.work_meta_data[kMetaSplits], -8);
  EXPECT_EQ(plan.makespan_ticks(), 10 + 63);
  EXPECT_EQ(to_vector(plan.work_indptr), (Ints{0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8}));
  EXPECT_EQ(to_vector(plan.work_info_set), (std::vector<WorkRecord>{
                                               {0, 0, 0, 1, 0, 128, 384, 0},
                                               {0, 1, 0, 1, 128, 256, 256, 0},
                                               {0, 2, 0, 1, 256, 384, 128, 0},
                                               {0, 3, 0, 1, 384, 512, 0, 0},
                                               {1, -1, 1, 2, 0, 128, 0, 1},
                                               {2, -1, 2, 3, 0, 128, 0, 2},
                                               {3, -1, 3, 4, 0, 128, 0, 3},
                                               {4, -1, 4, 5, 0, 128, 0, 4},
                                           }));
  EXPECT_EQ(record_ticks(config, plan.work_info_set[4]), 2 + 80);
  EXPECT_EQ(record_ticks(config, plan, plan.work_info_set[4]), 10 + 72 * 819 / 1024);
  expect_consistent(config, batch, plan);

  config.cost.alone_percent = 98;  // too little to win: 10 + 78
  const Result<OwnedPlan> nearly = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(nearly.ok()) << nearly.status().message();
  EXPECT_EQ(nearly->plan().work_meta_data[kMetaSplits], 0);
  EXPECT_EQ(nearly->plan().makespan_ticks(), 82);

  config.cost.alone_percent = 100;
  const Result<OwnedPlan> apart = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(apart.ok()) << apart.status().message();
  EXPECT_EQ(to_vector(apart->plan().work_info_set), to_vector(nearly->plan().work_info_set));
}

TEST(Plan, EqualPiecesAreTakenBelowTheLineWithAllSplitsAndWithinWhatIsPromised) {
  constexpr plan::Fixed kFixed{.piece = 8, .split = 12};
  EXPECT_EQ(plan::even_limit(100, 100, 80, kFixed), 100);
  EXPECT_EQ(plan::even_limit(100, 105, 80, kFixed), 105);
  EXPECT_EQ(plan::even_limit(100, 112, 80, kFixed), 80 + 20 + 80 / 8);
  EXPECT_EQ(plan::even_limit(2030, 2072, 2000, kFixed), 2000 + 20 + 20);
  EXPECT_EQ(plan::even_limit(2060, 2072, 2000, kFixed), 2060);
}

// Ten tiles of 86 blocks on 66 workers; a pair's ticks. The best line's longest share is 42,175 ticks, but the worker
// that ends one tile and begins the next has two partials, and the line counts one of their splits. Pieces of 15
// blocks, one a worker, are 20,000 + 15 * 1,575. A single tile's line has one piece a worker, and is kept where it is
// as short.
TEST(Plan, EqualPiecesWinWhereOnTheLineAWorkerHasTwoPartials) {
  PlanConfig config = example_config(66, Policy::balanced());
  config.heads = config.row_tile = 128;
  config.kv_block = 48;
  config.cost = {.piece_ticks = 8000, .split_ticks = 12000, .block_ticks = 1575};
  config.limits = {.max_requests = 10, .max_kv_tokens = 32768};
  Batch batch;
  for (std::int32_t b = 0; b < 10; ++b) {
    batch.seq_lens.push_back(4096);
    batch.query_start.push_back(b);
  }
  batch.query_start.push_back(10);
  const Result<OwnedPlan> ten = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(ten.ok()) << ten.status().message();
  EXPECT_EQ(ten->plan().work_meta_data[kMetaSplits], -15);
  EXPECT_EQ(ten->plan().makespan_ticks(), 43625);
  EXPECT_EQ(ten->plan().work_info_set.size(), 60u);
  expect_consistent(config, batch, ten->plan());

  const Batch single = {.seq_lens = {32768}, .query_start = {0, 1}};
  const Result<OwnedPlan> one = OwnedPlan::make(config, single.lengths());
  ASSERT_TRUE(one.ok()) << one.status().message();
  EXPECT_EQ(one->plan().work_meta_data[kMetaSplits], 0);
  EXPECT_EQ(one->plan().work_info_set.size(), 66u);
  expect_consistent(config, single, one->plan());

  const Batch fits = {.seq_lens = {66 * 8 * 48}, .query_start = {0, 1}};  // the line has a share of 9 blocks
  const Result<OwnedPlan> eights = OwnedPlan::make(config, fits.lengths());
  ASSERT_TRUE(eights.ok()) << eights.status().message();
  EXPECT_EQ(eights->plan().work_meta_data[kMetaSplits], -8);
  EXPECT_EQ(eights->plan().makespan_ticks(), 20000 + 8 * 1575);
}

TEST(Plan, BatchInvariantCutsAtMultiplesOfTheChunk) {
  const PlanConfig config = example_config(2, Policy::batch_invariant(500));  // rounded up to 512
  const Result<OwnedPlan> owned = OwnedPlan::make(config, kExample.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_EQ(to_vector(owned->plan().work_info_set), (std::vector<WorkRecord>{
                                                        {0, -1, 0, 1, 0, 100, 0, 0},
                                                        {1, 0, 1, 2, 0, 512, 488, 1},
                                                        {1, 1, 1, 2, 512, 1000, 0, 1},
                                                        {2, -1, 2, 3, 0, 40, 0, 2},
                                                    }));
  expect_consistent(config, kExample, owned->plan());
}

// Chunks of 512 tokens: four of the first request, one of each other. By the middles of their shares the line would
// give one of seven workers two, as pieces behind a cut are longer; no more pieces than workers are one each.
TEST(Plan, BatchInvariantDealsNoMorePiecesThanWorkersOneEach) {
  const Batch batch = {.seq_lens = {2048, 512, 512, 512}, .query_start = {0, 1, 2, 3, 4}};
  PlanConfig config = example_config(7, Policy::batch_invariant(512));
  config.cost.split_ticks = 40 * config.cost.block_ticks;
  const Result<OwnedPlan> seven = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(seven.ok()) << seven.status().message();
  EXPECT_EQ(to_vector(seven->plan().work_indptr), (Ints{0, 1, 2, 3, 4, 5, 6, 7}));
  expect_consistent(config, batch, seven->plan());

  config.workers = config.limits.workers = 9;
  const Result<OwnedPlan> nine = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(nine.ok()) << nine.status().message();
  EXPECT_EQ(to_vector(nine->plan().work_indptr), (Ints{0, 1, 2, 2, 3, 4, 5, 5, 6, 7}));
  EXPECT_EQ(to_vector(nine->plan().work_info_set), to_vector(seven->plan().work_info_set));
}

TEST(Plan, TheLatestRowOfATileDecidesHowFarItReads) {
  PlanConfig config = example_config(1, Policy::balanced());
  config.heads = 3;
  config.row_tile = 4;
  config.kv_block = 4;
  // Two query tokens see 9 and 10 tokens. Rows 0-2 are the first's, 3-5 the second's; then a request that sees nothing.
  const Batch batch = {.seq_lens = {10, 5, 0}, .query_start = {0, 2, 2, 3}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_EQ(to_vector(owned->plan().work_info_set), (std::vector<WorkRecord>{
                                                        {0, -1, 0, 4, 0, 10, 0, 0},
                                                        {0, -1, 4, 6, 0, 10, 0, 1},
                                                        {2, -1, 6, 9, 0, 0, 0, 2},
                                                    }));
  expect_consistent(config, batch, owned->plan());

  config.row_tile = 3;  // a tile a token: the first now stops one token early
  const Result<OwnedPlan> trimmed = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(trimmed.ok()) << trimmed.status().message();
  EXPECT_EQ(trimmed->plan().work_info_set[0], (WorkRecord{0, -1, 0, 3, 0, 9, 1, 0}));
  EXPECT_EQ(trimmed->plan().work_info_set[1], (WorkRecord{0, -1, 3, 6, 0, 10, 0, 1}));

  config.mask = Mask::none;
  const Result<OwnedPlan> unmasked = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(unmasked.ok()) << unmasked.status().message();
  EXPECT_EQ(unmasked->plan().work_info_set[0], (WorkRecord{0, -1, 0, 3, 0, 10, 0, 0}));
}

TEST(Plan, VisibleBoundsReplaceTheMask) {
  PlanConfig config = example_config(1, Policy::balanced());
  config.row_tile = 2;
  const Batch batch = {.seq_lens = {64, 64}, .query_start = {0, 3, 4}, .visible = {40, 8, 0, 64}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_EQ(to_vector(owned->plan().work_info_set), (std::vector<WorkRecord>{
                                                        {0, -1, 0, 2, 0, 40, 24, 0},
                                                        {0, -1, 2, 3, 0, 0, 64, 1},
                                                        {1, -1, 3, 4, 0, 64, 0, 2},
                                                    }));
  expect_consistent(config, batch, owned->plan());
}

TEST(Plan, AnEmptyBatchIsAPlanWithoutRecords) {
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(64)}) {
    const PlanConfig config = example_config(3, policy);
    const Batch batch = {.seq_lens = {}, .query_start = {0}};
    const Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
    ASSERT_TRUE(owned.ok()) << owned.status().message();
    EXPECT_EQ(to_vector(owned->plan().work_indptr), (Ints{0, 0, 0, 0}));
    EXPECT_TRUE(owned->plan().work_info_set.empty());
    EXPECT_EQ(to_vector(owned->plan().reduce_indptr), Ints{0});
    EXPECT_EQ(owned->plan().makespan_ticks(), 0);
    expect_consistent(config, batch, owned->plan());
  }
}

TEST(Plan, OldContentsOfTheBufferDoNotReachThePlanOfAnEmptyBatch) {
  const PlanConfig config = example_config(3, Policy::balanced());
  const Batch batch = {.seq_lens = {1000}, .query_start = {0, 0}};  // KV, but no query
  for (const std::int32_t poison : {-1, 0x5eed5eed, std::numeric_limits<std::int32_t>::max()}) {
    std::vector<std::int32_t> words(static_cast<std::size_t>(plan_sizes(config).value().words), poison);
    const Result<Plan> plan = make_plan(config, batch.lengths(), words);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->makespan_ticks(), 0) << "poison " << poison;
    expect_consistent(config, batch, *plan);
  }
}

// 63 blocks: four shares of 16, 16, 16 and 15, less what the three cuts cost.
TEST(Plan, OneRequestIsSharedByAllWorkers) {
  PlanConfig config = example_config(4, Policy::balanced());
  config.cost = {.piece_ticks = 0, .split_ticks = 0, .block_ticks = 1};
  const Batch batch = {.seq_lens = {1000}, .query_start = {0, 1}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, batch.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  const Plan& plan = owned->plan();
  EXPECT_EQ(to_vector(plan.work_indptr), (Ints{0, 1, 2, 3, 4}));
  EXPECT_EQ(plan.work_info_set.front().kv_begin, 0);
  EXPECT_EQ(plan.work_info_set.back().kv_end, 1000);
  EXPECT_LE(plan.makespan_ticks(), 17);
  expect_consistent(config, batch, plan);
}

TEST(Plan, OneWorkerSplitsNothing) {
  const PlanConfig config = example_config(1, Policy::balanced());
  const Result<OwnedPlan> owned = OwnedPlan::make(config, kExample.lengths());
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_EQ(owned->plan().work_info_set.size(), 3u);
  EXPECT_EQ(owned->plan().partial_rows(), 0);
  EXPECT_EQ(owned->plan().makespan_ticks(), 121);
}

TEST(Plan, RecordTicksChargeASplitToEveryPieceButTheFirst) {
  PlanConfig config = example_config(1, Policy::balanced());
  config.cost = {.piece_ticks = 5, .split_ticks = 7, .block_ticks = 2, .granule_ticks = 3, .row_granule = 4};
  WorkRecord record = {.request = 0,
                       .partial_row = 0,
                       .row_begin = 0,
                       .row_end = 9,
                       .kv_begin = 0,
                       .kv_end = 33,
                       .kv_after = 0,
                       .tile = 0};
  EXPECT_EQ(record_ticks(config, record), 5 + 3 * (2 + 3 * 3));
  record.kv_begin = 16;  // 16 rows make a block cost 14 > 5 + 7, which is what a cut then costs at least
  EXPECT_EQ(record_ticks(config, record), 14 + 2 * (2 + 3 * 3));
  config.cost.split_ticks = 100;
  EXPECT_EQ(record_ticks(config, record), 105 + 2 * (2 + 3 * 3));
}

TEST(Plan, PolicyNamesAreTheOnesTheProgramTakes) {
  EXPECT_STREQ(policy_name(PolicyKind::balanced), "balanced");
  EXPECT_STREQ(policy_name(PolicyKind::uniform), "uniform");
  EXPECT_STREQ(policy_name(PolicyKind::batch_invariant), "batch_invariant");
}

}  // namespace
}  // namespace latte
