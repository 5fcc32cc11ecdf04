#include "backend/prefill_chunks.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "backend/errors.hpp"
#include "core/checked.hpp"

namespace latte::backend {
namespace {

constexpr std::int64_t kDefaultBytes = std::int64_t{256} << 20;
// Every chunk but a step's last one holds more than this: bounds the number of plans a slot keeps.
constexpr std::int64_t kSmallestChunkTokens = 255;
// And with the batch-invariant policy every one has so many positions.
constexpr std::int64_t kFewestPositions = 16;
// Keeps the bytes of a chunk, whatever heads and widths, within 64 bits.
constexpr std::int64_t kLargestChunkTokens = std::int64_t{1} << 26;

std::int64_t context_bytes(const PrefillProblem& problem, std::int64_t query_tokens, std::int64_t chunk_tokens,
                           const ChunkEntry& entry) {
  const auto needs = context_needs(problem, query_tokens, chunk_tokens);
  const auto layout = lay_out_workspace(needs);
  if (!layout.ok()) return std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(layout->bytes) + entry.bytes(chunk_tokens);
}

}  // namespace

std::int64_t chunk_token_count(std::span<const std::int32_t> lens, std::int32_t begin, std::int32_t end) {
  std::int64_t tokens = 0;
  for (std::int32_t len : lens) tokens += std::max(0, std::min(len, end) - begin);
  return tokens;
}

std::int32_t chunk_end(std::span<const std::int32_t> lens, std::int32_t begin, const ContextSizes& sizes) {
  std::int32_t longest = begin;
  for (std::int32_t len : lens) longest = std::max(longest, len);
  if (sizes.positions > 0) return sizes.positions < longest - begin ? begin + sizes.positions : longest;
  // One position holds at most a token a request, so begin + 1 fits whenever anything is left. The count grows with the
  // end: bisect, keeping low fitting and everything above high not.
  std::int32_t low = std::min(begin + 1, longest), high = longest;
  while (low < high) {
    const std::int32_t middle = low + (high - low + 1) / 2;
    if (chunk_token_count(lens, begin, middle) <= sizes.chunk_tokens)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

void chunk_starts(std::span<const std::int32_t> lens, std::int32_t begin, std::int32_t end,
                  std::span<std::int32_t> starts) {
  starts[0] = 0;
  for (std::size_t b = 0; b < lens.size(); ++b) starts[b + 1] = starts[b] + std::max(0, std::min(lens[b], end) - begin);
}

// With N tokens in all, C a chunk and B requests, B <= C:
//   A chunk that is not the last could not take one position more, and a position holds at most B tokens. So it has at
//   least C - B + 1 of them, and the last one at least 1: (chunks - 1) * (C - B + 1) + 1 <= N, which gives
//   chunks <= ceil(N / (C - B + 1)).
//   If N <= C the first chunk takes everything. And as every chunk moves on by a position, chunks <= the longest
//   request.
std::int64_t max_chunks(std::int32_t requests, std::int32_t max_tokens, std::int64_t total_tokens,
                        std::int32_t chunk_tokens) {
  const std::int64_t total = std::min<std::int64_t>(total_tokens, std::int64_t{requests} * max_tokens);
  if (total == 0) return 0;
  if (total <= chunk_tokens) return 1;
  return std::min<std::int64_t>(ceil_div(total, std::int64_t{chunk_tokens} - requests + 1), max_tokens);
}

PrefillContext resolve(const PrefillContext& context, const Limits& limits) {
  PrefillContext full = context;
  if (full.max_total_tokens == 0) full.max_total_tokens = std::int64_t{limits.max_requests} * full.max_tokens;
  return full;
}

Dtype chunk_row_dtype(KvFormat format) {
  if (format == KvFormat::f16) return Dtype::f16;
  return format == KvFormat::f32 ? Dtype::f32 : Dtype::bf16;
}

std::array<WorkspaceNeed, kContextNeeds> context_needs(const PrefillProblem& problem, std::int64_t query_tokens,
                                                       std::int64_t chunk_tokens) {
  // Phases of a chunk: gather and expand fill it, attend reads it, join adds the result. The sum lives through all.
  constexpr std::uint64_t kFill = 1, kAttend = 2, kJoin = 4;
  const auto bytes = [](std::int64_t count, std::int64_t width, Dtype dtype) {
    return static_cast<std::size_t>(count * width) * dtype_bytes(dtype);
  };
  const std::int64_t heads = problem.heads;
  const PrefillContext& context = *problem.context;
  const std::size_t out = bytes(query_tokens * heads, problem.v_width, Dtype::f32);
  const std::size_t lse = bytes(query_tokens, heads, Dtype::f32);
  std::array<WorkspaceNeed, kContextNeeds> needs;
  needs[kSum] = {.name = "sum", .bytes = out};
  needs[kSumLse] = {.name = "sum lse", .bytes = lse};
  needs[kPart] = {.name = "part", .bytes = out, .phases = kAttend | kJoin};
  needs[kPartLse] = {.name = "part lse", .bytes = lse, .phases = kAttend | kJoin};
  needs[kChunkRows] = {
      .name = "chunk rows",
      .bytes = bytes(chunk_tokens, std::int64_t{context.latent} + context.rope, chunk_row_dtype(context.kv_format)),
      .phases = kFill};
  needs[kChunkK] = {.name = "chunk k",
                    .bytes = bytes(chunk_tokens * heads, problem.qk_width, problem.dtype),
                    .phases = kFill | kAttend};
  needs[kChunkV] = {.name = "chunk v",
                    .bytes = bytes(chunk_tokens * heads, problem.v_width, problem.dtype),
                    .phases = kFill | kAttend};
  return needs;
}

Result<ContextSizes> size_context(const PrefillProblem& problem, const PrefillContext& context, const Limits& limits,
                                  PolicyKind policy, const ChunkEntry& entry) {
  const std::int64_t query_tokens = limits.max_total_query_tokens;
  const std::int64_t total =
      std::min<std::int64_t>(context.max_total_tokens, std::int64_t{limits.max_requests} * context.max_tokens);
  const bool fixed = policy == PolicyKind::batch_invariant;
  const std::int64_t least =
      std::min(total, std::max(limits.max_requests + kSmallestChunkTokens,
                               fixed ? limits.max_requests * kFewestPositions : std::int64_t{0}));
  if (least > kLargestChunkTokens)
    return unsupported("limits.max_requests", "at most " + text(kLargestChunkTokens - kSmallestChunkTokens),
                       text(limits.max_requests));
  const std::int64_t needed = context_bytes(problem, query_tokens, least, entry);
  const std::int64_t room = context.workspace_bytes > 0 ? context.workspace_bytes : std::max(kDefaultBytes, needed);
  if (needed > room)
    return Status(Code::out_of_limits, "context.workspace_bytes",
                  ">= " + text(needed) + ", for chunks of " + text(least) + " tokens and what joins them", text(room));
  std::int64_t low = least, high = std::min(total, kLargestChunkTokens);
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    if (context_bytes(problem, query_tokens, middle, entry) <= room)
      low = middle;
    else
      high = middle - 1;
  }
  ContextSizes sizes{.chunk_tokens = static_cast<std::int32_t>(low)};
  std::int64_t chunks =
      max_chunks(limits.max_requests, context.max_tokens, context.max_total_tokens, sizes.chunk_tokens);
  if (fixed && chunks > 1) {  // one holds everything there may be
    sizes.positions = sizes.chunk_tokens / limits.max_requests;
    chunks = ceil_div(context.max_tokens, sizes.positions);
  }
  if (chunks > std::numeric_limits<std::int32_t>::max())
    return Status(Code::out_of_limits, "context.max_total_tokens", "fewer than 2^31 chunks", text(chunks));
  sizes.max_chunks = static_cast<std::int32_t>(chunks);
  return sizes;
}

}  // namespace latte::backend
