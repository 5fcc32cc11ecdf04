// Tiles of two pieces across the end of a share. There one thread block joins both alone (src/cuda/sm90/decode, the
// plain kernel). Where both end a share each joins half of the rows (twins), elsewhere a slice.
#include <array>

#include <gtest/gtest.h>

#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuSeams : public OnGpu {
 protected:
  static int count(const Plan& plan) {
    int seams = 0;
    const auto pieces = [&](std::int32_t worker) { return plan.work_indptr[worker + 1] - plan.work_indptr[worker]; };
    for (std::int32_t worker = 0; worker + 1 < plan.workers(); ++worker) {
      if (pieces(worker) < 2 || pieces(worker + 1) < 2) continue;
      const WorkRecord* last = &plan.work_info_set[plan.work_indptr[worker + 1]] - 1;
      const std::int32_t tile = last->tile;
      seams +=
          last[1].tile == tile && last->kv_begin == 0 && plan.reduce_indptr[tile + 1] - plan.reduce_indptr[tile] == 2;
    }
    return seams;
  }
  int seams(DeviceStep& step) const {
    return count(step.builder.build(0, step.batch.lengths(), stream()).value().plan());
  }
  // Several times, as a launch leaves counters for the next.
  void expect_oracle(DeviceStep& step) const {
    const DecodeCase& c = step.batch.description();
    const OracleResult oracle = decode_oracle(c.problem(), step.batch.lengths(), step.batch.args());
    for (int repeat = 0; repeat < 3; ++repeat) {
      ASSERT_TRUE(succeeded(step.run(backend(), stream())));
      const DecodeArgs args = step.batch.args();
      const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
      EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    }
  }
};

struct Rows {
  std::int32_t heads, most_tokens, tokens;  // of a request: at most, by the limits; in this batch
};
// swapped16, 32 and 48; plain; pairs, the last of which have one row, and a thread block without any
constexpr Rows kRows[] = {{5, 1, 1},  {9, 3, 3},   {41, 1, 1}, {60, 1, 1},
                          {20, 3, 3}, {100, 1, 1}, {64, 2, 2}, {1, 70, 1}};

// With several query tokens some rows see nothing of the second piece: it may have a token alone. A request alone has
// its pieces on two workers: twins, or slices in the swapped kernels.
TEST_F(GpuSeams, HaveTheBitsOfTwinsAndSlices) {
  constexpr std::int32_t kRequests = 9, kChunk = 192;
  const BuilderOptions options{.policy = Policy::batch_invariant(kChunk)};
  for (std::int32_t latent : {512, 256})
    for (const auto& [heads, most_tokens, tokens] : kRows)
      for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        std::vector<RequestLengths> requests;
        for (std::int32_t r = 0; r < kRequests; ++r) requests.push_back({tokens, kChunk + 1 + 23 * r % 185});
        DecodeCase c = gpu_case(requests, heads, dtype == Dtype::f32 ? 16 : 7);
        c.latent = latent;
        c.out_dtype = dtype;
        Limits limits{.max_requests = kRequests, .max_query_tokens = most_tokens, .max_kv_tokens = 2 * kChunk};
        limits.workers = heads * most_tokens > 64 ? 8 : 4;
        auto step = DeviceStep::make(backend(), DecodeBatch(c), options, limits);
        ASSERT_GT(seams(*step), 0);
        ASSERT_TRUE(succeeded(step->run(backend(), stream())));
        limits.workers = 0;
        for (std::int32_t r = 0; r < kRequests; ++r) {
          auto alone = DeviceStep::make(backend(), step->batch.reordered(std::array{r}), options, limits);
          ASSERT_EQ(seams(*alone), 0);
          ASSERT_TRUE(succeeded(alone->run(backend(), stream())));
          EXPECT_EQ(step->batch.result_bits(r), alone->batch.result_bits(0)) << c.name() << " request " << r;
        }
      }
}

TEST_F(GpuSeams, OfACutLineAgreeWithTheOracle) {
  for (const auto& [heads, most_tokens, tokens] : kRows)
    for (std::int32_t page_size : {64, 7}) {
      if (heads == 1) continue;  // its bits are compared above
      const DecodeCase c = gpu_case(std::vector<RequestLengths>(6, {tokens, 2000}), heads, page_size);
      Limits limits{.max_requests = 6, .max_query_tokens = most_tokens, .max_kv_tokens = 2000};
      limits.workers = heads * most_tokens > 64 ? 8 : 4;
      auto step = DeviceStep::make(backend(), DecodeBatch(c), {}, limits);
      EXPECT_GT(seams(*step), 0) << c.name();
      expect_oracle(*step);
    }
}

// Beside a tile that is joined in slices, by runs of its partials.
TEST_F(GpuSeams, BesideSlicesAgreeWithTheOracle) {
  for (std::int32_t heads : {60, 100}) {
    std::vector<RequestLengths> requests(8, {1, 90});
    requests[0].kv_tokens = 800;
    Limits limits{.max_requests = 8, .max_kv_tokens = 800};
    limits.workers = heads > 64 ? 8 : 4;
    auto step = DeviceStep::make(backend(), DecodeBatch(gpu_case(requests, heads, 16)),
                                 {.policy = Policy::batch_invariant(48)}, limits);
    EXPECT_GT(seams(*step), 0);
    expect_oracle(*step);
  }
}

// Two workers of uniform(2) have a tile's second piece at the end of one share, and its first at the start of the next.
// It is joined in slices there. Alone its pieces are twins, each at the end of a share: the same bits.
TEST_F(GpuSeams, AreNotSeenWhereTheSecondPieceComesFirst) {
  for (std::int32_t heads : {64, 128})
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(2)}) {
      const DecodeCase c = gpu_case({{1, 40}, {1, 8000}, {1, 40}}, heads, 64);
      Limits limits{.max_requests = 3, .max_kv_tokens = 8000};
      limits.workers = heads > 64 ? 4 : 2;
      auto step = DeviceStep::make(backend(), DecodeBatch(c), {.policy = policy}, limits);
      const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
      const auto records = metadata.plan().work_info_set;
      ASSERT_EQ(records.size(), 4u);
      ASSERT_TRUE(records[1].tile == records[2].tile && records[2].kv_begin == 0 && records[1].kv_begin > 0);
      expect_oracle(*step);
      if (policy.kind != PolicyKind::uniform) continue;
      auto alone = DeviceStep::make(backend(), step->batch.reordered(std::array{1}), {.policy = policy}, limits);
      ASSERT_TRUE(succeeded(alone->run(backend(), stream())));
      EXPECT_EQ(step->batch.result_bits(1), alone->batch.result_bits(0)) << c.name();
    }
}

// Made small for compute-sanitizer (scripts/sanitize_gpu).
TEST_F(GpuSeams, AreJoinedInSharedMemory) {
  for (std::int32_t heads : {64, 100})
    for (std::int32_t page_size : {16, 7}) {
      Limits limits{.max_requests = 5, .max_kv_tokens = 90};
      limits.workers = heads > 64 ? 8 : 4;
      auto step =
          DeviceStep::make(backend(), DecodeBatch(gpu_case(std::vector<RequestLengths>(5, {1, 90}), heads, page_size)),
                           {.policy = Policy::batch_invariant(48)}, limits);
      EXPECT_GT(seams(*step), 0);
      expect_oracle(*step);
    }
}

// The same for twins: as many workers as there are pieces. Halves of rows that warps do not divide evenly, one row, and
// a thread block of a pair without rows.
TEST_F(GpuSeams, AreJoinedByTwins) {
  for (const auto& [heads, most_tokens, tokens] : {Rows{64, 1, 1}, {50, 1, 1}, {100, 1, 1}, {67, 1, 1}, {1, 70, 1}})
    for (std::int32_t page_size : {16, 7}) {
      Limits limits{.max_requests = 2, .max_query_tokens = most_tokens, .max_kv_tokens = 90};
      limits.workers = heads * most_tokens > 64 ? 8 : 4;
      const DecodeCase c = gpu_case(std::vector<RequestLengths>(2, {tokens, 90}), heads, page_size);
      auto step = DeviceStep::make(backend(), DecodeBatch(c), {.policy = Policy::batch_invariant(48)}, limits);
      const auto metadata = step->builder.build(0, step->batch.lengths(), stream()).value();
      ASSERT_EQ(metadata.plan().work_info_set.size(), 4u) << c.name();
      expect_oracle(*step);
    }
}

}  // namespace
}  // namespace latte::testkit
