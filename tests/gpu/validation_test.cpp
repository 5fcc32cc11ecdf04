// What the validation kernel finds in lengths and pages that only the device knows, and who is told.
#include <atomic>
#include <functional>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuValidation : public OnGpu {};

// Where `pages`, on the host or on the device, have a page of request 1; `host` knows where lists begin.
std::int32_t* entry_of_request_1(const PageTable& host, const PageTable& pages, std::int64_t page) {
  return const_cast<std::int32_t*>(pages.block_table != nullptr
                                       ? pages.block_table + pages.block_table_stride + page
                                       : pages.page_indices.data() + host.page_indptr[1] + page);
}

// A step whose page table or lengths are spoilt on the device, where the host cannot see it.
TEST_F(GpuValidation, ReportsRequestAndPosition) {
  for (PageForm form : {PageForm::block_table, PageForm::csr}) {
    DecodeCase c = gpu_case({{1, 200}, {2, 300}, {1, 70}}, 16);
    c.page_form = form;
    auto step = DeviceStep::make(backend(), c, {.validate = true});
    ASSERT_TRUE(succeeded(step->run(backend(), stream()))) << "a sound step has no findings";
    const auto expected = step->batch.result_bits();

    const DecodeArgs host = step->batch.args(), args = step->args(stream());
    const std::int32_t* host_entry = entry_of_request_1(host.pages, host.pages, 3);
    std::int32_t* entry_on_device = entry_of_request_1(host.pages, args.pages, 3);
    for (std::int32_t wild : {-7, 1 << 30}) {
      ASSERT_TRUE(succeeded(copy_to_device(backend(), entry_on_device, &wild, sizeof wild)));
      const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
      ASSERT_TRUE(succeeded(decode(metadata, args))) << "the finding comes later";
      const Status found = backend().synchronize(stream());
      EXPECT_EQ(found.code(), Code::invalid_argument) << found.message();
      EXPECT_EQ(found.field(), "pages");
      EXPECT_NE(found.got().find(std::to_string(wild) + " as page 3 of request 1"), std::string::npos) << found.got();
      EXPECT_TRUE(succeeded(backend().synchronize(stream()))) << "told once";

      ASSERT_TRUE(succeeded(decode(metadata, args)));
      // Not through synchronize(), which would take the finding.
      std::int32_t ignored = 0;
      ASSERT_TRUE(succeeded(copy_to_host(backend(), &ignored, entry_on_device, sizeof ignored, stream())));
      EXPECT_EQ(decode(metadata, args).field(), "pages") << "the next call tells it too";
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    }
    ASSERT_TRUE(succeeded(copy_to_device(backend(), entry_on_device, host_entry, sizeof *host_entry)));
    ASSERT_TRUE(succeeded(step->run(backend(), stream())));
    EXPECT_EQ(step->batch.result_bits(), expected);
  }
}

// Decode alone in a graph, and steps of more and of fewer requests and query tokens built into its slot: the captured
// look is at what each of them has, and at nothing that an earlier one left behind.
TEST_F(GpuValidation, OfACapturedDecodeLooksAtTheStepThatRuns) {
  auto step =
      DeviceStep::make(backend(), gpu_case({{4, 200}, {4, 200}, {4, 200}, {4, 200}, {4, 200}}, 16), {.validate = true});
  const auto build = [&](const std::vector<RequestLengths>& requests) {
    return step->builder.build(0, Lengths(requests).view(), stream());
  };
  const auto first = build({{1, 150}, {2, 30}});
  ASSERT_TRUE(succeeded(first.status()));
  const Result<Graph> graph = Graph::capture(backend(), stream(), [&] { return decode(*first, step->args(stream())); });
  ASSERT_TRUE(succeeded(graph.status()));
  const auto replay = [&](const std::vector<RequestLengths>& requests) -> Status {
    if (const auto built = build(requests); !built) return built.status();
    if (Status status = graph->launch(stream()); !status) return status;
    return backend().synchronize(stream());
  };
  const std::vector<RequestLengths> all = {{4, 200}, {4, 200}, {4, 200}, {4, 200}, {4, 200}};
  EXPECT_TRUE(succeeded(replay(all)));
  EXPECT_TRUE(succeeded(replay({{3, 7}})));
  EXPECT_TRUE(succeeded(replay({{1, 200}, {0, 0}, {3, 3}})));

  const PageTable pages = step->args(stream()).pages;
  auto* entry = const_cast<std::int32_t*>(pages.block_table + 4 * pages.block_table_stride);
  const std::int32_t wild = 1 << 29;
  ASSERT_TRUE(succeeded(copy_to_device(backend(), entry, &wild, sizeof wild)));
  EXPECT_TRUE(succeeded(replay({{1, 200}, {1, 200}}))) << "nobody needs that page";
  const Status found = replay(all);
  EXPECT_EQ(found.field(), "pages");
  EXPECT_NE(found.got().find("as page 0 of request 4"), std::string::npos) << found.got();
}

// A prefill's context: the pages that its chunks follow, also those of a request that has no query.
class GpuContextValidation : public OnGpu {
 protected:
  static PrefillCase context_case(PageForm form) {
    PrefillCase c = gpu_prefill({{40, 40, 350}, {0, 5, 200}, {1, 1, 701}}, 3);
    c.latent = 512;
    c.rope = 64;
    c.page_size = 64;
    c.page_form = form;
    return c;
  }
  // For chunks whose keys and values nobody will look at.
  PrefillArgs careless_args(const DevicePrefillStep& step) const {
    PrefillArgs args = step.args(stream());
    args.expand = [](void*, const ContextChunk&) { return Status(); };
    return args;
  }
  // One whole prefill of a sound step, compared with the oracle.
  ::testing::AssertionResult runs(DevicePrefillStep& step) const {
    ContextExpander expander(backend(), step.batch());
    PrefillArgs args = step.args(stream());
    expander.attach(args);
    if (Status status = step.poison(); !status) return succeeded(status);
    const auto metadata = step.builder.build(0, step.batch().lengths(), stream());
    if (!metadata) return succeeded(metadata.status());
    if (Status status = prefill(*metadata, args); !status) return succeeded(status);
    if (Status status = backend().synchronize(stream()); !status) return succeeded(status);
    if (Status status = step.device.download_outputs(step.batch()); !status) return succeeded(status);
    const Comparison result = compare_prefill(step.prepared, step.builder.math(), expander.expanded());
    return result.ok ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << result.message;
  }
  Status write(std::int32_t* on_device, std::int32_t value) const {
    return copy_to_device(backend(), on_device, &value, sizeof value);
  }
  // Waits, but not through synchronize(), which would take a finding.
  Status wait(const std::int32_t* on_device) const {
    std::int32_t ignored = 0;
    return copy_to_host(backend(), &ignored, on_device, sizeof ignored, stream());
  }
};

TEST_F(GpuContextValidation, ReportsRequestAndPosition) {
  for (PageForm form : {PageForm::block_table, PageForm::csr}) {
    auto step = DevicePrefillStep::make(backend(), context_case(form), {.slots = 2, .validate = true});
    ASSERT_TRUE(runs(*step)) << "a sound step has no findings";
    const auto expected = step->batch().result_bits();
    const PageTable host = step->batch().args().pages;
    const PrefillArgs args = careless_args(*step);
    std::int32_t* entry = entry_of_request_1(host, args.pages, 2);
    for (std::int32_t wild : {-7, 1 << 30}) {
      const std::string got = std::to_string(wild) + " as page 2 of request 1";
      ASSERT_TRUE(succeeded(write(entry, wild)));
      const auto metadata = step->builder.build(1, step->batch().lengths(), stream());
      ASSERT_TRUE(succeeded(metadata.status()));
      ASSERT_TRUE(succeeded(prefill(*metadata, args))) << "the finding comes later";
      const Status found = backend().synchronize(stream());
      EXPECT_EQ(found.code(), Code::invalid_argument) << found.message();
      EXPECT_EQ(found.field(), "pages");
      EXPECT_NE(found.got().find(got), std::string::npos) << found.got();
      EXPECT_TRUE(succeeded(backend().synchronize(stream()))) << "told once";

      ASSERT_TRUE(succeeded(prefill(*metadata, args)));
      ASSERT_TRUE(succeeded(wait(entry)));
      EXPECT_EQ(prefill(*metadata, args).field(), "pages") << "the next call tells it too";
      ASSERT_TRUE(succeeded(prefill(*metadata, args)));
      ASSERT_TRUE(succeeded(wait(entry)));
      const Status of_slot_1 = step->builder.build(0, step->batch().lengths(), stream()).status();
      EXPECT_EQ(of_slot_1.field(), "pages") << "and so does a build into another slot";
      EXPECT_NE(of_slot_1.got().find(got), std::string::npos) << of_slot_1.got();
    }
    // Restored, and found to be sound again.
    ASSERT_TRUE(succeeded(write(entry, *entry_of_request_1(host, host, 2))));
    EXPECT_TRUE(runs(*step));
    EXPECT_EQ(step->batch().result_bits(), expected);
  }
}

TEST_F(GpuContextValidation, FindsListsThatAreTooShortOrMakeNoSense) {
  auto step = DevicePrefillStep::make(backend(), context_case(PageForm::csr), {.validate = true});
  const PageTable host = step->batch().args().pages;
  const PrefillArgs args = careless_args(*step);
  auto* end_of_request_1 = const_cast<std::int32_t*>(args.pages.page_indptr.data() + 2);
  const struct {
    std::int32_t end;
    const char* got;
  } cases[] = {{host.page_indptr[1] + 1, "1 pages of request 1"},
               {host.page_indptr[1] - 1, "bounds that make no sense of request 1"},
               {std::numeric_limits<std::int32_t>::max(), "bounds that make no sense of request 1"}};
  for (const auto& broken : cases) {
    ASSERT_TRUE(succeeded(write(end_of_request_1, broken.end)));
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream());
    ASSERT_TRUE(succeeded(metadata.status()));
    ASSERT_TRUE(succeeded(prefill(*metadata, args)));
    const Status found = backend().synchronize(stream());
    EXPECT_EQ(found.field(), "pages") << found.message();
    EXPECT_EQ(found.got(), broken.got);
  }
  // A step without context looks at no pages.
  PrefillLengths lengths = step->batch().lengths();
  lengths.context_lens = {};
  const auto metadata = step->builder.build(0, lengths, stream());
  ASSERT_TRUE(succeeded(metadata.status()));
  EXPECT_TRUE(succeeded(prefill(*metadata, args)));
  EXPECT_TRUE(succeeded(backend().synchronize(stream())));
}

// Without validation wild ids must not reach outside the cache either: the run ends without a fault.
TEST_F(GpuContextValidation, WildPagesDoNoHarmWithoutIt) {
  auto step = DevicePrefillStep::make(backend(), context_case(PageForm::block_table));
  const PageTable host = step->batch().args().pages;
  const PrefillArgs args = careless_args(*step);
  std::int32_t* entry = entry_of_request_1(host, args.pages, 0);
  for (std::int32_t wild : {-7, 1 << 30}) {
    ASSERT_TRUE(succeeded(write(entry, wild)));
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream());
    ASSERT_TRUE(succeeded(metadata.status()));
    ASSERT_TRUE(succeeded(prefill(*metadata, args)));
    EXPECT_TRUE(succeeded(backend().synchronize(stream())));
  }
  ASSERT_TRUE(succeeded(write(entry, *entry_of_request_1(host, host, 0))));
  EXPECT_TRUE(runs(*step)) << "and the next step is sound";
}

TEST_F(GpuValidation, LooksAtLengthsThatOnlyTheDeviceKnows) {
  const struct {
    const char* field;
    const char* got;
    std::function<void(Lengths&)> break_it;
  } cases[] = {
      {"seq_lens", "of request 1", [](Lengths& l) { l.seq_lens[1] = -4; }},
      {"seq_lens", "of request 0", [](Lengths& l) { l.seq_lens[0] = 2'000'000'000; }},
      {"seq_lens", "more, counted up to the 71 of request 2", [](Lengths& l) { l.seq_lens[2] = 71; }},
      {"query_start", "[2]", [](Lengths& l) { l.query_start[2] = 0; }},
      {"query_start", "[3]", [](Lengths& l) { l.query_start[3] = 1'000'000; }},
      {"query_start", "[0]", [](Lengths& l) { l.query_start[0] = 1; }},
  };
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 300}, {1, 70}}, 16), {.validate = true});
  for (const auto& broken : cases) {
    Lengths lengths(step->batch.description().requests);
    broken.break_it(lengths);
    ASSERT_TRUE(succeeded(step->device.set_lengths(lengths.view())));
    const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
    ASSERT_TRUE(succeeded(metadata.status()));
    ASSERT_TRUE(succeeded(decode(*metadata, step->args(stream()))));
    const Status found = backend().synchronize(stream());
    EXPECT_EQ(found.field(), broken.field) << found.message();
    EXPECT_NE(found.got().find(broken.got), std::string::npos) << found.message();
  }
}

// The last request passes the total, though another one is at fault.
TEST_F(GpuValidation, AddsUpMoreRequestsThanAWarpHasLanes) {
  DecodeCase c = gpu_case({{1, 20}}, 16);
  c.requests.resize(40, {1, 10});
  auto step = DeviceStep::make(backend(), c, {.validate = true});
  ASSERT_TRUE(succeeded(step->run(backend(), stream()))) << "a sound step has no findings";
  Lengths lengths(c.requests);
  lengths.seq_lens[37] += 1;
  ASSERT_TRUE(succeeded(step->device.set_lengths(lengths.view())));
  const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
  ASSERT_TRUE(succeeded(metadata.status()));
  ASSERT_TRUE(succeeded(decode(*metadata, step->args(stream()))));
  const Status found = backend().synchronize(stream());
  EXPECT_EQ(found.field(), "seq_lens") << found.message();
  EXPECT_EQ(found.expected(), "at most 410 KV tokens in all");
  EXPECT_EQ(found.got(), "more, counted up to the 10 of request 39");
}

// 40 tokens of one request: more than a warp looks at in one go.
TEST_F(GpuValidation, LooksAtTheBoundOfEveryQueryToken) {
  DecodeCase c = gpu_case({{1, 200}, {40, 300}, {2, 70}}, 16);
  c.bounds = Bounds::random;
  auto step = DeviceStep::make(backend(), c, {.validate = true});
  const auto run = [&](const Lengths& lengths) {
    if (Status status = step->device.set_lengths(lengths.view()); !status) return status;
    const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
    if (!metadata) return metadata.status();
    if (Status status = decode(*metadata, step->args(stream())); !status) return status;
    return backend().synchronize(stream());
  };
  Lengths sound(c.requests);
  sound.visible = c.visible();
  ASSERT_TRUE(succeeded(run(sound))) << "a sound step has no findings";
  const struct {
    std::size_t token;
    std::int32_t visible;
    const char* got;
  } cases[] = {
      {0, 201, "201 for query token 0 of request 0"},
      {1 + 35, 301, "301 for query token 35 of request 1"},
      {1 + 39, 2'000'000'000, "2000000000 for query token 39 of request 1"},
      {1 + 40 + 1, -1, "-1 for query token 1 of request 2"},
  };
  for (const auto& broken : cases) {
    Lengths lengths = sound;
    lengths.visible[broken.token] = broken.visible;
    const Status found = run(lengths);
    EXPECT_EQ(found.code(), Code::invalid_argument);
    EXPECT_EQ(found.field(), "visible") << found.message();
    EXPECT_EQ(found.got(), broken.got);
  }
}

TEST_F(GpuValidation, LooksAtWhereEveryListOfPagesBeginsAndEnds) {
  DecodeCase c = gpu_case({{1, 200}, {2, 300}, {1, 70}}, 16);  // 4, 5 and 2 pages
  c.page_form = PageForm::csr;
  auto step = DeviceStep::make(backend(), c, {.validate = true});
  ASSERT_TRUE(succeeded(step->run(backend(), stream()))) << "a sound step has no findings";
  const std::span<const std::int32_t> bounds = step->batch.args().pages.page_indptr;
  const DecodeArgs args = step->args(stream());
  const struct {
    std::size_t entry;
    std::int32_t bound;
    const char* got;
  } cases[] = {
      {2, bounds[1] + 4, "4 pages of request 1"},
      {1, bounds[0], "0 pages of request 0"},
      {2, bounds[1] - 1, "bounds that make no sense of request 1"},
      {3, 1 << 30, "bounds that make no sense of request 2"},
      {0, -1, "bounds that make no sense of request 0"},
  };
  for (const auto& broken : cases) {
    std::vector<std::int32_t> wrong(bounds.begin(), bounds.end());
    wrong[broken.entry] = broken.bound;
    auto* on_device = const_cast<std::int32_t*>(args.pages.page_indptr.data());
    ASSERT_TRUE(succeeded(copy_to_device(backend(), on_device, wrong.data(), wrong.size() * sizeof wrong[0])));
    const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
    ASSERT_TRUE(succeeded(decode(metadata, args))) << "the finding comes later";
    const Status found = backend().synchronize(stream());
    EXPECT_EQ(found.code(), Code::invalid_argument);
    EXPECT_EQ(found.field(), "pages") << found.message();
    EXPECT_EQ(found.got(), broken.got);
  }
}

// The lengths are on the device, so that the host does not know how many pages are needed.
TEST_F(GpuValidation, FindsBlockTablesThatAreTooNarrow) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 300}, {1, 70}}, 16), {.validate = true});
  DecodeArgs args = step->args(stream());
  args.pages.max_pages = 4;
  const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
  ASSERT_TRUE(succeeded(metadata.status()));
  ASSERT_TRUE(succeeded(decode(*metadata, args)));
  const Status found = backend().synchronize(stream());
  EXPECT_EQ(found.field(), "pages") << found.message();
  EXPECT_EQ(found.got(), "4 pages of request 1");
}

// Every call looks at the reports of all slots, whatever thread it comes from.
TEST_F(GpuValidation, AFindingIsToldToOneOfManyThreads) {
  constexpr int kThreads = 4, kRounds = 200;
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 300}}, 16), {.slots = kThreads, .validate = true});
  std::vector<DecodeMetadata> planned;
  for (int slot = 0; slot < kThreads; ++slot)
    planned.push_back(step->builder.build(slot, step->batch.lengths(), stream()).value());
  const DecodeArgs sound = step->args(stream());
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * sound.pages.max_pages), -7);
  const auto table = DeviceMemory::allocate(backend(), ids.size() * sizeof ids[0]).value();
  ASSERT_TRUE(succeeded(copy_to_device(backend(), table.data(), ids.data(), ids.size() * sizeof ids[0])));
  DecodeArgs wild = sound;
  wild.pages.block_table = reinterpret_cast<const std::int32_t*>(table.data());
  wild.pages.block_table_stride = sound.pages.max_pages;

  for (int round = 0; round < kRounds; ++round) {
    ASSERT_TRUE(succeeded(decode(planned[0], wild)));
    // Not through synchronize(), which would take the finding.
    std::int32_t ignored = 0;
    ASSERT_TRUE(succeeded(copy_to_host(backend(), &ignored, table.data(), sizeof ignored, stream())));
    std::atomic<int> waiting{kThreads}, told{0};
    std::vector<std::thread> threads;
    for (const DecodeMetadata& metadata : planned)
      threads.emplace_back([&] {
        for (--waiting; waiting > 0;) std::this_thread::yield();
        if (decode(metadata, sound).field() == "pages") ++told;
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(told, 1) << "round " << round;
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  }
}

// Without validation wild ids and lengths must not reach outside the tensors either: the run ends without a fault.
TEST_F(GpuValidation, WildPagesAndLengthsDoNoHarmWithoutIt) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 200}, {2, 300}, {1, 70}}, 16, 16));
  Lengths lengths(step->batch.description().requests);
  lengths.seq_lens = {1 << 30, -1, std::numeric_limits<std::int32_t>::max()};
  lengths.query_start = {0, 500, -3, 4};
  ASSERT_TRUE(succeeded(step->device.set_lengths(lengths.view())));
  const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
  ASSERT_TRUE(succeeded(metadata.status()));
  ASSERT_TRUE(succeeded(decode(*metadata, step->args(stream()))));
  EXPECT_TRUE(succeeded(backend().synchronize(stream())));
  EXPECT_TRUE(succeeded(step->run(backend(), stream()))) << "and the next step is sound";
}

}  // namespace
}  // namespace latte::testkit
