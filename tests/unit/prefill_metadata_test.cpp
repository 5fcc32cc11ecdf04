// Prefill's slots, generations, moved builders, workspaces, and that neither build() nor prefill() allocates.
#include <cmath>
#include <new>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

#include "tests/unit/allocation_count.hpp"
#include "tests/unit/bad_prefill.hpp"

namespace latte {
namespace {

using allocation_count::AllocationCount;
using bad_input::PrefillCase;
using bad_input::to_c;

class PrefillSteps : public testing::Test {
 protected:
  PrefillBuilder builder(const BuilderOptions& options) {
    return PrefillBuilder::create(backend_, step_.problem, step_.limits, options).value();
  }

  PrefillCase step_;
  Backend backend_ = Backend::open({.threads = 2}).value();
};

TEST_F(PrefillSteps, BuildAndPrefillAllocateNothing) {
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant()}) {
    SCOPED_TRACE(policy_name(policy.kind));
    PrefillBuilder planner = builder({.policy = policy});
    const PrefillArgs args = step_.args();
    const PrefillLengths lengths = step_.lengths();
    // Not even the first call may: a captured step has no warm-up.
    AllocationCount count;
    const auto metadata = planner.build(0, lengths);
    const std::int64_t built = count.stop();
    ASSERT_TRUE(metadata.ok()) << metadata.status().message();
    EXPECT_EQ(metadata->chunks(), 1);
    EXPECT_EQ(built, 0);
    AllocationCount run_count;
    const Status status = prefill(*metadata, args);
    const std::int64_t run = run_count.stop();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(run, 0);
  }
}

TEST_F(PrefillSteps, SlotsAreStepsOfTheirOwn) {
  PrefillBuilder planner = builder({.policy = {}, .slots = 2});
  const PrefillMetadata first = planner.build(0, step_.lengths()).value();
  step_.context_lens = {0, 0};
  step_.kv_start = {0, 1, 2};
  const PrefillMetadata second = planner.build(1, step_.lengths()).value();
  EXPECT_EQ(first.kv_start()[2], 3);
  EXPECT_EQ(second.kv_start()[2], 2);
  EXPECT_EQ(first.chunks(), 1);
  EXPECT_EQ(second.chunks(), 0);
  EXPECT_NE(first.plan().work_info_set.data(), second.plan().work_info_set.data());
  EXPECT_TRUE(prefill(first, step_.args()).ok());
  EXPECT_TRUE(prefill(second, step_.args()).ok());
}

TEST_F(PrefillSteps, ANewBuildMakesTheOldMetadataStaleAndOnlyThat) {
  PrefillBuilder planner = builder({.policy = {}, .slots = 2});
  const PrefillMetadata other = planner.build(1, step_.lengths()).value();
  const PrefillMetadata old = planner.build(0, step_.lengths()).value();
  const std::int32_t* buffer = old.plan().work_indptr.data();
  const PrefillMetadata fresh = planner.build(0, step_.lengths()).value();
  EXPECT_GT(fresh.generation(), old.generation());
  EXPECT_EQ(fresh.plan().work_indptr.data(), buffer) << "buffers keep their addresses";
  EXPECT_EQ(prefill(old, step_.args()).code(), Code::stale_metadata);
  EXPECT_TRUE(step_.untouched());
  EXPECT_TRUE(prefill(fresh, step_.args()).ok());
  EXPECT_TRUE(prefill(other, step_.args()).ok());
}

TEST_F(PrefillSteps, CarryAllThatWasPlanned) {
  PrefillBuilder planner = builder({.policy = Policy::uniform(2)});
  const PrefillMetadata metadata = planner.build(0, step_.lengths()).value();
  EXPECT_EQ(std::vector(metadata.query_start().begin(), metadata.query_start().end()), step_.query_start);
  EXPECT_STREQ(metadata.kernel(), planner.kernel());
  EXPECT_EQ(metadata.math(), PrefillMath::half);
  EXPECT_EQ(planner.math(), PrefillMath::half);
  EXPECT_FALSE(planner.reason().empty());
  EXPECT_EQ(planner.plan_config().op, Op::prefill);
  EXPECT_EQ(planner.chunk_tokens(), 16);
  const std::vector<std::int32_t> kv_lens{2, 1};
  const StepLengths lengths{.seq_lens = kv_lens, .query_start = step_.query_start};
  EXPECT_TRUE(check_plan(planner.plan_config(), lengths, metadata.plan()).ok());
  PlanConfig unmasked = planner.plan_config();
  unmasked.mask = Mask::none;
  unmasked.limits.max_kv_tokens = 8;
  const StepLengths chunk{.seq_lens = step_.context_lens, .query_start = step_.query_start};
  EXPECT_TRUE(check_plan(unmasked, chunk, metadata.chunk_plan(0)).ok());
  EXPECT_TRUE(metadata.chunk_plan(1).work_info_set.empty());
}

TEST_F(PrefillSteps, NeverBuiltShowsAnEmptyStep) {
  const PrefillMetadata never;
  EXPECT_EQ(never.generation(), 0u);
  EXPECT_TRUE(never.query_start().empty());
  EXPECT_TRUE(never.kv_start().empty());
  EXPECT_TRUE(never.plan().work_info_set.empty());
  EXPECT_EQ(never.plan().workers(), 0);
  EXPECT_EQ(never.chunks(), 0);
  EXPECT_STREQ(never.kernel(), "");
}

TEST_F(PrefillSteps, SurviveAMovedBuilderAndAClosedBackend) {
  std::optional<Backend> backend = Backend::open({.threads = 2}).value();
  PrefillBuilder first = PrefillBuilder::create(*backend, step_.problem, step_.limits).value();
  backend.reset();
  const PrefillMetadata metadata = first.build(0, step_.lengths()).value();
  PrefillBuilder second = std::move(first);
  EXPECT_TRUE(prefill(metadata, step_.args()).ok());
  const auto refused = first.build(0, step_.lengths());  // NOLINT(bugprone-use-after-move): that is the question
  EXPECT_EQ(refused.status().code(), Code::invalid_argument);
  EXPECT_EQ(first.workspace_bytes(), 0u);
  EXPECT_STREQ(first.kernel(), "");
  EXPECT_EQ(first.chunk_tokens(), 0);
  EXPECT_TRUE(second.build(0, step_.lengths()).ok());
  EXPECT_EQ(prefill(metadata, step_.args()).code(), Code::stale_metadata);
}

TEST_F(PrefillSteps, TheCallersWorkspaceGivesTheSameBits) {
  PrefillBuilder owner = builder({.policy = Policy::uniform(2)});
  PrefillBuilder borrower = builder({.policy = Policy::uniform(2), .slots = 1, .own_workspace = false});
  ASSERT_GT(borrower.workspace_bytes(), 0u);
  EXPECT_EQ(owner.workspace_bytes(), borrower.workspace_bytes());
  ASSERT_TRUE(prefill(owner.build(0, step_.lengths()).value(), step_.args()).ok());
  const std::vector<float> expected = step_.out;

  // Memory that held something else before, exactly as large as asked for.
  const std::size_t bytes = borrower.workspace_bytes();
  auto* memory = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{256}));
  std::memset(memory, 0xEE, bytes);
  step_.poison();
  PrefillArgs args = step_.args();
  args.workspace = {memory, bytes};
  EXPECT_TRUE(borrower.init_workspace(args.workspace).ok());
  EXPECT_TRUE(prefill(borrower.build(0, step_.lengths()).value(), args).ok());
  EXPECT_EQ(std::memcmp(expected.data(), step_.out.data(), expected.size() * sizeof(float)), 0);
  ::operator delete[](memory, std::align_val_t{256});
}

TEST_F(PrefillSteps, WithoutRequestsOrRowsAreFine) {
  PrefillBuilder planner = builder({});
  const std::vector<std::int32_t> zero{0};
  const auto empty = planner.build(0, {.query_start = zero, .kv_start = zero});
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  EXPECT_TRUE(prefill(*empty, step_.args()).ok());
  // Keys and context without a query: there is nothing to compute.
  step_.query_start = {0, 0, 0};
  const auto no_rows = planner.build(0, step_.lengths());
  ASSERT_TRUE(no_rows.ok()) << no_rows.status().message();
  EXPECT_TRUE(prefill(*no_rows, step_.args()).ok());
  EXPECT_TRUE(step_.untouched());
  EXPECT_EQ(step_.expanded, 0);
}

TEST_F(PrefillSteps, ContextAloneIsEnough) {
  // No new keys at all: k and v need not be given. The second request sees nothing.
  PrefillBuilder planner = builder({});
  step_.kv_start = {0, 0, 0};
  const PrefillMetadata metadata = planner.build(0, step_.lengths()).value();
  PrefillArgs args = step_.args();
  args.k = args.v = {};
  ASSERT_TRUE(prefill(metadata, args).ok());
  const float score = 0.125f * PrefillCase::kQk * 0.25f * 0.5f;
  EXPECT_NEAR(step_.out[0], 0.75f, 1e-6f);
  EXPECT_NEAR(step_.lse[0], score + std::log(5.0f), 1e-5f);
  constexpr std::size_t kLast = 2 * PrefillCase::kHeads;
  EXPECT_EQ(step_.out[kLast * PrefillCase::kV], 0.0f);
  EXPECT_EQ(step_.lse[kLast], -std::numeric_limits<float>::infinity());
}

TEST_F(PrefillSteps, WithoutContextNeedNoneOfItsArguments) {
  PrefillBuilder planner = builder({});
  step_.context_lens = {0, 0};
  PrefillArgs args = step_.args();
  args.kv_cache = {};
  args.pages = {};
  args.expand = nullptr;
  EXPECT_TRUE(prefill(planner.build(0, step_.lengths()).value(), args).ok());
  EXPECT_TRUE(
      prefill(planner.build(0, {.query_start = step_.query_start, .kv_start = step_.kv_start}).value(), args).ok());
}

TEST_F(PrefillSteps, ChunksStayWithinTheLimitOnMemory) {
  // 700 tokens in the cache, chunks of the smallest size there is.
  step_.problem.context->max_tokens = 700;
  step_.problem.context->workspace_bytes = 1;
  const auto refused = PrefillBuilder::create(backend_, step_.problem, step_.limits);
  ASSERT_EQ(refused.status().field(), "context.workspace_bytes");
  step_.problem.context->workspace_bytes = std::stoll(refused.status().expected().substr(3));
  PrefillBuilder planner = builder({});
  EXPECT_EQ(planner.chunk_tokens(), 257);
  step_.context_lens = {700, 0};
  step_.cache.assign(static_cast<std::size_t>(175 * PrefillCase::kPageSize * PrefillCase::kWidth), 0.5f);
  step_.block_table.assign(350, 0);
  PrefillArgs args = step_.args();
  args.pages.block_table_stride = args.pages.max_pages = 175;
  const PrefillMetadata metadata = planner.build(0, step_.lengths()).value();
  EXPECT_EQ(metadata.chunks(), 3);
  ASSERT_TRUE(prefill(metadata, args).ok());
  EXPECT_EQ(step_.expanded, 3);
  const float score = 0.125f * PrefillCase::kQk * 0.25f * 0.5f;
  EXPECT_NEAR(step_.lse[0], score + std::log(701.0f), 1e-4f);
  EXPECT_NEAR(step_.out[0], 0.75f, 1e-5f);
}

}  // namespace
}  // namespace latte
