// How the context of a prefill step is cut into chunks: pure functions of lengths and limits.
//
// A step's context is cut at token positions 0 = x_0 < x_1 < ... common to all requests: chunk i holds the tokens
// [x_i, x_{i+1}) of every request that has them, request after request. x_{i+1} is the largest position for which the
// chunk has at most chunk_tokens tokens in all, so that short requests drop out early and the long ones that are left
// share the room. With the batch-invariant policy it is a multiple of `positions`, which follows from the limits alone:
// a request's cuts, and so its bits, are then the same whatever its neighbours are.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "latte/prefill.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/workspace.hpp"

namespace latte::backend {

// Tokens at positions [begin, end) of all requests. `lens` >= 0.
std::int64_t chunk_token_count(std::span<const std::int32_t> lens, std::int32_t begin, std::int32_t end);

struct ContextSizes {
  std::int32_t chunk_tokens = 0;
  std::int32_t positions = 0;  // of every chunk but the last; 0 = as many as fit
  std::int32_t max_chunks = 0;
};

// The end of the chunk that begins at `begin`: in (begin, longest], or `begin` itself when no request is that long.
// chunk_tokens >= the number of requests (times positions), or >= all tokens there are.
std::int32_t chunk_end(std::span<const std::int32_t> lens, std::int32_t begin, const ContextSizes& sizes);

// Prefix sums of each request's tokens in [begin, end): starts has one entry more than lens.
void chunk_starts(std::span<const std::int32_t> lens, std::int32_t begin, std::int32_t end,
                  std::span<std::int32_t> starts);

// The most chunks any step has whose `requests` requests have at most max_tokens context tokens each and total_tokens
// in all; prefill_chunks.cpp has the proof.
std::int64_t max_chunks(std::int32_t requests, std::int32_t max_tokens, std::int64_t total_tokens,
                        std::int32_t chunk_tokens);

// Context limits with their zeros filled in.
PrefillContext resolve(const PrefillContext& context, const Limits& limits);

// What a step with context needs beside the kernels' own workspaces.
enum ContextNeed : std::size_t {
  kSum,        // fp32 [T, heads, v_width]: what has been joined so far
  kSumLse,     // fp32 [heads, T]
  kPart,       // fp32 [T, heads, v_width]: of the newest chunk
  kPartLse,    // fp32 [heads, T]
  kChunkRows,  // [C, latent + rope], from the cache
  kChunkK,     // [C, heads, qk_width]
  kChunkV,     // [C, heads, v_width]
  kContextNeeds,
};
std::array<WorkspaceNeed, kContextNeeds> context_needs(const PrefillProblem& problem, std::int64_t query_tokens,
                                                       std::int64_t chunk_tokens);
// Dtype of the rows gathered from a cache.
Dtype chunk_row_dtype(KvFormat format);

// What a backend makes of a chunk's keys and values before it multiplies them: copies of another type, or transposed.
struct ChunkEntry {
  std::int64_t token_bytes = 0, fixed_bytes = 0;

  std::int64_t bytes(std::int64_t tokens) const { return fixed_bytes + tokens * token_bytes; }
};

// The largest chunk that the context's workspace_bytes hold, with what it becomes on entry. `limits` and `context` are
// resolved.
Result<ContextSizes> size_context(const PrefillProblem& problem, const PrefillContext& context, const Limits& limits,
                                  PolicyKind policy, const ChunkEntry& entry = {});

}  // namespace latte::backend
