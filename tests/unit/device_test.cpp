// The device side as far as it goes without a device: what the CPU backend answers, what a GPU would choose, plans that
// come from elsewhere.
#include "latte/device.hpp"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/hashed_normal.hpp"
#include "cuda/sm90/decode/choice.hpp"
#include "latte/latte.hpp"
#include "tests/unit/bad_input.hpp"

namespace latte {
namespace {

int something = 0;
const Stream kSomeStream = &something;

TEST(DeviceOnCpu, MemoryIsTheHosts) {
  const Backend backend = Backend::open({.threads = 1}).value();
  EXPECT_FALSE(backend.on_device());
  DeviceMemory memory = DeviceMemory::allocate(backend, 1000).value();
  ASSERT_NE(memory.data(), nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 256, 0u);
  const char text[] = "latte";
  char back[sizeof text] = {};
  EXPECT_TRUE(copy_to_device(backend, memory.data(), text, sizeof text).ok());
  const DeviceMemory moved = std::move(memory);
  EXPECT_TRUE(copy_to_host(backend, back, moved.data(), sizeof back).ok());
  EXPECT_STREQ(back, text);
  EXPECT_TRUE(backend.synchronize().ok());
}

// Aligned allocation rounds sizes up, past the largest number to a small one.
TEST(DeviceOnCpu, MemoryThatNoMachineHasIsRefused) {
  const Backend backend = Backend::open({.threads = 1}).value();
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {kMost, kMost - 255, kMost - 4096, kMost / 2 + 1}) {
    const Result<DeviceMemory> memory = DeviceMemory::allocate(backend, bytes);
    ASSERT_FALSE(memory.ok()) << bytes;
    EXPECT_EQ(memory.status().code(), Code::out_of_memory);
    EXPECT_EQ(memory.status().field(), "memory");
    EXPECT_NE(memory.status().expected().find(std::to_string(bytes)), std::string::npos) << memory.status().message();
  }
}

TEST(DeviceOnCpu, CopiesFromAndToNowhereAreErrorsUnlessEmpty) {
  const Backend backend = Backend::open({.threads = 1}).value();
  char byte = 7;
  EXPECT_EQ(copy_to_device(backend, nullptr, &byte, 1).field(), "device");
  EXPECT_EQ(copy_to_device(backend, &byte, nullptr, 1).field(), "host");
  EXPECT_EQ(copy_to_host(backend, &byte, nullptr, 1).field(), "device");
  EXPECT_EQ(copy_to_host(backend, nullptr, &byte, 1).field(), "host");
  EXPECT_EQ(copy_to_host(backend, nullptr, &byte, 1).code(), Code::missing_argument);
  EXPECT_EQ(byte, 7);
  EXPECT_TRUE(copy_to_device(backend, nullptr, nullptr, 0).ok());
  EXPECT_TRUE(copy_to_host(backend, nullptr, nullptr, 0).ok());
}

TEST(DeviceOnCpu, StreamsGraphsAndTimersAreUnsupported) {
  const Backend backend = Backend::open({.threads = 1}).value();
  EXPECT_EQ(OwnedStream::create(backend).status().code(), Code::unsupported);
  EXPECT_EQ(Graph::begin_capture(backend, nullptr).code(), Code::unsupported);
  EXPECT_EQ(Graph::end_capture(backend, nullptr).status().code(), Code::unsupported);
  EXPECT_EQ(Timer::create(backend).status().code(), Code::unsupported);
}

TEST(DeviceOnCpu, AStreamIsAnErrorEverywhere) {
  const Backend backend = Backend::open({.threads = 1}).value();
  bad_input::Step step;
  auto builder = MetadataBuilder::create(backend, step.problem, step.limits).value();
  const auto metadata = builder.build(0, step.lengths()).value();
  DecodeArgs args = step.args();
  args.stream = kSomeStream;
  EXPECT_EQ(decode(metadata, args).field(), "stream");
  EXPECT_TRUE(step.untouched());
  EXPECT_EQ(builder.build(0, step.lengths(), kSomeStream).status().field(), "stream");
  EXPECT_EQ(builder.copy_plan(metadata, kSomeStream).status().field(), "stream");
  EXPECT_EQ(backend.synchronize(kSomeStream).field(), "stream");
  EXPECT_EQ(write_kv(backend, {.stream = kSomeStream}).field(), "stream");
  EXPECT_EQ(merge(backend, {.stream = kSomeStream}).field(), "stream");
  EXPECT_EQ(builder.build_on_device(0, {}, nullptr).status().code(), Code::unsupported);
  EXPECT_EQ(Backend::open({.threads = 1, .device = 1}).status().field(), "device");
}

TEST(DeviceOnCpu, FillsWithTheNumbersADeviceWouldUse) {
  const Backend backend = Backend::open({.threads = 1}).value();
  std::vector<float> values(10'000);
  ASSERT_TRUE(fill_random(backend, {.data = values.data(), .dtype = Dtype::f32, .count = 10'000, .seed = 7}).ok());
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], hashed_normal(7, i));
    sum += static_cast<double>(values[i]);
    squares += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  EXPECT_NEAR(sum / 1e4, 0, 0.05);
  EXPECT_NEAR(squares / 1e4, 1, 0.05);
  EXPECT_EQ(fill_random(backend, {.data = values.data(), .dtype = Dtype::u8, .count = 1}).field(), "dtype");
}

TEST(PlanCopy, OfAStepOnTheHostIsItsPlan) {
  const Backend backend = Backend::open({.threads = 2}).value();
  bad_input::Step step;
  auto builder = MetadataBuilder::create(backend, step.problem, step.limits).value();
  const auto metadata = builder.build(0, step.lengths()).value();
  EXPECT_FALSE(metadata.on_device());
  const auto copy = builder.copy_plan(metadata);
  ASSERT_TRUE(copy.ok()) << copy.status().message();
  const auto equal = [](const auto& a, const auto& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  EXPECT_TRUE(equal(copy->plan().work_meta_data, metadata.plan().work_meta_data));
  EXPECT_TRUE(equal(copy->plan().work_info_set, metadata.plan().work_info_set));
  EXPECT_TRUE(equal(copy->plan().reduce_final_map, metadata.plan().reduce_final_map));
  EXPECT_TRUE(check_plan(builder.plan_config(), step.lengths(), copy->plan()).ok());
}

TEST(PlanCopy, WordsThatAreNoPlanAreRefused) {
  const PlanConfig config{.heads = 4, .workers = 3, .limits = {.max_requests = 2, .max_kv_tokens = 500}};
  const std::vector<std::int32_t> seq_lens{100, 500}, query_start{0, 1, 2};
  std::vector<std::int32_t> words(static_cast<std::size_t>(plan_sizes(config).value().words));
  ASSERT_TRUE(make_plan(config, {.seq_lens = seq_lens, .query_start = query_start}, words).ok());
  ASSERT_TRUE(view_plan(words).ok());
  EXPECT_EQ(view_plan(std::span(words).first(5)).status().code(), Code::corrupt_plan);
  for (const MetaField field :
       {kMetaVersion, kMetaWorkers, kMetaRecords, kMetaTiles, kMetaPartials, kMetaOffsetIndptr, kMetaOffsetRecords,
        kMetaOffsetReduceIndptr, kMetaOffsetReduceFinal, kMetaOffsetReducePartial})
    for (const std::int32_t wild : {-1, 1 << 30}) {
      std::vector<std::int32_t> broken = words;
      broken[static_cast<std::size_t>(field)] = wild;
      EXPECT_EQ(view_plan(broken).status().code(), Code::corrupt_plan) << "field " << field << " = " << wild;
    }
}

constexpr PlanTarget kH200{.backend = "cuda", .workers = 132};

// The choice needs no GPU: buffers can be sized and plans looked at anywhere.
TEST(CudaChoice, IsTheSameEverywhere) {
  const Limits limits{.max_requests = 64, .max_kv_tokens = 4096};
  const auto choice = choose_for(kH200, DecodeProblem{.heads = 16}, limits);
  ASSERT_TRUE(choice.ok()) << choice.status().message();
  EXPECT_FALSE(choice->kernel.empty());
  EXPECT_FALSE(choice->reason.empty());
  EXPECT_EQ(choice->plan.workers, 132);
  EXPECT_EQ(choice->plan.heads, 16);
  EXPECT_EQ(choose_for({.backend = "cpu", .workers = 8}, DecodeProblem{.heads = 16}, limits)->plan.workers, 8);
}

// What a block takes is told for all of a device's multiprocessors. Fewer of them share its memory: a block is cheaper
// then, and leaving some without work wins less, or nothing.
TEST(CudaChoice, AnEqualShareOfMemoryIsLargerForFewerWorkers) {
  const auto cost = [](std::int32_t workers, std::int32_t heads) {
    const Limits limits{.max_requests = 64, .max_kv_tokens = 4096, .workers = workers};
    return choose_for(kH200, DecodeProblem{.heads = heads}, limits)->plan.cost;
  };
  const CostModel all = cost(0, 16), some = cost(110, 16), half = cost(66, 16), few = cost(5, 16);
  EXPECT_LT(all.alone_percent, 80);
  EXPECT_NEAR(some.block_ticks, all.block_ticks * 110 / 132, all.block_ticks / 100);
  EXPECT_NEAR(some.alone_percent, all.alone_percent * 132 / 110, 2);
  EXPECT_EQ(half.alone_percent, 100);
  EXPECT_NEAR(half.block_ticks, all.block_ticks * all.alone_percent / 100, 1);
  EXPECT_EQ(few.block_ticks, half.block_ticks);
  EXPECT_EQ(cost(0, 128).alone_percent, 100);  // tensor cores are a pair's limit
  EXPECT_EQ(cost(66, 128).block_ticks, cost(0, 128).block_ticks);
}

// Thread blocks that take their places beside those of the launch before get what that one left. That is well where
// both fit, or where there is no choice.
TEST(CudaChoice, OnlyLaunchesThatFillTheDeviceOrFitTwiceTakePlacesEarly) {
  const auto early = [](std::int32_t workers, std::int32_t heads) {
    const Limits limits{.max_requests = 64, .max_kv_tokens = 4096, .workers = workers};
    return cuda::choose_decode(DecodeProblem{.heads = heads}, limits, {}, 132)->kernel.dependent_launch;
  };
  for (const std::int32_t heads : {16, 64}) {
    for (const std::int32_t workers : {0, 132, 500, 2, 40, 66}) EXPECT_TRUE(early(workers, heads)) << workers;
    for (const std::int32_t workers : {67, 80, 112, 131}) EXPECT_FALSE(early(workers, heads)) << workers;
  }
  for (const std::int32_t workers : {0, 66, 80, 131}) EXPECT_TRUE(early(workers, 128)) << workers;  // pairs
}

// A request's bits must not depend on how many workers there are, so neither may the chunk.
TEST(CudaChoice, BatchInvariantChunksFollowFromTheLimitsAlone) {
  const auto chunk = [](std::int32_t requests, std::int32_t workers, std::int32_t heads, std::int32_t query = 1) {
    const Limits limits{.max_requests = requests, .max_query_tokens = query, .max_kv_tokens = 4096, .workers = workers};
    return choose_for(kH200, DecodeProblem{.heads = heads}, limits, Policy::batch_invariant())->plan.policy.n;
  };
  for (const std::int32_t workers : {0, 2, 37, 132}) {
    EXPECT_EQ(chunk(16, workers, 16), 512);
    EXPECT_EQ(chunk(64, workers, 16), 2048);
    EXPECT_EQ(chunk(64, workers, 128), 4128) << "4096 in whole blocks of 48";
    EXPECT_EQ(chunk(8, workers, 128), 528) << "512 in whole blocks";
    EXPECT_EQ(chunk(8, workers, 128, 4), 2064) << "each request has four tiles of 128 rows";
    EXPECT_EQ(chunk(1, workers, 16), 128);
    EXPECT_EQ(chunk(4096, workers, 16), 4096);
  }
}

TEST(CudaChoice, SaysWhatItDoesNotServe) {
  const Limits limits{.max_requests = 64, .max_kv_tokens = 4096};
  const auto fp8 = choose_for(kH200, DecodeProblem{.heads = 16, .kv_format = KvFormat::fp8_e4m3}, limits);
  EXPECT_EQ(fp8.status().code(), Code::unsupported);
  EXPECT_NE(fp8.status().message().find("fp8 caches come later on cuda"), std::string::npos);
  EXPECT_EQ(choose_for(kH200, DecodeProblem{.heads = 0}, limits).status().code(), Code::invalid_argument);
  EXPECT_EQ(choose_for({.workers = 1}, DecodeProblem{.heads = 16}, limits).status().field(), "backend");
  for (const char* name : {"tpu", "auto"})
    EXPECT_EQ(choose_for({.backend = name, .workers = 1}, DecodeProblem{.heads = 16}, limits).status().field(),
              "backend");
  EXPECT_EQ(choose_for({.backend = "cuda"}, DecodeProblem{.heads = 16}, limits).status().field(), "workers");
  const Limits above{.max_requests = 1, .max_kv_tokens = 1, .workers = 133};
  EXPECT_EQ(choose_for(kH200, DecodeProblem{.heads = 16}, above).status().field(), "limits.workers");
}

// With a GPU it opens; without one, or without the toolkit at build time, it says so and the CPU is there.
TEST(CudaOpen, WorksOrSaysWhyNot) {
  const auto cuda = Backend::open({.name = "cuda"});
  if (cuda.ok()) {
    EXPECT_TRUE(cuda->on_device());
    EXPECT_FALSE(cuda->info().device.empty());
    EXPECT_FALSE(cuda->info().kernels.empty());
  } else {
    EXPECT_EQ(cuda.status().code(), Code::unsupported);
    EXPECT_TRUE(cuda.status().field() == "name" || cuda.status().field() == "device") << cuda.status().message();
    EXPECT_FALSE(cuda.status().got().empty());
  }
  EXPECT_TRUE(Backend::open({.threads = 1}).ok());
}

TEST(AutoOpen, IsCudaWhereItOpensAndElseTheCpuWithTheReason) {
  const auto cuda = Backend::open({.name = "cuda"});
  const auto backend = Backend::open({.name = "auto", .threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  EXPECT_EQ(backend->on_device(), cuda.ok());
  EXPECT_EQ(backend->info().backend, cuda.ok() ? "cuda" : "cpu");
  if (cuda.ok()) {
    EXPECT_EQ(backend->info().note, "");
  } else {
    EXPECT_EQ(backend->workers(), 1);
    EXPECT_NE(backend->info().note.find(cuda.status().message()), std::string::npos) << backend->info().note;
    EXPECT_TRUE(backend->supports(DecodeProblem{.heads = 16}).ok);
    EXPECT_EQ(Backend::open({.name = "auto", .threads = 1, .device = 1})->info().backend, "cpu")
        << "which GPU does not matter where there is none";
    EXPECT_EQ(Backend::open({.name = "auto", .threads = -1}).status().field(), "threads");
  }
  EXPECT_EQ(Backend::open({.threads = 1})->info().note, "") << "asked for by name";
}

// A kernel's name is one of the CPU's, so that this is the same with and without a GPU.
TEST(AutoOpen, WithAKernelIsTheCpu) {
  const auto backend = Backend::open({.name = "auto", .threads = 1, .kernel = "scalar"});
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  EXPECT_EQ(backend->info().backend, "cpu");
  EXPECT_NE(backend->info().note.find("kernel"), std::string::npos) << backend->info().note;
  EXPECT_EQ(Backend::open({.name = "auto", .kernel = "abacus"}).status().field(), "kernel");
}

}  // namespace
}  // namespace latte
