// The batch-spec grammar of vLLM's attention benchmark: a batch in a few characters.
//
//   spec  := group ( "_" group )*
//   group := [count] "q" length [ "s" length ]      count requests with so many query and KV tokens
//   length := digits [ "k" ]                         k = x 1024
//
// A bare "q" means one request; without "s" the KV length is the query length. "16q1s4k_4q4s1k" is 16 requests of one
// query token over 4096 KV tokens, then 4 requests of 4 over 1024. KV counts this step's query tokens, so it is never
// below the query length, except 0: a padding slot of a captured graph.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte::cli {

struct RequestGroup {
  std::int32_t count = 1;
  std::int32_t query_tokens = 1;
  std::int32_t kv_tokens = 1;
  bool operator==(const RequestGroup&) const = default;
};

// What a spec may ask for at most. Far above any real batch, low enough that no sum below overflows.
inline constexpr std::int32_t kMaxSpecChars = 4096;
inline constexpr std::int32_t kMaxSpecRequests = 1 << 16;
inline constexpr std::int32_t kMaxSpecQueryTokens = 1 << 20;  // in all
inline constexpr std::int32_t kMaxSpecKvTokens = 1 << 30;     // a request

struct BatchSpec {
  std::string text;  // as it was typed
  std::vector<RequestGroup> groups;

  std::int32_t requests() const;
  std::int32_t max_query_tokens() const;
  std::int32_t total_query_tokens() const;
  std::int32_t max_kv_tokens() const;
  std::int64_t total_kv_tokens() const;
  // Limits that fit exactly this batch.
  Limits limits() const;
};

// The error says at which character (counted from 1) what was expected.
Result<BatchSpec> parse_batch_spec(std::string_view text);

// The arrays a step is planned from.
struct BatchLengths {
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start;

  StepLengths view() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = {}}; }
};
BatchLengths batch_lengths(const BatchSpec& spec);

}  // namespace latte::cli
