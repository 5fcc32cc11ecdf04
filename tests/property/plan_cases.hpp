// Random planning problems for the property tests: a seed that is printed, a generator, and a one-line repro.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "latte/plan.hpp"

namespace latte::plan_test {

// Fresh for every run, unless LATTE_TEST_SEED names one.
inline std::uint64_t base_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("LATTE_TEST_SEED");
    const std::uint64_t value = text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::printf("[   seed   ] LATTE_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : engine_(seed) {}

  // Uniform in [low, high].
  std::int32_t in(std::int32_t low, std::int32_t high) {
    const auto width = static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - low + 1);
    return static_cast<std::int32_t>(low + static_cast<std::int64_t>(engine_() % width));
  }
  bool one_in(std::int32_t n) { return in(1, n) == 1; }
  std::int32_t pick(std::initializer_list<std::int32_t> values) {
    return values.begin()[in(0, static_cast<std::int32_t>(values.size()) - 1)];
  }
  // Small values as likely as large ones.
  std::int32_t log_in(std::int32_t low, std::int32_t high) {
    std::int32_t top = high;
    while (top > low + 1 && one_in(2)) top = low + (top - low) / 2;
    return in(low, top);
  }

 private:
  std::mt19937_64 engine_;
};

struct PlanCase {
  PlanConfig config;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start{0};
  std::vector<std::int32_t> visible;  // empty: the mask decides

  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}; }
  std::int32_t requests() const { return static_cast<std::int32_t>(seq_lens.size()); }
  std::int32_t tokens() const { return query_start.back(); }
  std::int32_t rows() const { return tokens() * config.heads; }
  bool prefill() const { return config.op == Op::prefill; }
  std::int32_t queries(std::int32_t b) const { return query_start[b + 1] - query_start[b]; }
  // The two numberings of rows that plan.hpp defines.
  std::int32_t token_of(std::int32_t row) const { return prefill() ? row % tokens() : row / config.heads; }
  std::int32_t head_of(std::int32_t row) const { return prefill() ? row / tokens() : row % config.heads; }
};

inline std::string join(std::span<const std::int32_t> values) {
  std::string text;
  for (std::int32_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "[" + text + "]";
}

inline std::string describe(const PlanCase& c) {
  const PlanConfig& p = c.config;
  std::vector<std::int32_t> queries;
  for (std::size_t b = 0; b < c.seq_lens.size(); ++b) queries.push_back(c.query_start[b + 1] - c.query_start[b]);
  std::string text = std::string(op_name(p.op)) + " " + std::string(policy_name(p.policy.kind)) + "(" +
                     std::to_string(p.policy.n) + ")";
  const auto add = [&text](const char* name, std::int64_t value) {
    text += std::string(" ") + name + "=" + std::to_string(value);
  };
  add("heads", p.heads), add("row_tile", p.row_tile), add("kv_block", p.kv_block), add("workers", p.workers);
  text += std::string(" mask=") + (p.mask == Mask::causal ? "causal" : "none");
  add("piece", p.cost.piece_ticks), add("split", p.cost.split_ticks), add("block", p.cost.block_ticks);
  add("granule", p.cost.granule_ticks), add("row_granule", p.cost.row_granule), add("alone", p.cost.alone_percent);
  add("max_requests", p.limits.max_requests), add("max_q", p.limits.max_query_tokens);
  add("max_total_q", p.limits.max_total_query_tokens), add("max_kv", p.limits.max_kv_tokens);
  add("max_total_kv", p.limits.max_total_kv_tokens), add("limits.workers", p.limits.workers);
  if (c.prefill()) add("shared_cache", p.shared_cache_tokens);
  text += " kv=" + join(c.seq_lens) + " q=" + join(queries);
  if (!c.visible.empty()) text += " visible=" + join(c.visible);
  return text;
}

inline CostModel random_cost(Rng& rng) {
  CostModel cost{.piece_ticks = rng.one_in(5) ? 0 : rng.log_in(0, 20000),
                 .split_ticks = rng.one_in(5) ? 0 : rng.log_in(0, 20000),
                 .block_ticks = rng.log_in(1, 4000),
                 .granule_ticks = rng.one_in(3) ? 0 : rng.log_in(0, 800),
                 .row_granule = rng.pick({1, 2, 5, 8, 16, 32}),
                 .alone_percent = rng.one_in(2) ? 100 : rng.in(1, 99)};
  return cost;
}

// Lengths of one of several families, so that rare shapes are met often.
inline void random_lengths(Rng& rng, PlanCase& c, std::int32_t max_requests) {
  const std::int32_t family = rng.in(0, 6);
  std::int32_t requests = rng.log_in(family == 0 ? 0 : 1, max_requests);
  const std::int32_t top_kv = rng.pick({40, 300, 3000});
  const std::int32_t same_kv = rng.in(0, top_kv);
  const std::int32_t top_query = rng.pick({1, 1, 2, 4, 9});
  const std::int32_t huge = family == 2 ? rng.in(0, std::max(requests, 1) - 1) : -1;
  for (std::int32_t b = 0; b < requests; ++b) {
    std::int32_t kv = rng.in(0, top_kv);
    std::int32_t query = rng.in(rng.one_in(4) ? 0 : 1, top_query);
    if (family == 1) kv = same_kv;
    if (family == 2) kv = b == huge ? rng.in(5000, 70000) : rng.in(0, 200);
    if (family == 3) kv = rng.one_in(2) ? 0 : kv;
    if (family == 4) query = top_query;
    if (family == 5) kv = rng.log_in(0, top_kv);
    if (family == 6) kv = rng.in(0, 2) * c.config.kv_block + rng.in(-1, 1);
    if (rng.one_in(20)) kv = 0;
    c.seq_lens.push_back(std::max(kv, 0));
    c.query_start.push_back(c.query_start.back() + query);
  }
  if (!rng.one_in(4)) return;
  for (std::int32_t b = 0; b < requests; ++b)
    for (std::int32_t t = c.query_start[b]; t < c.query_start[b + 1]; ++t)
      c.visible.push_back(rng.one_in(5) ? 0 : rng.one_in(5) ? c.seq_lens[b] : rng.in(0, c.seq_lens[b]));
}

// Prompts of one of several families: fresh ones, ones with KV that is older than the query, queries longer than their
// KV, whose first rows see nothing. `most` requests, `most_tokens` query tokens in all.
inline void random_prompts(Rng& rng, PlanCase& c, std::int32_t most, std::int32_t most_tokens) {
  const std::int32_t family = rng.in(0, 6);
  const std::int32_t requests = rng.log_in(family == 0 ? 0 : 1, most);
  const std::int32_t top = std::max(1, most_tokens / std::max(requests, 1));
  const std::int32_t same = rng.in(1, top);
  const std::int32_t huge = family == 2 ? rng.in(0, requests - 1) : -1;
  for (std::int32_t b = 0; b < requests; ++b) {
    std::int32_t query = family == 1 ? same : rng.log_in(rng.one_in(8) ? 0 : 1, top);
    if (family == 2) query = b == huge ? top : rng.in(0, std::max(1, top / 16));
    if (family == 6) query = rng.in(0, 2) * c.config.row_tile + rng.in(-1, 1);
    query = std::clamp(query, 0, top);
    std::int32_t kv = query;
    if (family == 3) kv += rng.log_in(0, 5000);
    if (family == 4) kv = rng.in(0, query);
    if (family == 5) kv = rng.in(0, 2 * query);
    if (rng.one_in(20)) kv = 0;
    c.seq_lens.push_back(kv);
    c.query_start.push_back(c.query_start.back() + query);
  }
}

inline std::int64_t tile_count(const PlanCase& c) {
  std::int64_t tiles = 0;
  for (std::int32_t b = 0; b < c.requests(); ++b) {
    const std::int32_t alike = c.prefill() ? c.config.heads : 1;
    const std::int32_t rows = c.queries(b) * c.config.heads / alike;
    tiles += (rows + c.config.row_tile - 1) / c.config.row_tile * alike;
  }
  return tiles;
}

inline void tight_or_loose_limits(Rng& rng, PlanCase& c) {
  std::int32_t top_query = 1, top_kv = 1;
  std::int64_t total_kv = 0;
  for (std::size_t b = 0; b < c.seq_lens.size(); ++b) {
    top_query = std::max(top_query, c.query_start[b + 1] - c.query_start[b]);
    top_kv = std::max(top_kv, c.seq_lens[b]);
    total_kv += c.seq_lens[b];
  }
  Limits& limits = c.config.limits;
  const auto room = [&rng](std::int32_t most) { return rng.one_in(2) ? 0 : rng.in(0, most); };
  limits.max_requests = std::max(c.requests(), 1) + room(3);
  limits.max_query_tokens = top_query + room(2);
  limits.max_total_query_tokens = rng.one_in(2) ? 0 : std::max({c.tokens(), top_query, 1}) + room(5);
  limits.max_total_query_tokens =
      limits.max_total_query_tokens == 0 ? 0 : std::max(limits.max_total_query_tokens, limits.max_query_tokens);
  limits.max_kv_tokens = top_kv + room(500);
  limits.max_total_kv_tokens = rng.one_in(2) ? 0 : std::max<std::int64_t>(total_kv, limits.max_kv_tokens) + room(1000);
}

struct CaseOptions {
  std::optional<Op> op{};  // none: either
  std::int32_t max_requests = 40;
  std::int32_t max_workers = 160;
  std::int32_t max_tiles = 200;
};

inline PlanCase random_case(Rng& rng, const CaseOptions& options = {}) {
  PlanCase c;
  c.config.op = options.op ? *options.op : rng.one_in(2) ? Op::prefill : Op::decode;
  c.config.heads = rng.pick({1, 2, 3, 5, 8, 12, 16, 24, 48, 64, 100, 128});
  c.config.row_tile = rng.pick({1, 3, 4, 8, 16, 32, 48, 64, 128});
  c.config.kv_block = rng.pick({1, 2, 7, 16, 32, 64, 100, 128});
  c.config.workers = rng.log_in(1, options.max_workers);
  c.config.mask = rng.one_in(4) ? Mask::none : Mask::causal;
  c.config.cost = random_cost(rng);
  if (c.prefill()) {
    c.config.shared_cache_tokens = rng.one_in(3) ? 0 : rng.log_in(1, 100000);
    random_prompts(rng, c, std::clamp(2 * options.max_tiles / c.config.heads, 1, options.max_requests),
                   std::max(40, 10000 / c.config.heads));
  } else {
    random_lengths(rng, c, options.max_requests);
  }
  while (tile_count(c) > (c.prefill() ? 2 : 1) * options.max_tiles && c.config.row_tile < 2048) c.config.row_tile *= 2;
  tight_or_loose_limits(rng, c);
  return c;
}

// One policy of each kind. Chunks are kept so that no request has more than about 64 of them, and some are not a
// multiple of the KV block. Prefill may also have its chunks left out.
inline std::vector<Policy> random_policies(Rng& rng, const PlanCase& c) {
  const std::int32_t fewest = c.config.limits.max_kv_tokens / 64 / c.config.kv_block + 1;
  const std::int32_t chunk = rng.in(fewest, fewest + 12) * c.config.kv_block + 1;
  const bool whole = c.prefill() && rng.one_in(3);
  return {Policy::balanced(), Policy::uniform(rng.in(1, 20)),
          Policy::batch_invariant(whole ? 0 : chunk - rng.in(0, 1))};
}

// A plan in a buffer of exactly plan_sizes().words between guard words; whatever was there before is poison.
class GuardedPlan {
 public:
  explicit GuardedPlan(const PlanCase& c) {
    Result<PlanSizes> sizes = plan_sizes(c.config);
    if (!sizes.ok()) {
      error_ = "plan_sizes: " + sizes.status().message();
      return;
    }
    sizes_ = *sizes;
    buffer_.assign(static_cast<std::size_t>(sizes_.words) + 2 * kGuard, kPoison);
    Result<Plan> made = make_plan(c.config, c.lengths(), words());
    if (!made.ok())
      error_ = "make_plan: " + made.status().message();
    else
      plan_ = *made;
  }

  const std::string& error() const { return error_; }
  const Plan& plan() const { return plan_; }
  const PlanSizes& sizes() const { return sizes_; }
  std::span<std::int32_t> words() { return std::span(buffer_).subspan(kGuard, static_cast<std::size_t>(sizes_.words)); }
  bool guards_intact() const {
    const auto poisoned = [](std::int32_t word) { return word == kPoison; };
    return std::all_of(buffer_.begin(), buffer_.begin() + kGuard, poisoned) &&
           std::all_of(buffer_.end() - kGuard, buffer_.end(), poisoned);
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 64;
  static constexpr std::int32_t kPoison = 0x5eed5eed;
  std::vector<std::int32_t> buffer_;
  PlanSizes sizes_;
  Plan plan_;
  std::string error_;
};

// A check returns what is wrong, or nothing.
using Finding = std::optional<std::string>;

struct Sweep {
  std::int32_t cases = 4000;
  CaseOptions options = {};
};

inline std::string repro(std::int32_t index, const PlanCase& c, const std::string& what) {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  return what + " | LATTE_TEST_SEED=" + std::to_string(base_seed()) + " --gtest_filter=" + test->test_suite_name() +
         "." + test->name() + " case " + std::to_string(index) + ": " + describe(c);
}

// Runs `check` on random cases, each with a random stream of its own, and stops at the first finding.
inline void for_each_case(const Sweep& sweep, const std::function<Finding(Rng&, PlanCase&)>& check) {
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::uint64_t salt = std::hash<std::string>{}(name);
  for (std::int32_t index = 0; index < sweep.cases; ++index) {
    Rng rng(base_seed() * 0x9e3779b97f4a7c15u + salt + static_cast<std::uint64_t>(index));
    PlanCase c = random_case(rng, sweep.options);
    if (Finding finding = check(rng, c)) FAIL() << repro(index, c, *finding);
  }
}

// The same, over the plans of one policy of each kind.
inline void for_each_plan(const Sweep& sweep, const std::function<Finding(const PlanCase&, GuardedPlan&)>& check) {
  for_each_case(sweep, [&check](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      if (Finding finding = check(c, guarded)) return finding;
    }
    return std::nullopt;
  });
}

}  // namespace latte::plan_test
