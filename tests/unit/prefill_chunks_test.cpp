// Cutting a step's context into chunks, and sizing them.
#include "backend/prefill_chunks.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace latte::backend {
namespace {

struct Chunk {
  std::int32_t begin;
  std::int32_t end;
  std::vector<std::int32_t> starts;
};

std::vector<Chunk> cut(const std::vector<std::int32_t>& lens, std::int32_t chunk_tokens, std::int32_t positions = 0) {
  std::vector<Chunk> chunks;
  for (std::int32_t begin = 0;;) {
    const std::int32_t end = chunk_end(lens, begin, {.chunk_tokens = chunk_tokens, .positions = positions});
    if (end == begin) return chunks;
    Chunk chunk{begin, end, std::vector<std::int32_t>(lens.size() + 1)};
    chunk_starts(lens, begin, end, chunk.starts);
    chunks.push_back(chunk);
    begin = end;
  }
}

std::vector<std::int32_t> random_lens(std::mt19937& random, std::int32_t requests, std::int32_t longest) {
  std::vector<std::int32_t> lens(static_cast<std::size_t>(requests));
  for (std::int32_t& len : lens)
    len = random() % 4 == 0 ? 0 : static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(longest + 1));
  return lens;
}

TEST(PrefillChunks, HoldEveryContextTokenExactlyOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const auto requests = static_cast<std::int32_t>(1 + random() % 9);
    const std::vector<std::int32_t> lens = random_lens(random, requests, 1 + static_cast<std::int32_t>(random() % 700));
    const auto chunk_tokens = static_cast<std::int32_t>(static_cast<std::uint32_t>(requests) + random() % 300);
    SCOPED_TRACE("round " + std::to_string(round) + ", " + std::to_string(requests) + " requests, chunks of " +
                 std::to_string(chunk_tokens));
    std::vector<std::vector<int>> seen;
    for (std::int32_t len : lens) seen.emplace_back(static_cast<std::size_t>(len), 0);
    for (const Chunk& chunk : cut(lens, chunk_tokens)) {
      EXPECT_GT(chunk.starts.back(), 0) << "an empty chunk";
      EXPECT_LE(chunk.starts.back(), chunk_tokens);
      EXPECT_EQ(chunk.starts.back(), chunk_token_count(lens, chunk.begin, chunk.end));
      // As large as it can be: one position more would not fit, or nothing is left.
      const std::int64_t more = chunk_token_count(lens, chunk.begin, chunk.end + 1);
      EXPECT_TRUE(more > chunk_tokens || chunk.end == *std::max_element(lens.begin(), lens.end()));
      for (std::size_t b = 0; b < lens.size(); ++b)
        for (std::int32_t i = 0; i < chunk.starts[b + 1] - chunk.starts[b]; ++i)
          ++seen[b].at(static_cast<std::size_t>(chunk.begin + i));
    }
    for (const std::vector<int>& request : seen)
      EXPECT_TRUE(std::all_of(request.begin(), request.end(), [](int times) { return times == 1; }));
  }
}

TEST(PrefillChunks, AreNeverMoreThanTheBoundThatSizesBuffers) {
  std::mt19937 random(2);
  std::int64_t reached = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto requests = static_cast<std::int32_t>(1 + random() % 6);
    const std::int32_t longest = 1 + static_cast<std::int32_t>(random() % 60);
    std::vector<std::int32_t> lens = random_lens(random, requests, longest);
    // Every other round all are as long as they may be: the worst case of the proof.
    if (round % 2 == 0) std::fill(lens.begin(), lens.end(), longest);
    const std::int64_t total = std::accumulate(lens.begin(), lens.end(), std::int64_t{0});
    const auto chunk_tokens = static_cast<std::int32_t>(static_cast<std::uint32_t>(requests) + random() % 20);
    const auto chunks = static_cast<std::int64_t>(cut(lens, chunk_tokens).size());
    const std::int64_t bound = max_chunks(requests, longest, total, chunk_tokens);
    EXPECT_LE(chunks, bound) << requests << " requests up to " << longest << ", chunks of " << chunk_tokens;
    reached += chunks == bound ? 1 : 0;
  }
  EXPECT_GT(reached, 300) << "the bound is loose";
}

TEST(PrefillChunks, OfNothingAreNone) {
  EXPECT_TRUE(cut({}, 4).empty());
  EXPECT_TRUE(cut({0, 0}, 4).empty());
  EXPECT_EQ(max_chunks(3, 100, 0, 50), 0);
  EXPECT_EQ(max_chunks(3, 100, 50, 50), 1);
}

TEST(PrefillChunks, AreAsLargeAsTheWorkspaceAllows) {
  const PrefillProblem problem{.heads = 4, .context = PrefillContext{.max_tokens = 10000}};
  Limits limits{.max_requests = 4, .max_query_tokens = 100, .max_total_query_tokens = 400};
  const PrefillContext context = resolve(*problem.context, limits);
  EXPECT_EQ(context.max_total_tokens, 40000);
  for (std::int64_t bytes : {std::int64_t{3} << 20, std::int64_t{10} << 20, std::int64_t{60} << 20}) {
    PrefillContext bounded = context;
    bounded.workspace_bytes = bytes;
    const auto sizes = size_context(problem, bounded, limits, PolicyKind::balanced);
    ASSERT_TRUE(sizes.ok()) << sizes.status().message();
    const auto used = [&](std::int64_t tokens) {
      return static_cast<std::int64_t>(lay_out_workspace(context_needs(problem, 400, tokens)).value().bytes);
    };
    EXPECT_LE(used(sizes->chunk_tokens), bytes);
    EXPECT_GT(used(sizes->chunk_tokens + 1), bytes);
    EXPECT_EQ(sizes->max_chunks, max_chunks(4, 10000, 40000, sizes->chunk_tokens));

    // With copies that a backend makes of a chunk's keys and values.
    const ChunkEntry entry{.token_bytes = 4 * (192 + 128), .fixed_bytes = 70'000};
    const auto fewer = size_context(problem, bounded, limits, PolicyKind::balanced, entry);
    ASSERT_TRUE(fewer.ok()) << fewer.status().message();
    EXPECT_LE(used(fewer->chunk_tokens) + entry.bytes(fewer->chunk_tokens), bytes);
    EXPECT_GT(used(fewer->chunk_tokens + 1) + entry.bytes(fewer->chunk_tokens + 1), bytes);
  }
}

// The batch-invariant policy: where a request is cut must follow from the limits alone.
TEST(PrefillChunks, OfTheBatchInvariantPolicyEndAtMultiplesOfTheSamePosition) {
  std::mt19937 random(3);
  for (std::int32_t requests : {1, 3, 9, 40}) {
    const std::int32_t longest = 5000;
    const PrefillProblem problem{.heads = 4, .context = PrefillContext{.max_tokens = longest}};
    const Limits limits{.max_requests = requests, .max_query_tokens = 10, .max_total_query_tokens = 100};
    PrefillContext context = resolve(*problem.context, limits);
    // The smallest workspace there may be, and larger ones up to all of it.
    context.workspace_bytes = 1;
    const auto refused = size_context(problem, context, limits, PolicyKind::batch_invariant);
    ASSERT_FALSE(refused.ok());
    for (std::int64_t times : {1, 3, 1000}) {
      context.workspace_bytes = times * std::stoll(refused.status().expected().substr(3));
      const auto sizes = size_context(problem, context, limits, PolicyKind::batch_invariant);
      ASSERT_TRUE(sizes.ok()) << sizes.status().message();
      if (sizes->positions > 0) {
        EXPECT_EQ(sizes->positions, sizes->chunk_tokens / requests) << "as many as fit";
      }
      for (int round = 0; round < 20; ++round) {
        const std::vector<std::int32_t> lens = random_lens(random, requests, longest);
        const std::vector<Chunk> chunks = cut(lens, sizes->chunk_tokens, sizes->positions);
        EXPECT_LE(chunks.size(), static_cast<std::size_t>(sizes->max_chunks));
        const std::int32_t step = sizes->positions > 0 ? sizes->positions : longest;
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          EXPECT_EQ(chunks[i].begin, static_cast<std::int32_t>(i) * step);
          EXPECT_GT(chunks[i].starts.back(), 0) << "an empty chunk";
          EXPECT_LE(chunks[i].starts.back(), sizes->chunk_tokens);
        }
        EXPECT_EQ(chunks.empty() ? 0 : chunks.back().end, *std::max_element(lens.begin(), lens.end()));
      }
      const std::vector<std::int32_t> full(static_cast<std::size_t>(requests), longest);
      EXPECT_EQ(cut(full, sizes->chunk_tokens, sizes->positions).size(), static_cast<std::size_t>(sizes->max_chunks));
    }
  }
}

TEST(PrefillChunks, SayWhatTheSmallestOneNeeds) {
  const PrefillProblem problem{.heads = 4, .context = PrefillContext{.max_tokens = 10000}};
  const Limits limits{.max_requests = 4, .max_query_tokens = 100, .max_total_query_tokens = 400};
  PrefillContext context = resolve(*problem.context, limits);
  context.workspace_bytes = 1000;
  const auto refused = size_context(problem, context, limits, PolicyKind::balanced);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::out_of_limits);
  EXPECT_EQ(refused.status().field(), "context.workspace_bytes");
  // What it asks for is enough, and a byte less is not.
  const std::int64_t needed = std::stoll(refused.status().expected().substr(3));
  context.workspace_bytes = needed;
  EXPECT_TRUE(size_context(problem, context, limits, PolicyKind::balanced).ok());
  context.workspace_bytes = needed - 1;
  EXPECT_FALSE(size_context(problem, context, limits, PolicyKind::balanced).ok());
  // Without a number of the caller's there is always room.
  context.workspace_bytes = 0;
  Limits large = limits;
  large.max_total_query_tokens = 1 << 20;
  EXPECT_TRUE(size_context(problem, context, large, PolicyKind::balanced).ok());
}

TEST(PrefillChunks, NeverGrowBeyondTheContext) {
  const PrefillProblem problem{.heads = 1, .context = PrefillContext{.max_tokens = 7}};
  const Limits limits{.max_requests = 2, .max_query_tokens = 1, .max_total_query_tokens = 2};
  const auto sizes = size_context(problem, resolve(*problem.context, limits), limits, PolicyKind::balanced);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->chunk_tokens, 14);
  EXPECT_EQ(sizes->max_chunks, 1);
}

}  // namespace
}  // namespace latte::backend
