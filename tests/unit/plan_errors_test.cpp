// What the planner says to configurations and lengths it cannot plan: the code and the field of every refusal.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "latte/plan.hpp"
#include "tests/unit/allocation_count.hpp"

namespace latte {
namespace {

constexpr std::int32_t kHuge = std::numeric_limits<std::int32_t>::max();

PlanConfig good_config() {
  return {.heads = 2,
          .row_tile = 16,
          .kv_block = 16,
          .workers = 4,
          .mask = Mask::causal,
          .policy = Policy::balanced(),
          .cost = {.piece_ticks = 16},
          .limits = {.max_requests = 3,
                     .max_query_tokens = 2,
                     .max_total_query_tokens = 4,
                     .max_kv_tokens = 100,
                     .max_total_kv_tokens = 250}};
}

struct BadConfig {
  const char* field;
  void (*spoil)(PlanConfig&);
  Code code = Code::invalid_argument;
};

const BadConfig kBadConfigs[] = {
    {"op", [](PlanConfig& c) { c.op = static_cast<Op>(2); }},
    {"op", [](PlanConfig& c) { c.op = static_cast<Op>(255); }},
    {"mask", [](PlanConfig& c) { c.mask = static_cast<Mask>(2); }},
    {"mask", [](PlanConfig& c) { c.mask = static_cast<Mask>(255); }},
    {"policy.kind", [](PlanConfig& c) { c.policy.kind = static_cast<PolicyKind>(3); }},
    {"policy.kind", [](PlanConfig& c) { c.policy.kind = static_cast<PolicyKind>(255); }},
    {"heads", [](PlanConfig& c) { c.heads = 0; }},
    {"heads", [](PlanConfig& c) { c.heads = -1; }},
    {"row_tile", [](PlanConfig& c) { c.row_tile = 0; }},
    {"row_tile", [](PlanConfig& c) { c.row_tile = kHuge; }},
    {"kv_block", [](PlanConfig& c) { c.kv_block = 0; }},
    {"workers", [](PlanConfig& c) { c.workers = 0; }},
    {"workers", [](PlanConfig& c) { c.workers = kHuge; }},
    {"limits.workers", [](PlanConfig& c) { c.limits.workers = -1; }},
    {"limits.max_requests", [](PlanConfig& c) { c.limits.max_requests = -1; }},
    {"limits.max_query_tokens", [](PlanConfig& c) { c.limits.max_query_tokens = -1; }},
    {"limits.max_total_query_tokens", [](PlanConfig& c) { c.limits.max_total_query_tokens = -1; }},
    {"limits.max_kv_tokens", [](PlanConfig& c) { c.limits.max_kv_tokens = -1; }},
    {"limits.max_total_kv_tokens", [](PlanConfig& c) { c.limits.max_total_kv_tokens = -1; }},
    {"policy.n", [](PlanConfig& c) { c.policy = Policy::uniform(0); }},
    {"policy.n", [](PlanConfig& c) { c.policy = Policy::uniform(kHuge); }},
    {"policy.n", [](PlanConfig& c) { c.policy = Policy::batch_invariant(0); }},
    {"policy.n", [](PlanConfig& c) { c.policy = Policy::batch_invariant(-16); }},
    {"cost.piece_ticks", [](PlanConfig& c) { c.cost.piece_ticks = -1; }},
    {"cost.split_ticks", [](PlanConfig& c) { c.cost.split_ticks = -1; }},
    {"cost.block_ticks", [](PlanConfig& c) { c.cost.block_ticks = -1; }},
    {"cost.granule_ticks", [](PlanConfig& c) { c.cost.granule_ticks = kHuge; }},
    {"cost.row_granule", [](PlanConfig& c) { c.cost.row_granule = 0; }},
    {"cost.alone_percent", [](PlanConfig& c) { c.cost.alone_percent = 0; }},
    {"cost.alone_percent", [](PlanConfig& c) { c.cost.alone_percent = 101; }},
    {"cost.block_ticks", [](PlanConfig& c) { c.cost.block_ticks = 0; }},
    {"limits.max_total_query_tokens", [](PlanConfig& c) { c.limits.max_total_query_tokens = kHuge; },
     Code::out_of_limits},
    {"limits.max_requests", [](PlanConfig& c) { c.limits.max_requests = kHuge; }, Code::out_of_limits},
};

TEST(PlanErrors, EveryBadConfigurationNamesItsField) {
  for (const BadConfig& bad : kBadConfigs) {
    PlanConfig config = good_config();
    bad.spoil(config);
    const Result<PlanSizes> sizes = plan_sizes(config);
    ASSERT_FALSE(sizes.ok()) << bad.field;
    EXPECT_EQ(sizes.status().code(), bad.code) << sizes.status().message();
    EXPECT_EQ(sizes.status().field(), bad.field) << sizes.status().message();
    EXPECT_FALSE(sizes.status().expected().empty());
    EXPECT_FALSE(sizes.status().got().empty());

    std::vector<std::int32_t> words(10000, 7);
    const std::vector<std::int32_t> seq_lens{1}, query_start{0, 1};
    const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
    EXPECT_EQ(unsplit_ticks(config, lengths).status().field(), bad.field) << "and it ends";
    const Result<Plan> plan = make_plan(config, lengths, words);
    ASSERT_FALSE(plan.ok()) << bad.field;
    EXPECT_EQ(plan.status().field(), bad.field);
    EXPECT_EQ(words, std::vector<std::int32_t>(10000, 7)) << bad.field << ": written in spite of the error";
  }
}

struct BadLengths {
  const char* field;
  Code code;
  std::vector<std::int32_t> seq_lens, query_start, visible;
};

TEST(PlanErrors, EveryBadLengthNamesItsField) {
  const BadLengths table[] = {
      {"seq_lens", Code::out_of_limits, {1, 1, 1, 1}, {0, 1, 2, 3, 4}, {}},
      {"query_start", Code::invalid_argument, {1, 1}, {0, 1}, {}},
      {"query_start", Code::invalid_argument, {1, 1}, {0, 1, 2, 3}, {}},
      {"query_start", Code::invalid_argument, {}, {}, {}},
      {"query_start[0]", Code::invalid_argument, {1}, {1, 2}, {}},
      {"query_start[0]", Code::invalid_argument, {1}, {-1, 0}, {}},
      {"query_start[2]", Code::invalid_argument, {1, 1}, {0, 2, 1}, {}},
      {"query_start[1]", Code::invalid_argument, {1, 1}, {0, std::numeric_limits<std::int32_t>::min(), 1}, {}},
      {"query_start[1]", Code::out_of_limits, {9, 1}, {0, 3, 3}, {}},
      {"query_start[1]", Code::out_of_limits, {9}, {0, kHuge}, {}},
      {"query_start", Code::out_of_limits, {9, 9, 9}, {0, 2, 4, 5}, {}},
      {"seq_lens[1]", Code::invalid_argument, {1, -1}, {0, 1, 2}, {}},
      {"seq_lens[1]", Code::out_of_limits, {1, 101}, {0, 1, 2}, {}},
      {"seq_lens", Code::out_of_limits, {100, 100, 51}, {0, 1, 2, 3}, {}},
      {"visible", Code::invalid_argument, {9, 9}, {0, 1, 2}, {1}},
      {"visible", Code::invalid_argument, {9, 9}, {0, 1, 2}, {1, 1, 1}},
      {"visible[1]", Code::invalid_argument, {9, 9}, {0, 1, 2}, {1, 10}},
      {"visible[0]", Code::invalid_argument, {9, 9}, {0, 1, 2}, {-1, 9}},
  };
  const PlanConfig config = good_config();
  const auto size = static_cast<std::size_t>(plan_sizes(config).value().words);
  for (const BadLengths& bad : table) {
    std::vector<std::int32_t> words(size, 7);
    const StepLengths lengths{.seq_lens = bad.seq_lens, .query_start = bad.query_start, .visible = bad.visible};
    const Result<Plan> plan = make_plan(config, lengths, words);
    ASSERT_FALSE(plan.ok()) << bad.field;
    EXPECT_EQ(plan.status().code(), bad.code) << plan.status().message();
    EXPECT_EQ(plan.status().field(), bad.field) << plan.status().message();
    EXPECT_EQ(words, std::vector<std::int32_t>(size, 7)) << bad.field << ": written in spite of the error";
    EXPECT_FALSE(OwnedPlan::make(config, lengths).ok()) << bad.field;
    EXPECT_EQ(unsplit_ticks(config, lengths).status().field(), bad.field);
  }
}

TEST(PlanErrors, LengthsAtTheLimitsArePlanned) {
  const std::vector<std::int32_t> seq_lens{100, 100, 50}, query_start{0, 2, 4, 4};
  const Result<OwnedPlan> plan =
      OwnedPlan::make(good_config(), {.seq_lens = seq_lens, .query_start = query_start, .visible = {}});
  EXPECT_TRUE(plan.ok()) << plan.status().message();
}

TEST(PlanErrors, APlanThatMemoryHasNoRoomForIsAnErrorAndNotAnException) {
  PlanConfig config = good_config();
  config.limits.max_requests = 100'000;
  const std::vector<std::int32_t> seq_lens{1}, query_start{0, 1};
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
  ASSERT_TRUE(OwnedPlan::make(config, lengths).ok());
  const allocation_count::AllocationLimit short_of_memory(1 << 20);
  const Result<OwnedPlan> plan = OwnedPlan::make(config, lengths);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), Code::out_of_memory);
  EXPECT_EQ(plan.status().field(), "limits");
  EXPECT_EQ(plan.status().got(), std::to_string(plan_sizes(config)->words) + " words");
}

TEST(PlanErrors, ABufferOneWordTooSmallIsRefusedUntouched) {
  const PlanConfig config = good_config();
  std::vector<std::int32_t> words(static_cast<std::size_t>(plan_sizes(config).value().words) - 1, 7);
  const std::vector<std::int32_t> seq_lens{1}, query_start{0, 1};
  const Result<Plan> plan = make_plan(config, {.seq_lens = seq_lens, .query_start = query_start, .visible = {}}, words);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), Code::invalid_argument);
  EXPECT_EQ(plan.status().field(), "words");
  EXPECT_EQ(words, std::vector<std::int32_t>(words.size(), 7));
}

// Each of these overflows 64 bits somewhere if sizes are multiplied without care.
TEST(PlanErrors, HugeLimitsDoNotOverflow) {
  constexpr std::int64_t kHuge64 = std::numeric_limits<std::int64_t>::max();
  PlanConfig rows = good_config();
  rows.heads = 1 << 20;
  rows.row_tile = 1;
  rows.limits = {.max_requests = 1 << 20,
                 .max_query_tokens = kHuge,
                 .max_total_query_tokens = 1,
                 .max_kv_tokens = 1,
                 .max_total_kv_tokens = 1};
  // One token may come, with a tile a head: to refuse is right, and so is a size that holds them.
  if (const Result<PlanSizes> sizes = plan_sizes(rows); sizes.ok())
    EXPECT_GE(sizes->tiles, rows.heads);
  else
    EXPECT_EQ(sizes.status().code(), Code::out_of_limits);

  PlanConfig tokens = good_config();
  tokens.kv_block = 1;
  tokens.limits.max_total_kv_tokens = kHuge64;
  EXPECT_EQ(plan_sizes(tokens).status().code(), Code::out_of_limits);

  PlanConfig chunks = good_config();
  chunks.heads = 1;
  chunks.row_tile = 4096;
  chunks.kv_block = 1;
  chunks.cost = {.piece_ticks = 0, .split_ticks = 0, .block_ticks = 1};
  chunks.policy = Policy::batch_invariant(1);
  for (const std::int64_t total : {std::int64_t{1} << 51, std::int64_t{1} << 59, (std::int64_t{1} << 60) - (1 << 20)}) {
    chunks.limits = {.max_requests = 1,
                     .max_query_tokens = 1,
                     .max_total_query_tokens = 1,
                     .max_kv_tokens = 1,
                     .max_total_kv_tokens = total};
    EXPECT_EQ(plan_sizes(chunks).status().code(), Code::out_of_limits) << total;
  }
}

TEST(PlanErrors, WhatIsTooMuchIsToldInNumbers) {
  const struct {
    const char* got;  // its end
    void (*spoil)(PlanConfig&);
  } rows[] = {
      {"4294967294", [](PlanConfig& c) { c.limits.max_total_query_tokens = kHuge; }},
      {"2147483647", [](PlanConfig& c) { c.limits.max_requests = kHuge; }},
      {"9223372036854775807 tokens",
       [](PlanConfig& c) { c.limits.max_total_kv_tokens = std::numeric_limits<std::int64_t>::max(); }},
      {"2251799813685248",
       [](PlanConfig& c) {
         c.kv_block = 1;
         c.cost = {};
         c.policy = Policy::batch_invariant(1);
         c.limits.max_total_kv_tokens = std::int64_t{1} << 51;
       }},
      {"words and 68719476736 rows",
       [](PlanConfig& c) {
         c.policy = Policy::uniform(4096);
         c.limits.max_requests = 1 << 20;
       }},
  };
  for (const auto& row : rows) {
    PlanConfig config = good_config();
    row.spoil(config);
    const Status status = plan_sizes(config).status();
    EXPECT_EQ(status.code(), Code::out_of_limits) << row.got;
    EXPECT_TRUE(status.got().ends_with(row.got)) << status.message() << ", wanted " << row.got;
  }
}

TEST(PlanErrors, AGranuleOfAnySizeIsOneGranule) {
  PlanConfig config = good_config();
  config.cost = {.piece_ticks = 0, .split_ticks = 0, .block_ticks = 0, .granule_ticks = 5, .row_granule = kHuge};
  EXPECT_TRUE(plan_sizes(config).ok()) << plan_sizes(config).status().message();
  EXPECT_EQ(config.cost.block(16), 5);
}

TEST(PlanErrors, ChunksOfMoreThanHalfTheLongestRequestArePlanned) {
  PlanConfig config = good_config();
  config.heads = 1;
  config.kv_block = 1;
  config.policy = Policy::batch_invariant(1'500'000'000);
  config.limits = {.max_requests = 1, .max_query_tokens = 1, .max_kv_tokens = kHuge};
  const std::vector<std::int32_t> seq_lens{kHuge}, query_start{0, 1};
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, lengths);
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_TRUE(check_plan(config, lengths, owned->plan()).ok());
  ASSERT_EQ(owned->plan().work_info_set.size(), 2u);
  EXPECT_EQ(owned->plan().work_info_set[1].kv_begin, 1'500'000'000);
}

// A block of more tokens than int32 holds twice: rounding to blocks must not wrap.
TEST(PlanErrors, TheLargestBlockIsPlanned) {
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(7)}) {
    PlanConfig config = good_config();
    config.kv_block = kHuge;
    config.policy = policy;
    config.limits = {.max_requests = 2, .max_query_tokens = 1, .max_kv_tokens = kHuge};
    const std::vector<std::int32_t> seq_lens{kHuge, 1}, query_start{0, 1, 2};
    const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
    const Result<OwnedPlan> owned = OwnedPlan::make(config, lengths);
    ASSERT_TRUE(owned.ok()) << owned.status().message();
    EXPECT_TRUE(check_plan(config, lengths, owned->plan()).ok());
    EXPECT_EQ(owned->plan().work_info_set.size(), 2u);
  }
}

// As many records as there may be: random batches hardly ever have them.
TEST(PlanErrors, TheBoundOnRecordsIsReached) {
  PlanConfig config{
      .heads = 4,
      .row_tile = 4,
      .kv_block = 3,
      .workers = 3,
      .mask = Mask::none,
      .policy = Policy::balanced(),
      .cost = {.piece_ticks = 1, .split_ticks = 2, .block_ticks = 1, .granule_ticks = 4, .row_granule = 3},
      .limits = {.max_requests = 6, .max_query_tokens = 1, .max_kv_tokens = 200}};
  const std::vector<std::int32_t> seq_lens{32, 5, 0, 3, 32, 0}, query_start{0, 1, 2, 3, 4, 5, 6};
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, lengths);
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  EXPECT_TRUE(check_plan(config, lengths, owned->plan()).ok());
  EXPECT_EQ(owned->plan().work_info_set.size(), 6u + 2 * 3 - 1);
  EXPECT_EQ(plan_sizes(config)->records, 6 + 2 * 3 - 1);
}

TEST(PlanErrors, MoreWorkersThanAnyMachineHasArePlanned) {
  PlanConfig config = good_config();
  config.workers = 60000;
  const std::vector<std::int32_t> seq_lens{100, 100, 50}, query_start{0, 2, 4, 4};
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
  const Result<OwnedPlan> owned = OwnedPlan::make(config, lengths);
  ASSERT_TRUE(owned.ok()) << owned.status().message();
  const Status status = check_plan(config, lengths, owned->plan());
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace latte
