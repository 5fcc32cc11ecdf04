// Prefill in graphs and in streams side by side, and equal bits.
#include <cstring>

#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuPrefillGraph : public OnGpu {};
class GpuPrefillStreams : public OnGpu {};
class GpuPrefillBits : public OnGpu {};

constexpr Limits kLimits{.max_requests = 8, .max_query_tokens = 300, .max_kv_tokens = 1024};
const Policy kPolicies[] = {Policy::balanced(), Policy::uniform(5), Policy::batch_invariant(256)};
constexpr Dtype kDtypes[] = {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3};

PrefillCase mixed_batch(Dtype dtype, std::int32_t heads = 3) {
  PrefillCase c = gpu_prefill({{70, 700}, {130, 130}, {1, 64}, {20, 0}, {1, 1}, {64, 63}, {33, 800}}, heads);
  c.dtype = dtype;
  c.scale_form = ScaleForm::per_head;
  return c;
}

void expect_untouched_from(const PrefillBatch& batch, std::int64_t token) {
  const std::vector<std::byte> poison(static_cast<std::size_t>(batch.out().row_bytes()), std::byte{0xff});
  for (; token < batch.out().view().shape[0]; ++token)
    for (std::int32_t head = 0; head < batch.description().heads; ++head)
      ASSERT_EQ(std::memcmp(batch.out().row(token, head), poison.data(), poison.size()), 0)
          << "row " << token << " belongs to no request and was written";
}

TEST_F(GpuPrefillGraph, ReplaysWithOtherDataAtTheSameAddresses) {
  for (Dtype dtype : kDtypes) {
    PrefillCase c = mixed_batch(dtype);
    auto step = DevicePrefillStep::make(backend(), c);
    const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    const Result<Graph> graph =
        Graph::capture(backend(), stream(), [&] { return prefill(metadata, step->args(stream())); });
    ASSERT_TRUE(succeeded(graph.status()));
    for (std::uint64_t seed : {11, 12, 13}) {
      c.seed = seed;
      PreparedPrefill other(c);
      other.batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_inputs(other.batch)));
      ASSERT_TRUE(succeeded(step->device.upload_outputs(other.batch)));
      ASSERT_TRUE(succeeded(graph->launch(stream())));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(other.batch)));
      const Comparison result = compare_prefill(other, step->builder.math());
      EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    }
  }
}

// Three layers in one graph; the plan is uploaded into the same slot before each replay, for steps of other lengths.
TEST_F(GpuPrefillGraph, FollowsWhatIsBuiltIntoItsSlot) {
  const std::vector<std::vector<PrefillRequest>> steps = {
      {{100, 300}, {100, 300}, {100, 300}, {100, 300}},
      {{1, 17}, {64, 64}, {0, 5}, {99, 290}},
      {{0, 0}, {100, 0}, {3, 1}, {65, 130}},
      {{1, 1}, {1, 1}, {1, 1}, {1, 1}},
  };
  for (Dtype dtype : kDtypes) {
    PrefillCase largest = gpu_prefill(steps.front(), 3);
    largest.dtype = dtype;
    std::vector<std::unique_ptr<DevicePrefillStep>> layers;
    for (std::uint64_t seed : {1, 2, 3}) {
      largest.seed = seed;
      layers.push_back(DevicePrefillStep::make(backend(), largest));
    }
    PrefillBuilder& builder = layers.front()->builder;
    const auto first = builder.build(0, layers.front()->batch().lengths(), stream());
    ASSERT_TRUE(succeeded(first.status()));
    const Result<Graph> graph = Graph::capture(backend(), stream(), [&]() -> Status {
      for (const auto& layer : layers)
        if (Status status = prefill(*first, layer->args(stream())); !status) return status;
      return {};
    });
    ASSERT_TRUE(succeeded(graph.status()));
    for (const auto& requests : steps) {
      std::vector<std::int32_t> query_start{0}, kv_start{0};
      for (const PrefillRequest& request : requests) {
        query_start.push_back(query_start.back() + request.query_tokens);
        kv_start.push_back(kv_start.back() + request.kv_tokens);
      }
      const PrefillLengths lengths{.query_start = query_start, .kv_start = kv_start};
      for (const auto& layer : layers) ASSERT_TRUE(succeeded(layer->poison()));
      ASSERT_TRUE(succeeded(builder.build(0, lengths, stream()).status()));
      ASSERT_TRUE(succeeded(graph->launch(stream())));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      for (const auto& layer : layers) {
        ASSERT_TRUE(succeeded(layer->device.download_outputs(layer->batch())));
        const PrefillArgs args = layer->batch().args();
        const PrefillCase& c = layer->batch().description();
        const OracleResult oracle = prefill_oracle(c.problem(), lengths, args, builder.math());
        const Comparison result =
            compare(args.out, args.lse, oracle, c.tolerance(builder.math(), oracle.max_abs_score));
        EXPECT_TRUE(result.ok) << dtype_name(dtype) << " step " << &requests - steps.data() << ": " << result.message;
        EXPECT_FALSE(layer->batch().guard_damage().has_value());
        expect_untouched_from(layer->batch(), oracle.tokens);
      }
    }
  }
}

// A later step may be larger than the tensors of the captured call. Rows that they have see no more than they hold.
TEST_F(GpuPrefillGraph, DropsRowsBehindTheCapturedTensors) {
  constexpr std::int32_t kRows = 40;
  for (Dtype dtype : kDtypes) {
    PrefillCase c = gpu_prefill({{300, 300}}, 3);
    c.dtype = dtype;
    const auto step = DevicePrefillStep::make(backend(), c);
    const std::int32_t starts[] = {0, kRows};
    const auto small = step->builder.build(0, {.query_start = starts, .kv_start = starts}, stream());
    ASSERT_TRUE(succeeded(small.status()));
    PrefillArgs args = step->args(stream());
    args.q.shape[0] = args.k.shape[0] = args.v.shape[0] = args.out.shape[0] = args.lse.shape[0] = kRows;
    const Result<Graph> graph = Graph::capture(backend(), stream(), [&] { return prefill(*small, args); });
    ASSERT_TRUE(succeeded(graph.status()));
    ASSERT_TRUE(succeeded(step->poison()));
    ASSERT_TRUE(succeeded(step->builder.build(0, step->batch().lengths(), stream()).status()));
    ASSERT_TRUE(succeeded(graph->launch(stream())));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
    const OracleResult oracle = prefill_oracle(c.problem(), {.query_start = starts, .kv_start = starts},
                                               step->batch().args(), step->builder.math());
    const Comparison result = compare(step->batch().args().out, step->batch().args().lse, oracle,
                                      c.tolerance(step->builder.math(), oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << dtype_name(dtype) << ": " << result.message;
    EXPECT_FALSE(step->batch().guard_damage().has_value());
    expect_untouched_from(step->batch(), kRows);
  }
}

TEST_F(GpuPrefillGraph, HostPlansAreRefusedWhileTheStreamIsCaptured) {
  auto step = DevicePrefillStep::make(backend(), gpu_prefill({{64, 64}}, 2));
  const Result<Graph> graph = Graph::capture(
      backend(), stream(), [&] { return step->builder.build(0, step->batch().lengths(), stream()).status(); });
  EXPECT_EQ(graph.status().code(), Code::unsupported);
  EXPECT_TRUE(succeeded(step->run(backend(), stream()))) << "the stream works again";
}

// Launches want all multiprocessors; two streams of them must take turns and end.
TEST_F(GpuPrefillStreams, TwoAtOnceNeitherHangNorDisturbEachOther) {
  constexpr int kRounds = 30;
  const OwnedStream other = OwnedStream::create(backend()).value();
  const Stream streams[] = {stream(), other.get()};
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3})
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(4)}) {
      std::vector<std::unique_ptr<DevicePrefillStep>> steps;
      std::vector<std::vector<std::byte>> expected;
      for (int i = 0; i < 2; ++i) {
        PrefillCase c = mixed_batch(dtype, 8 + i);
        c.seed = 7 + static_cast<std::uint64_t>(i);
        steps.push_back(DevicePrefillStep::make(backend(), c, {.policy = policy, .slots = 2}));
        ASSERT_TRUE(succeeded(steps.back()->run(backend(), streams[i])));
        expected.push_back(steps.back()->batch().result_bits());
      }
      for (int n = 0; n < kRounds; ++n)
        for (std::size_t i = 0; i < 2; ++i) {
          const auto metadata = steps[i]->builder.build(n % 2, steps[i]->batch().lengths(), streams[i]);
          ASSERT_TRUE(succeeded(metadata.status()));
          for (int repeat = 0; repeat < 3; ++repeat)
            ASSERT_TRUE(succeeded(prefill(*metadata, steps[i]->args(streams[i]))));
        }
      for (std::size_t i = 0; i < 2; ++i) {
        ASSERT_TRUE(succeeded(backend().synchronize(streams[i])));
        ASSERT_TRUE(succeeded(steps[i]->device.download_outputs(steps[i]->batch())));
        EXPECT_EQ(steps[i]->batch().result_bits(), expected[i]);
      }
    }
}

TEST_F(GpuPrefillBits, AreTheSameFromRunToRunAndFromReplayToReplay) {
  for (Dtype dtype : kDtypes)
    for (const Policy& policy : kPolicies) {
      auto step = DevicePrefillStep::make(backend(), PrefillBatch(mixed_batch(dtype)), {.policy = policy}, kLimits);
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      const auto first = step->batch().result_bits();
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(succeeded(step->run(backend(), stream())));
        ASSERT_EQ(step->batch().result_bits(), first) << dtype_name(dtype) << " " << policy_name(policy.kind);
      }
      const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      const Graph graph =
          Graph::capture(backend(), stream(), [&] { return prefill(metadata, step->args(stream())); }).value();
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(succeeded(step->poison()));
        ASSERT_TRUE(succeeded(graph.launch(stream())));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
        ASSERT_EQ(step->batch().result_bits(), first) << "replay, " << dtype_name(dtype);
      }
    }
}

TEST_F(GpuPrefillBits, DoNotDependOnWhereTheTensorsLie) {
  for (Dtype dtype : kDtypes) {
    const PrefillCase c = mixed_batch(dtype);
    auto step = DevicePrefillStep::make(backend(), PrefillBatch(c), {}, kLimits);
    ASSERT_TRUE(succeeded(step->run(backend(), stream())));
    for (Layout layout : {Layout::gapped, Layout::transposed}) {
      PrefillCase other = c;
      other.q_layout = other.k_layout = other.v_layout = other.out_layout = other.lse_layout = layout;
      auto moved = DevicePrefillStep::make(backend(), step->batch().relaid(other), {}, kLimits);
      ASSERT_TRUE(succeeded(moved->run(backend(), stream())));
      EXPECT_EQ(moved->batch().result_bits(), step->batch().result_bits()) << other.name();
    }
  }
}

TEST_F(GpuPrefillBits, OfBatchInvariantStepsDoNotDependOnNeighboursOrderOrPadding) {
  constexpr std::int32_t kPad = PrefillBatch::kPadding;
  const std::vector<std::vector<std::int32_t>> orders = {
      {0}, {1}, {2}, {3}, {5}, {6}, {6, 5, 4, 3, 2, 1, 0}, {kPad, 5, kPad, 0, 1, kPad}, {5, 5, 0, 2, 6, 6}};
  for (Dtype dtype : kDtypes)
    for (std::int32_t chunk : {0, 256}) {
      const BuilderOptions options{.policy = Policy::batch_invariant(chunk)};
      auto whole = DevicePrefillStep::make(backend(), PrefillBatch(mixed_batch(dtype)), options, kLimits);
      ASSERT_TRUE(succeeded(whole->run(backend(), stream())));
      for (const auto& order : orders) {
        auto step = DevicePrefillStep::make(backend(), whole->batch().reordered(order), options, kLimits);
        ASSERT_TRUE(succeeded(step->run(backend(), stream())));
        for (std::size_t i = 0; i < order.size(); ++i) {
          if (order[i] == kPad) continue;
          EXPECT_EQ(step->batch().result_bits(static_cast<std::int32_t>(i)), whole->batch().result_bits(order[i]))
              << "request " << order[i] << " as number " << i << " of " << step->batch().description().spec() << " "
              << dtype_name(dtype) << " chunk " << chunk;
        }
      }
    }
}

TEST_F(GpuPrefillBits, OfBatchInvariantStepsDoNotDependOnTheNumberOfWorkers) {
  for (Dtype dtype : kDtypes) {
    std::vector<std::byte> expected;
    for (std::int32_t workers : {0, 2, 5, 64, 131}) {
      Limits limits = kLimits;
      limits.workers = workers;
      auto step = DevicePrefillStep::make(backend(), PrefillBatch(mixed_batch(dtype)),
                                          {.policy = Policy::batch_invariant(256)}, limits);
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      if (expected.empty()) expected = step->batch().result_bits();
      EXPECT_EQ(step->batch().result_bits(), expected) << dtype_name(dtype) << " workers " << workers;
    }
  }
}

}  // namespace
}  // namespace latte::testkit
