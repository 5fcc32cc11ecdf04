// Equal bits: from run to run, from replay to replay, and for the batch-invariant policy across batches.
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuBits : public OnGpu {};

constexpr Limits kLimits{.max_requests = 16, .max_query_tokens = 4, .max_kv_tokens = 4096};

DecodeCase mixed_batch(std::int32_t heads) {
  return gpu_case({{1, 700}, {3, 130}, {1, 64}, {2, 0}, {1, 1}, {4, 2500}, {1, 333}}, heads, 16);
}

const Policy kPolicies[] = {Policy::balanced(), Policy::uniform(5), Policy::batch_invariant(256)};

TEST_F(GpuBits, AreTheSameFromRunToRunAndFromReplayToReplay) {
  for (std::int32_t heads : {5, 12, 16, 32})
    for (const Policy& policy : kPolicies) {
      auto step = DeviceStep::make(backend(), DecodeBatch(mixed_batch(heads)), {.policy = policy}, kLimits);
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      const auto first = step->batch.result_bits();
      for (int repeat = 0; repeat < 5; ++repeat) {
        ASSERT_TRUE(succeeded(step->run(backend(), stream())));
        ASSERT_EQ(step->batch.result_bits(), first) << "heads " << heads << " " << policy_name(policy.kind);
      }
      const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      const Graph graph =
          Graph::capture(backend(), stream(), [&] { return decode(metadata, step->args(stream())); }).value();
      for (int repeat = 0; repeat < 5; ++repeat) {
        step->batch.poison_outputs();
        ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
        ASSERT_TRUE(succeeded(graph.launch(stream())));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
        ASSERT_EQ(step->batch.result_bits(), first) << "replay, heads " << heads << " " << policy_name(policy.kind);
      }
    }
}

// Layers that follow each other at once, and that fetch before their predecessor ends: each has tensors of its own, all
// have one plan and one workspace. With up to half of the workers two launches can be on the device at the same time.
TEST_F(GpuBits, AreTheSameWhenLaunchesOverlap) {
  constexpr std::size_t kLayers = 8;
  for (std::int32_t workers : {0, 16, 66})
    for (std::int32_t heads : {4, 12, 16, 128}) {
      Limits limits = kLimits;
      limits.workers = workers;
      std::vector<std::unique_ptr<DeviceStep>> layers;
      std::vector<std::vector<std::byte>> expected;
      for (std::size_t i = 0; i < kLayers; ++i) {
        DecodeCase c = mixed_batch(heads);
        c.seed = i;
        layers.push_back(DeviceStep::make(backend(), DecodeBatch(c), {}, limits));
        ASSERT_TRUE(succeeded(layers[i]->run(backend(), stream())));
        expected.push_back(layers[i]->batch.result_bits());
      }
      EXPECT_NE(expected[0], expected[1]);
      const auto metadata = layers[0]->builder.build(0, layers[0]->batch.lengths(), stream()).value();
      for (bool overlap : {false, true}) {
        for (const auto& layer : layers) {
          layer->batch.poison_outputs();
          ASSERT_TRUE(succeeded(layer->device.upload_outputs(layer->batch)));
        }
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        for (const auto& layer : layers) {
          DecodeArgs args = layer->args(stream());
          args.overlap_previous = overlap;
          ASSERT_TRUE(succeeded(decode(metadata, args)));
        }
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        for (std::size_t i = 0; i < kLayers; ++i) {
          ASSERT_TRUE(succeeded(layers[i]->device.download_outputs(layers[i]->batch)));
          EXPECT_EQ(layers[i]->batch.result_bits(), expected[i])
              << "layer " << i << " heads " << heads << " workers " << workers << " overlap " << overlap;
        }
      }
    }
}

// The kernel before writes the queries and lets decode start at once: first NaN, then what belongs there. It is the
// cache's writer, to which query rows are tokens of a cache.
TEST_F(GpuBits, AreTheSameWhenDecodeOverlapsTheWriteOfItsQueries) {
  for (std::int32_t heads : {4, 12, 16, 64, 128}) {
    auto step = DeviceStep::make(backend(), gpu_case({{1, 900}, {2, 300}, {1, 65}, {4, 130}}, heads));
    ASSERT_TRUE(succeeded(step->run(backend(), stream())));
    const auto expected = step->batch.result_bits();

    const ConstTensorView q = step->batch.args().q;
    const std::int64_t tokens = q.shape[0], rows = tokens * heads;
    std::vector<std::uint16_t> latent, rope;
    std::vector<std::int64_t> slots;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto* from =
          static_cast<const std::uint16_t*>(q.data) + row / heads * q.stride[0] + row % heads * q.stride[1];
      latent.insert(latent.end(), from, from + 512);
      rope.insert(rope.end(), from + 512, from + 576);
      slots.push_back(row);
    }
    const DeviceMemory d_slots = upload(slots), d_latent = upload(latent), d_rope = upload(rope);
    const DeviceMemory d_nan = upload(std::vector<std::uint16_t>(latent.size(), 0xffff));
    const DeviceMemory written = upload(std::vector<std::uint16_t>(static_cast<std::size_t>(rows) * 576, 0xffff));
    DecodeArgs args = step->args(stream());
    args.overlap_previous = true;
    args.q = dense(written.data(), Dtype::bf16, {tokens, heads, 576});
    const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
    for (int repeat = 0; repeat < 10; ++repeat) {
      step->batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      for (const DeviceMemory* from : {&d_nan, &d_latent})
        ASSERT_TRUE(succeeded(
            write_kv(backend(), {.kv_c = dense(from->data(), Dtype::bf16, {rows, 512}),
                                 .k_pe = dense(from == &d_nan ? d_nan.data() : d_rope.data(), Dtype::bf16, {rows, 64}),
                                 .slot_mapping = {reinterpret_cast<const std::int64_t*>(d_slots.data()), slots.size()},
                                 .kv_cache = dense(written.data(), Dtype::bf16, {rows, 1, 576}),
                                 .stream = stream()})));
      ASSERT_TRUE(succeeded(decode(metadata, args)));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
      ASSERT_EQ(step->batch.result_bits(), expected) << "heads " << heads;
    }
  }
}

// The kernel before writes the step's own tokens and lets decode start at once: first NaN, then what belongs there.
TEST_F(GpuBits, AreTheSameWhenDecodeOverlapsTheWriteOfItsTokens) {
  for (std::int32_t heads : {4, 8, 12, 16, 64, 128})
    for (std::int32_t page_size : {64, 7}) {
      const std::vector<RequestLengths> requests = {{1, 900}, {2, 300}, {1, 65}, {3, 3}, {1, 1}, {4, 130}};
      auto step = DeviceStep::make(backend(), gpu_case(requests, heads, page_size));
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      const auto expected = step->batch.result_bits();

      const DecodeArgs host = step->batch.args();
      const auto* cache = static_cast<const std::uint16_t*>(host.kv_cache.data);
      std::vector<std::int64_t> slots;
      std::vector<std::uint16_t> latent, rope;
      for (std::size_t r = 0; r < requests.size(); ++r)
        for (std::int32_t t = requests[r].kv_tokens - requests[r].query_tokens; t < requests[r].kv_tokens; ++t) {
          const std::int64_t page =
              host.pages.block_table[static_cast<std::int64_t>(r) * host.pages.block_table_stride + t / page_size];
          const auto* token = cache + page * host.kv_cache.stride[0] + t % page_size * host.kv_cache.stride[1];
          slots.push_back(page * page_size + t % page_size);
          latent.insert(latent.end(), token, token + 512);
          rope.insert(rope.end(), token + 512, token + 576);
        }
      const DeviceMemory d_slots = upload(slots), d_latent = upload(latent), d_rope = upload(rope);
      const DeviceMemory d_nan = upload(std::vector<std::uint16_t>(latent.size(), 0xffff));
      const auto tokens = static_cast<std::int64_t>(slots.size());
      DecodeArgs args = step->args(stream());
      args.overlap_previous = true;
      WriteKvArgs write;
      write.slot_mapping = {reinterpret_cast<const std::int64_t*>(d_slots.data()), slots.size()};
      write.kv_cache = {.data = const_cast<void*>(args.kv_cache.data),
                        .dtype = args.kv_cache.dtype,
                        .rank = args.kv_cache.rank,
                        .shape = args.kv_cache.shape,
                        .stride = args.kv_cache.stride};
      write.stream = stream();
      const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      for (int repeat = 0; repeat < 10; ++repeat) {
        step->batch.poison_outputs();
        ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        for (const DeviceMemory* from : {&d_nan, &d_latent}) {
          write.kv_c = dense(from->data(), Dtype::bf16, {tokens, 512});
          write.k_pe = dense(from == &d_nan ? d_nan.data() : d_rope.data(), Dtype::bf16, {tokens, 64});
          ASSERT_TRUE(succeeded(write_kv(backend(), write)));
        }
        ASSERT_TRUE(succeeded(decode(metadata, args)));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
        EXPECT_EQ(step->batch.result_bits(), expected);
      }
    }
}

TEST_F(GpuBits, DoNotDependOnWhereThePagesLie) {
  DecodeCase c = mixed_batch(16);
  auto step = DeviceStep::make(backend(), DecodeBatch(c), {}, kLimits);
  ASSERT_TRUE(succeeded(step->run(backend(), stream())));
  c.page_seed = 1;
  auto moved = DeviceStep::make(backend(), DecodeBatch(c), {}, kLimits);
  ASSERT_TRUE(succeeded(moved->run(backend(), stream())));
  EXPECT_EQ(moved->batch.result_bits(), step->batch.result_bits());
}

// A block that all rows of a tile see, and one in which something is hidden from another row, are different code.
TEST_F(GpuBits, DoNotDependOnWhatTheRowsBesideSee) {
  for (std::int32_t heads : {4, 8, 12, 16, 32})  // swapped16, 32, 48, plain and pairs: all rows in one tile
    for (std::int32_t latent : {512, 256})
      for (std::int32_t page_size : {64, 7}) {
        DecodeCase c = gpu_case({{4, 1000}}, heads, page_size);
        c.latent = latent;
        c.out_dtype = Dtype::f32;
        auto step = DeviceStep::make(backend(), DecodeBatch(c), {.policy = Policy::uniform(3)}, kLimits);
        const auto run = [&](std::int32_t second_sees) {
          const std::vector<std::int32_t> visible = {1000, second_sees, 1000, 1000};
          StepLengths lengths = step->batch.lengths();
          lengths.visible = visible;
          ASSERT_TRUE(succeeded(step->run(backend(), stream(), lengths)));
        };
        run(1000);
        const auto all = step->batch.result_bits();
        const std::vector<std::byte> expected[] = {step->batch.token_bits(0), step->batch.token_bits(2),
                                                   step->batch.token_bits(3)};
        for (std::int32_t seen : {0, 1, 47, 130, 700, 999}) {
          run(seen);
          const auto where = testing::Message() << c.name() << " seen " << seen;
          EXPECT_NE(step->batch.result_bits(), all) << where;
          EXPECT_EQ(step->batch.token_bits(0), expected[0]) << where;
          EXPECT_EQ(step->batch.token_bits(2), expected[1]) << where;
          EXPECT_EQ(step->batch.token_bits(3), expected[2]) << where;
        }
      }
}

TEST_F(GpuBits, OfBatchInvariantStepsDoNotDependOnNeighboursOrderOrPadding) {
  constexpr std::int32_t kPad = DecodeBatch::kPadding;
  const std::vector<std::vector<std::int32_t>> orders = {
      {0}, {1}, {2}, {3}, {4}, {5}, {6}, {6, 5, 4, 3, 2, 1, 0}, {kPad, 5, kPad, 0, 1, kPad}, {5, 5, 5, 2, 6, 6}};
  for (std::int32_t heads : {4, 5, 12, 16, 64})  // swapped16, 32, 48, plain and pairs
    for (std::int32_t chunk : {0, 256}) {
      const BuilderOptions options{.policy = Policy::batch_invariant(chunk)};
      auto whole = DeviceStep::make(backend(), DecodeBatch(mixed_batch(heads)), options, kLimits);
      ASSERT_TRUE(succeeded(whole->run(backend(), stream())));
      for (const auto& order : orders) {
        auto step = DeviceStep::make(backend(), whole->batch.reordered(order), options, kLimits);
        ASSERT_TRUE(succeeded(step->run(backend(), stream())));
        for (std::size_t i = 0; i < order.size(); ++i) {
          if (order[i] == kPad) continue;
          EXPECT_EQ(step->batch.result_bits(static_cast<std::int32_t>(i)), whole->batch.result_bits(order[i]))
              << "request " << order[i] << " as number " << i << " of " << step->batch.description().spec() << " heads "
              << heads << " chunk " << chunk;
        }
      }
    }
}

TEST_F(GpuBits, OfBatchInvariantStepsDoNotDependOnTheNumberOfWorkers) {
  for (std::int32_t heads : {4, 5, 12, 16, 64}) {
    std::vector<std::byte> expected;
    for (std::int32_t workers : {0, 2, 5, 64, 131}) {
      Limits limits = kLimits;
      limits.workers = workers;
      auto step = DeviceStep::make(backend(), DecodeBatch(mixed_batch(heads)), {.policy = Policy::batch_invariant(256)},
                                   limits);
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      if (expected.empty()) expected = step->batch.result_bits();
      EXPECT_EQ(step->batch.result_bits(), expected) << "heads " << heads << " workers " << workers;
    }
  }
}

// The same query and tokens in tiles of 1, 2 and 3 query tokens: in which order partials are joined follows from the
// kernel and their number, not from the rows that a tile has. fp32 outputs, as another order hardly shows in fewer
// bits.
TEST_F(GpuBits, OfASplitRowDoNotDependOnTheRowsOfItsTile) {
  const auto expect_equal = [&](std::int32_t heads, std::int32_t latent, std::int32_t splits) {
    std::vector<std::byte> query, expected;
    const std::int32_t kv_tokens = splits > 64 ? 16500 : 5200;  // a block a piece, at least
    for (std::int32_t tokens : {3, 2, 1}) {
      DecodeCase c = gpu_case({{tokens, kv_tokens}}, heads, 16);
      c.mask = Mask::none;
      c.latent = latent;
      c.out_dtype = Dtype::f32;
      auto step = DeviceStep::make(backend(), DecodeBatch(c), {.policy = Policy::uniform(splits)},
                                   {.max_requests = 1, .max_query_tokens = 3, .max_kv_tokens = kv_tokens});
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      const DecodeArgs args = step->batch.args();
      const auto* q = static_cast<const std::byte*>(args.q.data);
      const auto* out = static_cast<const std::byte*>(args.out.data);
      const std::vector<std::byte> first_query(q, q + heads * (c.latent + c.rope) * 2);
      const std::vector<std::byte> first(out, out + heads * c.latent * 4);
      if (expected.empty()) query = first_query, expected = first;
      ASSERT_EQ(first_query, query);  // the same seed gives the same tokens, and the same first query
      EXPECT_EQ(first, expected) << "heads " << heads << " latent " << latent << " splits " << splits
                                 << " query tokens " << tokens;
    }
  };
  // Up to the numbers at which there are other loads, or twice as many runs.
  for (std::int32_t heads : {5, 10, 16, 20, 40})  // swapped16, 32, 48, plain and pairs
    for (std::int32_t splits : {2, 3, 4, 5, 8, 9, 15, 16, 23, 24, 31, 32, 47, 48, 63, 64, 127, 128, 256})
      expect_equal(heads, 512, splits);
  for (std::int32_t heads : {5, 40})
    for (std::int32_t splits : {5, 9, 19}) expect_equal(heads, 256, splits);
}

}  // namespace
}  // namespace latte::testkit
