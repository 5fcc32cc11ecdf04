// Slots, generations, moved builders, and that neither build() nor decode() allocates.
#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "tests/unit/allocation_count.hpp"
#include "tests/unit/bad_input.hpp"

namespace latte {
namespace {

using allocation_count::AllocationCount;
using bad_input::Step;
using bad_input::to_c;

class Metadata : public testing::Test {
 protected:
  MetadataBuilder builder(const BuilderOptions& options) {
    return MetadataBuilder::create(backend_, step_.problem, step_.limits, options).value();
  }

  Step step_;
  Backend backend_ = Backend::open({.threads = 2}).value();
};

TEST_F(Metadata, CountsAllocationsAtAll) {
  AllocationCount count;
  // volatile: a pair of new and delete that nobody sees may be optimised away.
  std::vector<int>* volatile escaped = new std::vector<int>(3);
  EXPECT_EQ(count.stop(), 2);
  delete escaped;
}

TEST_F(Metadata, BuildAndDecodeAllocateNothing) {
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant()}) {
    SCOPED_TRACE(policy_name(policy.kind));
    MetadataBuilder planner = builder({.policy = policy});
    const DecodeArgs args = step_.args();
    step_.visible = {5, 2, 9};
    const StepLengths lengths = step_.lengths();
    // Not even the first call may: a captured step has no warm-up.
    AllocationCount count;
    const auto metadata = planner.build(0, lengths);
    const std::int64_t built = count.stop();
    ASSERT_TRUE(metadata.ok()) << metadata.status().message();
    EXPECT_EQ(built, 0);
    AllocationCount run_count;
    const Status status = decode(*metadata, args);
    const std::int64_t run = run_count.stop();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(run, 0);
  }
}

TEST_F(Metadata, MergingAFewAllocatesNothingFromCppAndFromC) {
  const DecodeArgs args = step_.args();
  std::fill(step_.out.begin(), step_.out.end(), 1.0f);
  std::fill(step_.lse.begin(), step_.lse.end(), 0.0f);
  const std::vector<Partial> parts(32, {args.out, args.lse});
  const std::vector<latte_partial> c_parts(32, {to_c(args.out), to_c(args.lse)});
  latte_merge_args c_args = latte_merge_args_init();
  c_args.partials = c_parts.data();
  c_args.partial_count = static_cast<std::int32_t>(c_parts.size());
  c_args.out = to_c(args.out);
  c_args.lse = to_c(args.lse);
  latte_backend* c_backend = bad_input::open_c();
  AllocationCount count;
  const Status status = merge(backend_, {.partials = parts, .out = args.out, .lse = args.lse});
  const latte_code code = latte_merge(c_backend, &c_args, nullptr);
  EXPECT_EQ(count.stop(), 0);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(code, LATTE_OK);
  latte_backend_close(c_backend, nullptr);
}

TEST_F(Metadata, NoKernelAllocates) {
  int runs = 0;
  for (const KernelInfo& kernel : backend_.info().kernels) {
    if (!kernel.usable) continue;
    const Backend backend = Backend::open({.threads = 2, .kernel = kernel.name}).value();
    for (const auto& [dtype, format] : {std::pair(Dtype::f32, KvFormat::f32), std::pair(Dtype::bf16, KvFormat::bf16)}) {
      SCOPED_TRACE(kernel.name + " " + dtype_name(dtype));
      DecodeProblem problem = step_.problem;
      problem.q_dtype = problem.out_dtype = dtype;
      problem.kv_format = format;
      if (!backend.supports(problem).ok) continue;
      // The step's fp32 memory read as whatever the problem says: only who allocates matters here.
      DecodeArgs args = step_.args();
      args.q.dtype = args.kv_cache.dtype = args.out.dtype = dtype;
      MetadataBuilder planner = MetadataBuilder::create(backend, problem, step_.limits).value();
      const DecodeMetadata metadata = planner.build(0, step_.lengths()).value();
      AllocationCount count;
      const Status status = decode(metadata, args);
      EXPECT_EQ(count.stop(), 0);
      EXPECT_TRUE(status.ok()) << status.message();
      ++runs;
    }
  }
  EXPECT_GE(runs, 2);
}

TEST_F(Metadata, BuildAndDecodeThroughCAllocateNothing) {
  latte_backend* backend = nullptr;
  latte_builder* planner = nullptr;
  ASSERT_EQ(latte_backend_open(nullptr, &backend, nullptr), LATTE_OK);
  const latte_problem problem = to_c(step_.problem);
  const latte_limits limits = to_c(step_.limits);
  ASSERT_EQ(latte_builder_create(backend, &problem, &limits, nullptr, &planner, nullptr), LATTE_OK);
  const latte_lengths lengths = to_c(step_.lengths());
  const latte_decode_args args = to_c(step_.args());
  latte_metadata metadata = LATTE_METADATA_INIT;
  latte_error error = LATTE_ERROR_INIT;
  AllocationCount count;
  const latte_code built = latte_builder_build(planner, 0, &lengths, &metadata, &error);
  const latte_code run = latte_decode(&metadata, &args, &error);
  EXPECT_EQ(count.stop(), 0);
  EXPECT_EQ(built, LATTE_OK);
  EXPECT_EQ(run, LATTE_OK);
  latte_builder_destroy(planner, nullptr);
  latte_backend_close(backend, nullptr);
}

TEST_F(Metadata, SlotsAreStepsOfTheirOwn) {
  MetadataBuilder planner = builder({.policy = {}, .slots = 2});
  const DecodeMetadata first = planner.build(0, step_.lengths()).value();
  step_.seq_lens = {1, 2};
  const DecodeMetadata second = planner.build(1, step_.lengths()).value();
  EXPECT_EQ(first.seq_lens()[1], 9);
  EXPECT_EQ(second.seq_lens()[1], 2);
  EXPECT_NE(first.plan().work_info_set.data(), second.plan().work_info_set.data());
  EXPECT_TRUE(decode(first, step_.args()).ok());
  EXPECT_TRUE(decode(second, step_.args()).ok());
}

TEST_F(Metadata, TwoThreadsPlanAndRunTwoSlotsAtOnce) {
  MetadataBuilder planner = builder({.policy = Policy::uniform(2), .slots = 2});
  std::array<Step, 2> steps;
  std::array<int, 2> failures{};
  const auto run = [&](std::size_t index) {
    Step& step = steps[index];
    for (int round = 0; round < 20; ++round) {
      step.seq_lens[0] = round % 8;
      const auto metadata = planner.build(static_cast<std::int32_t>(index), step.lengths());
      if (!metadata.ok() || !decode(*metadata, step.args()).ok()) ++failures[index];
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(failures, (std::array<int, 2>{}));
  EXPECT_EQ(std::memcmp(steps[0].out.data(), steps[1].out.data(), steps[0].out.size() * sizeof(float)), 0);
}

TEST_F(Metadata, ANewBuildMakesTheOldMetadataStaleAndOnlyThat) {
  MetadataBuilder planner = builder({.policy = {}, .slots = 2});
  const DecodeMetadata other = planner.build(1, step_.lengths()).value();
  const DecodeMetadata old = planner.build(0, step_.lengths()).value();
  const DecodeMetadata copy = old;
  EXPECT_EQ(copy.generation(), old.generation());
  const std::int32_t* buffer = old.plan().work_indptr.data();
  const DecodeMetadata fresh = planner.build(0, step_.lengths()).value();
  EXPECT_GT(fresh.generation(), old.generation());
  EXPECT_EQ(fresh.plan().work_indptr.data(), buffer) << "buffers keep their addresses";
  EXPECT_EQ(decode(old, step_.args()).code(), Code::stale_metadata);
  EXPECT_EQ(decode(copy, step_.args()).code(), Code::stale_metadata);
  EXPECT_TRUE(step_.untouched());
  EXPECT_TRUE(decode(fresh, step_.args()).ok());
  EXPECT_TRUE(decode(other, step_.args()).ok());
}

TEST_F(Metadata, CarriesAllThatWasPlanned) {
  step_.visible = {5, 2, 9};
  MetadataBuilder planner = builder({.policy = Policy::uniform(2)});
  const DecodeMetadata metadata = planner.build(0, step_.lengths()).value();
  EXPECT_EQ(metadata.problem().heads, step_.problem.heads);
  EXPECT_EQ(metadata.plan_config().policy.n, 2);
  EXPECT_EQ(std::vector(metadata.query_start().begin(), metadata.query_start().end()), step_.query_start);
  EXPECT_EQ(std::vector(metadata.visible().begin(), metadata.visible().end()), step_.visible);
  EXPECT_STREQ(metadata.kernel(), planner.kernel());
  EXPECT_EQ(planner.reason(), backend_.choose(step_.problem, step_.limits, Policy::uniform(2)).value().reason);
  EXPECT_TRUE(check_plan(planner.plan_config(), step_.lengths(), metadata.plan()).ok());
  // The lengths were copied: the caller's arrays may go.
  step_.visible.assign(3, -1);
  EXPECT_EQ(metadata.visible()[2], 9);
}

TEST_F(Metadata, ChunksAreShownInTheWholeBlocksThatArePlanned) {
  const auto planned = [&](std::int32_t tokens) {
    return builder({.policy = Policy::batch_invariant(tokens)}).plan_config().policy.n;
  };
  const std::int32_t block = builder({}).plan_config().kv_block;
  EXPECT_EQ(planned(1), block);
  EXPECT_EQ(planned(block), block);
  EXPECT_EQ(planned(block + 1), 2 * block);
  EXPECT_EQ(planned(INT32_MAX), INT32_MAX / block * block);
}

TEST_F(Metadata, NeverBuiltShowsAnEmptyStep) {
  const DecodeMetadata never;
  EXPECT_EQ(never.generation(), 0u);
  EXPECT_TRUE(never.seq_lens().empty());
  EXPECT_TRUE(never.plan().work_info_set.empty());
  EXPECT_EQ(never.plan().workers(), 0);
  EXPECT_EQ(never.plan().makespan_ticks(), 0);
  EXPECT_STREQ(never.kernel(), "");
  EXPECT_EQ(never.problem().heads, 0);
  EXPECT_FALSE(decode(never, step_.args()).ok());
}

TEST_F(Metadata, SurvivesAMovedBuilderAndAClosedBackend) {
  std::optional<Backend> backend = Backend::open({.threads = 2}).value();
  MetadataBuilder first = MetadataBuilder::create(*backend, step_.problem, step_.limits).value();
  backend.reset();
  const DecodeMetadata metadata = first.build(0, step_.lengths()).value();
  MetadataBuilder second = std::move(first);
  EXPECT_TRUE(decode(metadata, step_.args()).ok());
  const auto refused = first.build(0, step_.lengths());  // NOLINT(bugprone-use-after-move): that is the question
  EXPECT_EQ(refused.status().code(), Code::invalid_argument);
  EXPECT_EQ(first.workspace_bytes(), 0u);
  EXPECT_STREQ(first.kernel(), "");
  EXPECT_TRUE(second.build(0, step_.lengths()).ok());
  EXPECT_EQ(decode(metadata, step_.args()).code(), Code::stale_metadata);
  first = std::move(second);
  EXPECT_TRUE(first.build(0, step_.lengths()).ok());
}

TEST_F(Metadata, TheCallersWorkspaceGivesTheSameBits) {
  MetadataBuilder owner = builder({.policy = Policy::uniform(2)});
  MetadataBuilder borrower = builder({.policy = Policy::uniform(2), .slots = 1, .own_workspace = false});
  ASSERT_GT(borrower.workspace_bytes(), 0u);
  EXPECT_EQ(owner.workspace_bytes(), borrower.workspace_bytes());
  ASSERT_TRUE(decode(owner.build(0, step_.lengths()).value(), step_.args()).ok());
  const std::vector<float> expected = step_.out;

  // Memory that held something else before, exactly as large as asked for.
  const std::size_t bytes = borrower.workspace_bytes();
  auto* memory = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64}));
  std::memset(memory, 0xEE, bytes);
  step_.poison();
  DecodeArgs args = step_.args();
  args.workspace = {memory, bytes};
  EXPECT_TRUE(decode(borrower.build(0, step_.lengths()).value(), args).ok());
  EXPECT_EQ(std::memcmp(expected.data(), step_.out.data(), expected.size() * sizeof(float)), 0);
  ::operator delete[](memory, std::align_val_t{64});
}

TEST_F(Metadata, AStepWithoutRequestsOrRowsIsFine) {
  MetadataBuilder planner = builder({});
  const std::vector<std::int32_t> zero{0}, none;
  const auto empty = planner.build(0, {.seq_lens = none, .query_start = zero, .visible = {}});
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  EXPECT_TRUE(decode(*empty, step_.args()).ok());
  const std::vector<std::int32_t> lens{3, 4}, starts{0, 0, 0};
  const auto no_rows = planner.build(0, {.seq_lens = lens, .query_start = starts, .visible = {}});
  ASSERT_TRUE(no_rows.ok()) << no_rows.status().message();
  EXPECT_TRUE(decode(*no_rows, step_.args()).ok());
  EXPECT_TRUE(step_.untouched());
}

}  // namespace
}  // namespace latte
