// Graphs that are captured once and replayed with other lengths, and streams side by side.
#include <cstring>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuGraph : public OnGpu {};
class GpuStreams : public OnGpu {};

constexpr int kLayers = 3;

// The batch has the longest lengths; steps change them in place. Requests without KV, without query tokens, and padding
// (one query token, no KV) among them; query lengths that are no power of two.
const std::vector<std::vector<RequestLengths>> kSteps = {
    {{3, 500}, {1, 700}, {5, 90}, {2, 64}, {7, 333}, {1, 1}}, {{1, 17}, {1, 18}, {1, 19}, {1, 20}, {1, 21}, {1, 22}},
    {{7, 700}, {0, 0}, {3, 3}, {6, 130}, {1, 0}, {1, 0}},     {{0, 0}, {0, 5}, {0, 0}, {0, 0}, {0, 0}, {5, 600}},
    {{1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}, {1, 0}},         {{3, 500}, {1, 700}, {5, 90}, {2, 64}, {7, 333}, {1, 1}},
};

void expect_untouched_from(const DecodeBatch& batch, std::int64_t token) {
  const std::int64_t rows = batch.out().view().shape[0];
  for (; token < rows; ++token)
    for (std::int32_t head = 0; head < batch.description().heads; ++head) {
      const std::vector<std::byte> poison(static_cast<std::size_t>(batch.out().row_bytes()), std::byte{0xff});
      ASSERT_EQ(std::memcmp(batch.out().row(token, head), poison.data(), poison.size()), 0)
          << "row " << token << " belongs to no request and was written";
    }
}

// Planning and three layers in one graph. Each layer has its own cache and outputs, and asks to overlap the launch
// before it; the first one waits for the plan all the same.
TEST_F(GpuGraph, CapturedOnceServesStepsOfOtherLengths) {
  for (std::int32_t heads : {3, 16, 64, 128}) {
    std::vector<std::unique_ptr<DeviceStep>> layers;
    for (int layer = 0; layer < kLayers; ++layer) {
      DecodeCase c = gpu_case({{7, 700}, {7, 700}, {7, 700}, {7, 700}, {7, 700}, {7, 700}}, heads, 16);
      c.seed = 100 + static_cast<std::uint64_t>(layer);
      layers.push_back(DeviceStep::make(backend(), c));
    }
    DeviceStep& first = *layers.front();
    const DeviceLengths lengths = first.device.lengths();
    const Result<Graph> graph = Graph::capture(backend(), stream(), [&]() -> Status {
      const auto metadata = first.builder.build_on_device(0, lengths, stream());
      if (!metadata) return metadata.status();
      for (const auto& layer : layers) {
        DecodeArgs args = layer->args(stream());
        args.overlap_previous = true;
        if (Status status = decode(*metadata, args); !status) return status;
      }
      return {};
    });
    ASSERT_TRUE(succeeded(graph.status()));

    for (const auto& requests : kSteps) {
      Lengths step(requests);
      // The oracle is slow: many heads get short requests.
      if (heads > 16)
        for (std::int32_t& length : step.seq_lens) length = (length + 3) / 4;
      ASSERT_TRUE(succeeded(first.device.set_lengths(step.view())));
      for (const auto& layer : layers) {
        layer->batch.poison_outputs();
        ASSERT_TRUE(succeeded(layer->device.upload_outputs(layer->batch)));
      }
      ASSERT_TRUE(succeeded(graph->launch(stream())));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      for (const auto& layer : layers) {
        ASSERT_TRUE(succeeded(layer->device.download_outputs(layer->batch)));
        const DecodeCase& c = layer->batch.description();
        const DecodeArgs args = layer->batch.args();
        const OracleResult oracle = decode_oracle(c.problem(), step.view(), args);
        const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
        EXPECT_TRUE(result.ok) << "heads " << heads << " step " << &requests - kSteps.data() << ": " << result.message;
        EXPECT_FALSE(layer->batch.guard_damage().has_value());
        expect_untouched_from(layer->batch, oracle.tokens);
      }
    }
  }
}

// Decode alone in the graph, the plan uploaded into the same slot before each replay.
TEST_F(GpuGraph, OfDecodeAloneFollowsWhatIsBuiltIntoItsSlot) {
  auto step = DeviceStep::make(backend(), gpu_case({{7, 700}, {7, 700}, {7, 700}, {7, 700}, {7, 700}, {7, 700}}, 16));
  auto metadata = step->builder.build(0, step->batch.lengths(), stream());
  ASSERT_TRUE(succeeded(metadata.status()));
  const Result<Graph> graph =
      Graph::capture(backend(), stream(), [&] { return decode(*metadata, step->args(stream())); });
  ASSERT_TRUE(succeeded(graph.status()));
  for (const auto& requests : kSteps) {
    const Lengths lengths(requests);
    step->batch.poison_outputs();
    ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
    ASSERT_TRUE(succeeded(step->builder.build(0, lengths.view(), stream()).status()));
    ASSERT_TRUE(succeeded(graph->launch(stream())));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
    const DecodeCase& c = step->batch.description();
    const DecodeArgs args = step->batch.args();
    const OracleResult oracle = decode_oracle(c.problem(), lengths.view(), args);
    const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << result.message;
  }
}

// No launch begins before the one queued before it has ended, asked to overlap or not; the results are the same.
TEST_F(GpuStreams, WithSerialLaunchesGiveTheSameBits) {
  const Backend serial = Backend::open({.name = "cuda", .serial_launches = true}).value();
  for (std::int32_t heads : {16, 64, 128}) {
    const DecodeCase c = gpu_case({{1, 3000}, {2, 90}, {1, 700}}, heads);
    auto step = DeviceStep::make(backend(), c);
    ASSERT_TRUE(succeeded(step->run(backend(), stream())));
    const auto expected = step->batch.result_bits();
    auto builder = MetadataBuilder::create(serial, c.problem(), c.limits()).value();
    const auto metadata = builder.build(0, step->batch.lengths(), stream());
    ASSERT_TRUE(succeeded(metadata.status()));
    for (bool overlap : {false, true}) {
      step->batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
      DecodeArgs args = step->args(stream());
      args.overlap_previous = overlap;
      for (int call = 0; call < 3; ++call) ASSERT_TRUE(succeeded(decode(*metadata, args)));
      ASSERT_TRUE(succeeded(serial.synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
      EXPECT_EQ(step->batch.result_bits(), expected);
    }
  }
}

// Plans of two slots and partials in one workspace, which held garbage before.
TEST_F(GpuGraph, HoldsPlansThatLieInAWorkspace) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 3000}, {2, 90}, {1, 700}}, 16));
  ASSERT_TRUE(succeeded(step->run(backend(), stream())));
  const auto expected = step->batch.result_bits();

  const DecodeCase& c = step->batch.description();
  BuilderOptions options{.slots = 2, .own_workspace = false};
  const BuilderNeeds needs = MetadataBuilder::needs(backend(), c.problem(), c.limits(), options).value();
  const WorkspaceNeed both[] = {needs.plan, needs.workspace};
  Workspace workspace = Workspace::create(backend(), both, {.checks = WorkspaceChecks::on}).value();
  const WorkspaceSlice plan = workspace.take(0).value(), scratch = workspace.take(1).value();
  for (const WorkspaceSlice& slice : {plan, scratch}) {
    const std::vector<std::byte> garbage(slice.bytes.size(), std::byte{0xee});
    ASSERT_TRUE(succeeded(copy_to_device(backend(), slice.bytes.data(), garbage.data(), garbage.size(), stream())));
  }
  for (const auto& wrong :
       {plan.bytes.first(plan.bytes.size() - 1), std::span(plan.bytes.data() + 64, plan.bytes.size())}) {
    options.plan_memory = wrong;
    EXPECT_EQ(MetadataBuilder::create(backend(), c.problem(), c.limits(), options).status().field(),
              "options.plan_memory");
  }
  options.plan_memory = plan.bytes;
  auto builder = MetadataBuilder::create(backend(), c.problem(), c.limits(), options).value();
  ASSERT_TRUE(succeeded(builder.init_workspace(scratch.bytes, stream())));
  DecodeArgs args = step->args(stream());
  args.workspace = scratch.bytes;
  const auto result_of = [&](const auto& queue) -> Status {
    step->batch.poison_outputs();
    if (Status status = step->device.upload_outputs(step->batch); !status) return status;
    if (Status status = queue(); !status) return status;
    if (Status status = backend().synchronize(stream()); !status) return status;
    return step->device.download_outputs(step->batch);
  };
  const Result<Graph> graph = Graph::capture(backend(), stream(), [&]() -> Status {
    const auto metadata = builder.build_on_device(1, step->device.lengths(), stream());
    return metadata ? decode(*metadata, args) : metadata.status();
  });
  ASSERT_TRUE(succeeded(graph.status()));
  MetadataBuilder moved = std::move(builder);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(succeeded(result_of([&] { return graph->launch(stream()); })));
    EXPECT_EQ(step->batch.result_bits(), expected);
    const auto uploaded = moved.build(0, step->batch.lengths(), stream());
    ASSERT_TRUE(succeeded(uploaded.status()));
    ASSERT_TRUE(succeeded(result_of([&] { return decode(*uploaded, args); })));
    EXPECT_EQ(step->batch.result_bits(), expected);
  }
}

TEST_F(GpuGraph, HostPlansAreRefusedWhileTheStreamIsCaptured) {
  auto step = DeviceStep::make(backend(), gpu_case({{1, 64}}, 16));
  const Result<Graph> graph = Graph::capture(
      backend(), stream(), [&] { return step->builder.build(0, step->batch.lengths(), stream()).status(); });
  EXPECT_EQ(graph.status().code(), Code::unsupported);
  EXPECT_EQ(graph.status().field(), "stream");
  EXPECT_TRUE(succeeded(step->run(backend(), stream()))) << "the stream works again";
}

// Launches that want all multiprocessors at once must take turns and end; those of 60 workers run side by side. One
// kernel in both streams, or one that runs in clusters beside one that does not.
TEST_F(GpuStreams, TwoAtOnceNeitherHangNorDisturbEachOther) {
  constexpr int kRounds = 40;
  const OwnedStream other = OwnedStream::create(backend()).value();
  const Stream streams[] = {stream(), other.get()};
  const DecodeCase few = gpu_case({{1, 3000}, {2, 500}, {1, 64}}, 16),
                   many = gpu_case({{1, 2000}, {1, 90}, {3, 333}}, 128);
  const struct {
    const DecodeCase* shapes[2];
    std::int32_t workers;
  } runs[] = {{{&few, &few}, 0},    {{&many, &many}, 0}, {{&few, &few}, 60},
              {{&many, &many}, 60}, {{&few, &many}, 60}, {{&few, &many}, 0}};
  for (const auto& run : runs) {
    std::vector<std::unique_ptr<DeviceStep>> steps;
    std::vector<std::vector<std::byte>> expected;
    for (std::size_t i = 0; i < 2; ++i) {
      DecodeCase c = *run.shapes[i];
      c.seed = 7 + i;
      Limits limits = c.limits();
      limits.workers = run.workers;
      steps.push_back(DeviceStep::make(backend(), DecodeBatch(c), {.slots = 2}, limits));
      ASSERT_TRUE(succeeded(steps.back()->run(backend(), streams[i])));
      expected.push_back(steps.back()->batch.result_bits());
      steps.back()->batch.poison_outputs();
      ASSERT_TRUE(succeeded(steps.back()->device.upload_outputs(steps.back()->batch)));
    }
    ASSERT_TRUE(succeeded(backend().synchronize()));
    for (int n = 0; n < kRounds; ++n)
      for (std::size_t i = 0; i < 2; ++i) {
        const auto metadata = steps[i]->builder.build(n % 2, steps[i]->batch.lengths(), streams[i]);
        ASSERT_TRUE(succeeded(metadata.status()));
        DecodeArgs args = steps[i]->args(streams[i]);
        ASSERT_TRUE(succeeded(decode(*metadata, args)));
        args.overlap_previous = true;  // from here on the plan is older than the launch before
        for (int repeat = 0; repeat < 3; ++repeat) ASSERT_TRUE(succeeded(decode(*metadata, args)));
      }
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(succeeded(backend().synchronize(streams[i])));
      ASSERT_TRUE(succeeded(steps[i]->device.download_outputs(steps[i]->batch)));
      EXPECT_EQ(steps[i]->batch.result_bits(), expected[i]) << "stream " << i << " workers " << run.workers;
    }
  }
}

// Thread blocks of decode that wait for partials, and of fp8 prefill that wait for values others transpose, among those
// of the other call.
TEST_F(GpuStreams, DecodeAndPrefillAtOnceNeitherHangNorDisturbEachOther) {
  constexpr int kRounds = 30;
  const OwnedStream other = OwnedStream::create(backend()).value();
  for (std::int32_t heads : {16, 48, 128})
    for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
      const auto decoding =
          DeviceStep::make(backend(), gpu_case({{1, 3000}, {2, 500}, {1, 64}, {1, 1200}}, heads), {.slots = 2});
      PrefillCase prompt = gpu_prefill({{70, 700}, {130, 130}, {1, 2500}, {64, 63}}, 8);
      prompt.dtype = dtype;
      const auto prefilling = DevicePrefillStep::make(backend(), prompt, {.policy = Policy::uniform(4), .slots = 2});
      ASSERT_TRUE(succeeded(decoding->run(backend(), stream())));
      ASSERT_TRUE(succeeded(prefilling->run(backend(), other.get())));
      const auto decoded = decoding->batch.result_bits(), prefilled = prefilling->batch().result_bits();
      decoding->batch.poison_outputs();
      ASSERT_TRUE(succeeded(decoding->device.upload_outputs(decoding->batch)));
      ASSERT_TRUE(succeeded(prefilling->poison()));
      for (int n = 0; n < kRounds; ++n) {
        const auto step = decoding->builder.build(n % 2, decoding->batch.lengths(), stream());
        ASSERT_TRUE(succeeded(step.status()));
        const auto prefill_step = prefilling->builder.build(n % 2, prefilling->batch().lengths(), other.get());
        ASSERT_TRUE(succeeded(prefill_step.status()));
        for (int repeat = 0; repeat < 3; ++repeat) {
          ASSERT_TRUE(succeeded(decode(*step, decoding->args(stream()))));
          ASSERT_TRUE(succeeded(prefill(*prefill_step, prefilling->args(other.get()))));
        }
      }
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(backend().synchronize(other.get())));
      ASSERT_TRUE(succeeded(decoding->device.download_outputs(decoding->batch)));
      ASSERT_TRUE(succeeded(prefilling->device.download_outputs(prefilling->batch())));
      EXPECT_EQ(decoding->batch.result_bits(), decoded) << "heads " << heads << " beside " << dtype_name(dtype);
      EXPECT_EQ(prefilling->batch().result_bits(), prefilled) << dtype_name(dtype) << " beside heads " << heads;
    }
}

}  // namespace
}  // namespace latte::testkit
