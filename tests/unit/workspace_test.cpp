// The workspace manager: what may share memory, what may not, and what its checks find.
#include "latte/workspace.hpp"

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/allocation_count.hpp"

namespace latte {
namespace {

constexpr WorkspaceOptions kChecked{.checks = WorkspaceChecks::on}, kUnchecked{.checks = WorkspaceChecks::off};

bool aligned(const std::byte* address, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

TEST(WorkspaceLayout, SharesMemoryOnlyBetweenPhases) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<WorkspaceNeed> needs(1 + random() % 12);
    for (WorkspaceNeed& need : needs)
      need = {.name = "need",
              .bytes = random() % 5000,
              .alignment = std::size_t{1} << random() % 9,
              .phases = 1 + random() % 7};
    const WorkspaceLayout layout = lay_out_workspace(needs).value();
    for (std::size_t a = 0; a < needs.size(); ++a) {
      EXPECT_EQ(layout.offsets[a] % needs[a].alignment, 0u);
      EXPECT_LE(layout.offsets[a] + needs[a].bytes, layout.bytes);
      for (std::size_t b = 0; b < a; ++b) {
        if ((needs[a].phases & needs[b].phases) == 0) continue;
        const bool apart = layout.offsets[a] + needs[a].bytes <= layout.offsets[b] ||
                           layout.offsets[b] + needs[b].bytes <= layout.offsets[a];
        EXPECT_TRUE(apart) << "round " << round << ": " << a << " and " << b;
      }
    }
  }
}

TEST(WorkspaceLayout, TakesNoMoreThanTheLargestPhase) {
  const WorkspaceNeed needs[] = {{.name = "decode", .bytes = 4096, .phases = 1},
                                 {.name = "prefill", .bytes = 2048, .phases = 2},
                                 {.name = "chunk", .bytes = 1024, .phases = 2},
                                 {.name = "always", .bytes = 256}};
  const WorkspaceLayout layout = lay_out_workspace(needs).value();
  EXPECT_EQ(layout.bytes, 4096u + 256u);
}

TEST(WorkspaceLayout, RefusesWhatMakesNoSense) {
  const auto field = [](const WorkspaceNeed& need) { return lay_out_workspace({&need, 1}).status().field(); };
  EXPECT_EQ(field({.name = "odd", .bytes = 1, .alignment = 3}), "needs[0].alignment");
  EXPECT_EQ(field({.name = "none", .bytes = 1, .alignment = 0}), "needs[0].alignment");
  EXPECT_EQ(field({.name = "wide", .bytes = 1, .alignment = 512}), "needs[0].alignment");
  EXPECT_EQ(field({.name = "huge", .bytes = ~std::size_t{0}}), "needs[0].bytes");
  EXPECT_EQ(field({.name = "never", .bytes = 1, .phases = 0}), "needs[0].phases");
  EXPECT_TRUE(lay_out_workspace({}).ok());
}

TEST(WorkspaceLayout, TheLargestThereMayBeDoNotWrapAround) {
  const std::vector<WorkspaceNeed> needs(1024, {.name = "huge", .bytes = std::size_t{1} << 52});
  const auto layout = lay_out_workspace(needs);
  ASSERT_TRUE(layout.ok()) << layout.status().message();
  EXPECT_EQ(layout->bytes, std::size_t{1} << 62);
  EXPECT_EQ(std::set<std::size_t>(layout->offsets.begin(), layout->offsets.end()).size(), needs.size());
  WorkspaceNeed more = needs[0];
  ++more.bytes;
  EXPECT_EQ(lay_out_workspace({&more, 1}).status().field(), "needs[0].bytes");
}

class WorkspaceTest : public testing::Test {
 protected:
  Workspace make(const WorkspaceOptions& options) {
    const WorkspaceNeed needs[] = {{.name = "decode", .bytes = 1000, .phases = 1},
                                   {.name = "prefill", .bytes = 900, .phases = 2},
                                   {.name = "always", .bytes = 100, .alignment = 64}};
    return Workspace::create(backend_, needs, options).value();
  }
  Backend backend_ = Backend::open({.threads = 1}).value();
};

TEST_F(WorkspaceTest, HandsOutWhatWasAskedFor) {
  for (const WorkspaceOptions& options : {kChecked, kUnchecked}) {
    Workspace workspace = make(options);
    const WorkspaceSlice decode = workspace.take(0).value(), always = workspace.take(2).value();
    EXPECT_EQ(decode.bytes.size(), 1000u);
    EXPECT_TRUE(aligned(decode.bytes.data(), 256));
    EXPECT_TRUE(aligned(always.bytes.data(), 64));
    std::memset(decode.bytes.data(), 1, decode.bytes.size());
    std::memset(always.bytes.data(), 2, always.bytes.size());
    EXPECT_EQ(decode.bytes.back(), std::byte{1});
    EXPECT_TRUE(workspace.check().ok());
    EXPECT_TRUE(workspace.give_back(decode).ok());
    const WorkspaceSlice prefill = workspace.take(1).value();
    std::memset(prefill.bytes.data(), 3, prefill.bytes.size());
    EXPECT_EQ(always.bytes.front(), std::byte{2});
    EXPECT_TRUE(workspace.give_back(prefill).ok());
    EXPECT_TRUE(workspace.give_back(always).ok());
    // The same addresses every time.
    EXPECT_EQ(workspace.take(0).value().bytes.data(), decode.bytes.data());
  }
}

TEST_F(WorkspaceTest, AllocatesOnlyWhenMade) {
  for (const WorkspaceOptions& options : {kChecked, kUnchecked}) {
    Workspace workspace = make(options);
    allocation_count::AllocationCount count;
    const auto slice = workspace.take(0);
    const Status whole = workspace.check();
    const Status back = workspace.give_back(*slice);
    EXPECT_EQ(count.stop(), 0);
    EXPECT_TRUE(slice.ok() && whole.ok() && back.ok());
  }
}

TEST_F(WorkspaceTest, FindsASliceThatIsTakenTwice) {
  Workspace workspace = make(kChecked);
  const WorkspaceSlice slice = workspace.take(0).value();
  EXPECT_EQ(workspace.take(0).status().field(), "decode");
  ASSERT_TRUE(workspace.give_back(slice).ok());
  EXPECT_TRUE(workspace.take(0).ok());
}

TEST_F(WorkspaceTest, FindsTwoThatShareMemoryAndAreTakenAtOnce) {
  Workspace workspace = make(kChecked);
  const WorkspaceSlice slice = workspace.take(0).value();
  const auto refused = workspace.take(1);
  EXPECT_EQ(refused.status().field(), "prefill");
  EXPECT_NE(refused.status().got().find("decode"), std::string::npos);
  EXPECT_TRUE(workspace.take(2).ok());
  ASSERT_TRUE(workspace.give_back(slice).ok());
  EXPECT_TRUE(workspace.take(1).ok());
}

// The guard of one may lie in another although the slices themselves do not meet.
TEST_F(WorkspaceTest, FindsGuardsThatLieInASliceThatIsTaken) {
  const WorkspaceNeed needs[] = {{.name = "a", .bytes = 1000, .phases = 1},
                                 {.name = "b", .bytes = 100, .phases = 1},
                                 {.name = "c", .bytes = 1400, .phases = 2}};
  Workspace workspace = Workspace::create(backend_, needs, kChecked).value();
  ASSERT_TRUE(workspace.take(2).ok());
  EXPECT_EQ(workspace.take(1).status().field(), "b");
  EXPECT_TRUE(workspace.check().ok());
}

TEST_F(WorkspaceTest, FindsASliceFromAnEarlierStep) {
  Workspace workspace = make(kChecked);
  const WorkspaceSlice old = workspace.take(0).value();
  ASSERT_TRUE(workspace.give_back(old).ok());
  EXPECT_EQ(workspace.give_back(old).code(), Code::stale_metadata);
  const WorkspaceSlice fresh = workspace.take(0).value();
  EXPECT_GT(fresh.generation, old.generation);
  EXPECT_EQ(workspace.give_back(old).code(), Code::stale_metadata);
  EXPECT_TRUE(workspace.give_back(fresh).ok());
}

TEST_F(WorkspaceTest, FindsWritesOutsideASlice) {
  for (std::ptrdiff_t at : {std::ptrdiff_t{1000}, std::ptrdiff_t{1000 + 17}, std::ptrdiff_t{-1}, std::ptrdiff_t{-40}}) {
    Workspace workspace = make(kChecked);
    const WorkspaceSlice slice = workspace.take(0).value();
    slice.bytes.data()[at] = std::byte{1};
    EXPECT_EQ(workspace.check().field(), "decode") << at;
    EXPECT_EQ(workspace.give_back(slice).field(), "decode") << at;
    EXPECT_TRUE(workspace.take(0).ok()) << "the slice is back all the same";
  }
}

// The library and its tests are compiled with the same NDEBUG: ./test has a release build, without these checks, and
// one for AddressSanitizer, with them.
TEST_F(WorkspaceTest, ChecksInDebugBuildsUnlessToldOtherwise) {
#ifdef NDEBUG
  constexpr bool kWatched = false;
#else
  constexpr bool kWatched = true;
#endif
  Workspace workspace = make({});
  EXPECT_EQ(workspace.bytes(), make(kWatched ? kChecked : kUnchecked).bytes());
  EXPECT_NE(make(kChecked).bytes(), make(kUnchecked).bytes());
  const WorkspaceSlice slice = workspace.take(0).value();
  EXPECT_EQ(workspace.take(0).ok(), !kWatched);
  slice.bytes.data()[1000] = std::byte{1};  // a guard word, or what aligns the next slice
  EXPECT_EQ(workspace.check().ok(), !kWatched);
  EXPECT_EQ(workspace.give_back(slice).ok(), !kWatched);
  EXPECT_EQ(workspace.give_back(slice).ok(), !kWatched) << "a second time";
}

TEST_F(WorkspaceTest, RefusesNumbersOfNoNeed) {
  Workspace workspace = make(kUnchecked);
  EXPECT_EQ(workspace.take(-1).status().field(), "need");
  EXPECT_EQ(workspace.take(3).status().field(), "need");
  EXPECT_FALSE(workspace.give_back({}).ok());
  Workspace moved = std::move(workspace);
  EXPECT_FALSE(workspace.take(0).ok());  // NOLINT(bugprone-use-after-move): that is the question
  EXPECT_EQ(workspace.bytes(), 0u);
  EXPECT_TRUE(moved.take(0).ok());
}

}  // namespace
}  // namespace latte
