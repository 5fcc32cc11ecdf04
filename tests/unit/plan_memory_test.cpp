// Plans in the caller's memory: how much there must be, what is refused, and a whole step from one workspace.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include <gtest/gtest.h>

#include "tests/unit/allocation_count.hpp"
#include "tests/unit/bad_prefill.hpp"

namespace latte {
namespace {

using allocation_count::AllocationCount;
using bad_input::answer;
using bad_input::expect_error;
using bad_input::PrefillCase;
using bad_input::Step;
using bad_input::to_c;

constexpr std::byte kFill{0xC3};
constexpr std::size_t kEdge = 256;

// As much memory as asked for, with bytes before and behind that must stay as they are.
class Fenced {
 public:
  explicit Fenced(std::size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(::operator new (bytes + 2 * kEdge, std::align_val_t{kEdge}))) {
    std::memset(memory_, static_cast<int>(kFill), bytes + 2 * kEdge);
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  ~Fenced() { ::operator delete (memory_, std::align_val_t{kEdge}); }

  std::span<std::byte> span() const { return {memory_ + kEdge, bytes_}; }
  bool fences_whole() const { return untouched({memory_, kEdge}) && untouched({memory_ + kEdge + bytes_, kEdge}); }
  static bool untouched(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == kFill; });
  }

 private:
  std::size_t bytes_;
  std::byte* memory_;
};

bool lies_within(std::span<const std::byte> memory, const Plan& plan) {
  const std::span<const std::byte> first = std::as_bytes(plan.work_meta_data);
  const std::span<const std::byte> last = std::as_bytes(plan.reduce_partial_map);
  return first.data() >= memory.data() && last.data() + last.size() <= memory.data() + memory.size();
}

// Decode and prefill with context, seen alike.
struct Decode : Step {
  using Builder = MetadataBuilder;
  using Metadata = DecodeMetadata;
  static Status run(const DecodeMetadata& metadata, const DecodeArgs& args) { return decode(metadata, args); }
  static latte_code needs_in_c(const latte_backend* backend, const Decode& step, const latte_builder_options* options,
                               latte_workspace_need* plan, latte_workspace_need* workspace, latte_error* error) {
    const latte_problem problem = to_c(step.problem);
    const latte_limits limits = to_c(step.limits);
    return latte_builder_needs(backend, &problem, &limits, options, plan, workspace, error);
  }
};
struct Prefill : PrefillCase {
  using Builder = PrefillBuilder;
  using Metadata = PrefillMetadata;
  static Status run(const PrefillMetadata& metadata, const PrefillArgs& args) { return prefill(metadata, args); }
  static latte_code needs_in_c(const latte_backend* backend, const Prefill& step, const latte_builder_options* options,
                               latte_workspace_need* plan, latte_workspace_need* workspace, latte_error* error) {
    latte_prefill_context context;
    const latte_prefill_problem problem = to_c(step.problem, context);
    const latte_limits limits = to_c(step.limits);
    return latte_prefill_builder_needs(backend, &problem, &limits, options, plan, workspace, error);
  }
};

template <class Kind>
class PlanMemoryOf : public testing::Test {
 protected:
  using Builder = typename Kind::Builder;

  BuilderNeeds needs(const BuilderOptions& options = {}) const {
    return Builder::needs(backend_, step_.problem, step_.limits, options).value();
  }
  Result<Builder> make(const BuilderOptions& options) const {
    return Builder::create(backend_, step_.problem, step_.limits, options);
  }
  Kind step_;
  Backend backend_ = Backend::open({.threads = 2}).value();
};

using Kinds = testing::Types<Decode, Prefill>;
struct KindNames {
  template <class Kind>
  static std::string GetName(int) {
    return std::is_same_v<Kind, Decode> ? "Decode" : "Prefill";
  }
};
TYPED_TEST_SUITE(PlanMemoryOf, Kinds, KindNames);

TYPED_TEST(PlanMemoryOf, IsSizedFromLimitsBeforeThereIsABuilder) {
  const BuilderNeeds one = this->needs(), three = this->needs({.slots = 3});
  EXPECT_GT(one.plan.bytes, 0u);
  EXPECT_EQ(one.plan.alignment, 256u);
  EXPECT_EQ(one.plan.phases, kEveryPhase);
  EXPECT_EQ(three.plan.bytes, 3 * one.plan.bytes);
  EXPECT_EQ(three.workspace.bytes, one.workspace.bytes) << "of one slot";
  EXPECT_EQ(one.workspace.bytes, this->make({}).value().workspace_bytes());
  // A span that would be refused is of no interest here.
  std::byte small{};
  EXPECT_EQ(this->needs({.plan_memory = {&small, 1}}).plan.bytes, one.plan.bytes);
  this->step_.limits.max_requests *= 100;
  EXPECT_GT(this->needs().plan.bytes, one.plan.bytes);
  this->step_.limits.max_requests = 0;
  EXPECT_EQ(TypeParam::Builder::needs(this->backend_, this->step_.problem, this->step_.limits).status().field(),
            "limits.max_requests");
}

TYPED_TEST(PlanMemoryOf, OfTheCallersHoldsThePlansAndGivesTheSameBits) {
  auto owner = this->make({}).value();
  ASSERT_TRUE(this->step_.run(owner.build(0, this->step_.lengths()).value(), this->step_.args()).ok());
  const auto out = this->step_.out, lse = this->step_.lse;
  this->step_.poison();

  const Fenced memory(this->needs().plan.bytes);
  auto borrower = this->make({.plan_memory = memory.span()}).value();
  EXPECT_TRUE(Fenced::untouched(memory.span())) << "nothing is written before the first build";
  for (int round = 0; round < 2; ++round) {
    AllocationCount count;
    const auto metadata = borrower.build(0, this->step_.lengths());
    EXPECT_EQ(count.stop(), 0);
    ASSERT_TRUE(metadata.ok()) << metadata.status().message();
    EXPECT_TRUE(lies_within(memory.span(), metadata->plan()));
    ASSERT_TRUE(this->step_.run(*metadata, this->step_.args()).ok());
    EXPECT_EQ(std::memcmp(this->step_.out.data(), out.data(), out.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(this->step_.lse.data(), lse.data(), lse.size() * sizeof(float)), 0);
  }
  EXPECT_TRUE(memory.fences_whole());
}

TYPED_TEST(PlanMemoryOf, IsRefusedWhenOneByteShortOrMisaligned) {
  const std::size_t bytes = this->needs({.slots = 2}).plan.bytes;
  const Fenced memory(bytes + kEdge);
  const auto refused = [&](std::span<std::byte> given) {
    return this->make({.slots = 2, .plan_memory = given}).status();
  };
  const Status small = refused(memory.span().first(bytes - 1));
  expect_error(answer(small), Code::invalid_argument, "options.plan_memory");
  EXPECT_EQ(small.expected(), ">= " + std::to_string(bytes) + " bytes");
  EXPECT_EQ(small.got(), std::to_string(bytes - 1));
  for (std::size_t shift : {std::size_t{1}, std::size_t{64}, std::size_t{128}, std::size_t{255}})
    expect_error(answer(refused(memory.span().subspan(shift))), Code::invalid_argument, "options.plan_memory");
  expect_error(answer(refused({static_cast<std::byte*>(nullptr), bytes})), Code::missing_argument,
               "options.plan_memory");
  EXPECT_TRUE(Fenced::untouched(memory.span()));
  EXPECT_TRUE(refused(memory.span().first(bytes)).ok());
  EXPECT_TRUE(refused(memory.span()).ok()) << "more than enough is fine";
}

TYPED_TEST(PlanMemoryOf, IsDividedBetweenTheSlots) {
  const std::size_t slot_bytes = this->needs().plan.bytes;
  const Fenced memory(this->needs({.slots = 3}).plan.bytes);
  auto builder = this->make({.slots = 3, .plan_memory = memory.span()}).value();
  const auto part = [&](std::size_t slot) { return memory.span().subspan(slot * slot_bytes, slot_bytes); };
  const auto last = builder.build(2, this->step_.lengths()).value();
  const auto first = builder.build(0, this->step_.lengths()).value();
  EXPECT_TRUE(lies_within(part(0), first.plan()));
  EXPECT_TRUE(lies_within(part(2), last.plan()));
  EXPECT_TRUE(Fenced::untouched(part(1))) << "a slot that was never built";
  // Each step is whole after the other was built and run.
  const std::vector<std::byte> before(part(2).begin(), part(2).end());
  ASSERT_TRUE(this->step_.run(first, this->step_.args()).ok());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), part(2).begin()));
  EXPECT_TRUE(this->step_.run(last, this->step_.args()).ok());
  EXPECT_TRUE(memory.fences_whole());
}

TYPED_TEST(PlanMemoryOf, OfABuilderThatIsNeverUsedStaysUntouched) {
  const Fenced memory(this->needs({.slots = 2}).plan.bytes);
  ASSERT_TRUE(this->make({.slots = 2, .plan_memory = memory.span()}).ok());
  EXPECT_TRUE(Fenced::untouched(memory.span()));
}

TYPED_TEST(PlanMemoryOf, StaysWhereItIsWhenTheBuilderMoves) {
  const Fenced memory(this->needs().plan.bytes);
  auto first = this->make({.plan_memory = memory.span()}).value();
  const auto metadata = first.build(0, this->step_.lengths()).value();
  const std::int32_t* plan = metadata.plan().work_indptr.data();
  auto second = std::move(first);
  EXPECT_EQ(metadata.plan().work_indptr.data(), plan);
  EXPECT_TRUE(this->step_.run(metadata, this->step_.args()).ok());
  EXPECT_EQ(second.build(0, this->step_.lengths()).value().plan().work_indptr.data(), plan);
  EXPECT_FALSE(first.build(0, this->step_.lengths()).ok());  // NOLINT(bugprone-use-after-move): that is the question
  // It outlives its builder and serves the next one.
  second = this->make({.plan_memory = memory.span()}).value();
  EXPECT_EQ(second.build(0, this->step_.lengths()).value().plan().work_indptr.data(), plan);
}

TYPED_TEST(PlanMemoryOf, IsToldAndTakenThroughCToo) {
  latte_backend* backend = bad_input::open_c();
  latte_builder_options options = LATTE_BUILDER_OPTIONS_INIT;
  options.slots = 2;
  latte_workspace_need plan{}, workspace{};
  latte_error error = LATTE_ERROR_INIT;
  const auto ask = [&](latte_workspace_need* to_plan, latte_workspace_need* to_workspace) {
    return answer(TypeParam::needs_in_c(backend, this->step_, &options, to_plan, to_workspace, &error), error);
  };
  ASSERT_EQ(ask(&plan, &workspace).code, Code::ok);
  // One thread there as here, so that the sizes are the same.
  const Backend one = Backend::open({.threads = 1}).value();
  const BuilderNeeds expected =
      TypeParam::Builder::needs(one, this->step_.problem, this->step_.limits, {.slots = 2}).value();
  EXPECT_EQ(plan.bytes, expected.plan.bytes);
  EXPECT_EQ(plan.alignment, expected.plan.alignment);
  EXPECT_EQ(plan.phases, kEveryPhase);
  EXPECT_EQ(plan.name, expected.plan.name);
  EXPECT_EQ(workspace.bytes, expected.workspace.bytes);
  EXPECT_EQ(workspace.alignment, expected.workspace.alignment);
  EXPECT_EQ(workspace.name, expected.workspace.name);
  expect_error(ask(nullptr, &workspace), Code::missing_argument, "plan");
  expect_error(ask(&plan, nullptr), Code::missing_argument, "workspace");
  options.slots = 0;
  expect_error(ask(&plan, &workspace), Code::invalid_argument, "options.slots");
  EXPECT_EQ(plan.bytes, expected.plan.bytes) << "an error touches nothing";
  // An address without a size is a caller who forgot it, not one who has none.
  options.slots = 1;
  options.plan_memory = &error;
  expect_error(ask(&plan, &workspace), Code::invalid_argument, "options.plan_memory");
  latte_backend_close(backend, nullptr);
}

// 700 tokens in the cache, in chunks of the smallest size there is.
TEST(PlanMemory, HoldsThePlansOfAllChunks) {
  const Backend backend = Backend::open({.threads = 2}).value();
  PrefillCase step;
  step.problem.context->max_tokens = 700;
  step.problem.context->workspace_bytes = 1;
  const auto refused = PrefillBuilder::needs(backend, step.problem, step.limits);
  ASSERT_EQ(refused.status().field(), "context.workspace_bytes");
  step.problem.context->workspace_bytes = std::stoll(refused.status().expected().substr(3));
  step.context_lens = {700, 0};
  step.block_table.assign(350, 0);
  PrefillArgs args = step.args();
  args.pages.block_table_stride = args.pages.max_pages = 175;

  const Fenced memory(PrefillBuilder::needs(backend, step.problem, step.limits).value().plan.bytes);
  auto builder = PrefillBuilder::create(backend, step.problem, step.limits, {.plan_memory = memory.span()}).value();
  const PrefillMetadata metadata = builder.build(0, step.lengths()).value();
  ASSERT_EQ(metadata.chunks(), 3);
  std::vector<const Plan*> plans{&metadata.plan()};
  for (std::int32_t i = 0; i < 3; ++i) plans.push_back(&metadata.chunk_plan(i));
  for (std::size_t i = 0; i < plans.size(); ++i) {
    EXPECT_TRUE(lies_within(memory.span(), *plans[i])) << i;
    for (std::size_t other = 0; other < i; ++other)
      EXPECT_GE(plans[i]->work_meta_data.data(), plans[other]->reduce_partial_map.data()) << i << " on " << other;
  }
  ASSERT_TRUE(prefill(metadata, args).ok());
  EXPECT_NEAR(step.out[0], 0.75f, 1e-5f);
  EXPECT_NEAR(step.lse[0], 0.125f * PrefillCase::kQk * 0.25f * 0.5f + std::log(701.0f), 1e-4f);
  EXPECT_TRUE(memory.fences_whole());
}

TEST(PlanMemory, ThatNoMachineHasIsAnErrorValue) {
  const Backend backend = Backend::open({.threads = 1}).value();
  PrefillCase step;
  step.limits.max_requests = 1 << 20;
  step.problem.context->max_tokens = 1 << 30;
  const BuilderOptions most{.slots = 1024};
  expect_error(answer(PrefillBuilder::needs(backend, step.problem, step.limits, most).status()), Code::out_of_limits,
               "context.max_total_tokens");
  expect_error(answer(PrefillBuilder::create(backend, step.problem, step.limits, most).status()), Code::out_of_limits,
               "context.max_total_tokens");
}

// Two decode steps and two prefill steps in flight, planned and run from one buffer, layer after layer.
TEST(PlanMemory, AWholeStepComesFromOneWorkspace) {
  const Backend backend = Backend::open({.threads = 2}).value();
  Step decodes;
  PrefillCase prefills;
  const BuilderOptions options{.slots = 2, .own_workspace = false};
  const BuilderNeeds decode_needs = MetadataBuilder::needs(backend, decodes.problem, decodes.limits, options).value();
  const BuilderNeeds prefill_needs = PrefillBuilder::needs(backend, prefills.problem, prefills.limits, options).value();
  std::vector<WorkspaceNeed> needs = {decode_needs.plan, prefill_needs.plan, decode_needs.workspace,
                                      prefill_needs.workspace};
  needs[2].phases = 1;
  needs[3].phases = 2;
  Workspace workspace = Workspace::create(backend, needs, {.checks = WorkspaceChecks::on}).value();
  // Garbage first, as after another model.
  for (std::int32_t need = 0; need < 4; ++need) {
    const WorkspaceSlice slice = workspace.take(need).value();
    std::memset(slice.bytes.data(), 0xEE, slice.bytes.size());
    ASSERT_TRUE(workspace.give_back(slice).ok());
  }
  // Plans are held for as long as the builders live.
  const WorkspaceSlice decode_plan = workspace.take(0).value(), prefill_plan = workspace.take(1).value();
  BuilderOptions with = options;
  with.plan_memory = decode_plan.bytes;
  MetadataBuilder decode_builder = MetadataBuilder::create(backend, decodes.problem, decodes.limits, with).value();
  with.plan_memory = prefill_plan.bytes;
  PrefillBuilder prefill_builder = PrefillBuilder::create(backend, prefills.problem, prefills.limits, with).value();

  const DecodeArgs decode_layer = decodes.args();
  const PrefillArgs prefill_layer = prefills.args();
  bool ran = true;
  AllocationCount count;
  for (std::int32_t round = 0; round < 4; ++round) {
    const auto decode_step = decode_builder.build(round % 2, decodes.lengths());
    const auto prefill_step = prefill_builder.build(round % 2, prefills.lengths());
    for (int layer = 0; layer < 2; ++layer) {
      auto slice = workspace.take(2);
      DecodeArgs decode_args = decode_layer;
      decode_args.workspace = slice->bytes;
      ran = ran && decode(*decode_step, decode_args).ok() && workspace.give_back(*slice).ok();
      slice = workspace.take(3);
      PrefillArgs prefill_args = prefill_layer;
      prefill_args.workspace = slice->bytes;
      ran = ran && prefill(*prefill_step, prefill_args).ok() && workspace.give_back(*slice).ok();
    }
  }
  const Status whole = workspace.check();
  EXPECT_EQ(count.stop(), 0);
  EXPECT_TRUE(ran);
  EXPECT_TRUE(whole.ok()) << whole.message();
  // Keys are alike, and so are values: the output is the value they share.
  EXPECT_NEAR(decodes.out[0], 0.5f, 1e-6f);
  EXPECT_NEAR(prefills.out[0], 0.75f, 1e-6f);
  EXPECT_EQ(prefills.expanded, 8);
  EXPECT_TRUE(workspace.give_back(decode_plan).ok());
  EXPECT_TRUE(workspace.give_back(prefill_plan).ok());
}

}  // namespace
}  // namespace latte
