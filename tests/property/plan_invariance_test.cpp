// What a plan may not depend on: the run, the buffer's old contents and, with batch_invariant, anything but the
// request.
#include <algorithm>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "plan_cases.hpp"
#include "plan_oracle.hpp"

namespace latte {
namespace {

using namespace plan_test;

template <class T>
bool same(std::span<const T> a, std::span<const T> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

TEST(PlanInvariance, TheSameInputGivesTheSameBits) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const GuardedPlan first(c);
      if (!first.error().empty()) return first.error();
      // A buffer that held another plan, larger than needed, at another address.
      std::vector<std::int32_t> words(static_cast<std::size_t>(first.sizes().words) + 100, -7);
      PlanCase before = c;
      for (std::int32_t& kv : before.seq_lens) kv /= 2;
      before.visible.clear();
      if (!make_plan(before.config, before.lengths(), words).ok()) return "the plan before";
      const Result<Plan> made = make_plan(c.config, c.lengths(), words);
      if (!made.ok()) return made.status().message();
      const Plan &a = first.plan(), &b = *made;
      if (!same(a.work_meta_data, b.work_meta_data)) return "work_meta_data";
      if (!same(a.work_indptr, b.work_indptr)) return "work_indptr";
      if (!same(a.work_info_set, b.work_info_set)) return "work_info_set";
      if (!same(a.reduce_indptr, b.reduce_indptr)) return "reduce_indptr";
      if (!same(a.reduce_final_map, b.reduce_final_map)) return "reduce_final_map";
      if (!same(a.reduce_partial_map, b.reduce_partial_map)) return "reduce_partial_map";
    }
    return std::nullopt;
  });
}

// A piece, said without anything that moves with the neighbours: its first and last row counted from the request's
// first, KV range, split or not.
using Chunk = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t, bool>;

std::vector<Chunk> chunks_of(const PlanCase& c, const Plan& plan, std::int32_t request) {
  const auto own_row = [&](std::int32_t row) {
    return (c.token_of(row) - c.query_start[request]) * c.config.heads + c.head_of(row);
  };
  std::vector<Chunk> chunks;
  for (const WorkRecord& r : plan.work_info_set)
    if (r.request == request)
      chunks.emplace_back(own_row(r.row_begin), own_row(r.row_end - 1), r.kv_begin, r.kv_end, r.kv_after,
                          r.partial_row >= 0);
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

void append_request(PlanCase& to, const PlanCase& from, std::int32_t request) {
  to.seq_lens.push_back(from.seq_lens[request]);
  const std::int32_t begin = from.query_start[request], end = from.query_start[request + 1];
  to.query_start.push_back(to.query_start.back() + end - begin);
  if (!from.visible.empty())
    to.visible.insert(to.visible.end(), from.visible.begin() + begin, from.visible.begin() + end);
}

TEST(PlanInvariance, BatchInvariantChunksDependOnTheRequestAlone) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    if (c.requests() == 0) return std::nullopt;
    c.config.policy = random_policies(rng, c).back();
    c.config.limits.max_requests += 1;  // room for padding
    if (c.config.limits.max_total_kv_tokens > 0) c.config.limits.max_total_kv_tokens += c.config.limits.max_kv_tokens;
    const GuardedPlan together(c);
    if (!together.error().empty()) return together.error();

    const std::int32_t request = rng.in(0, c.requests() - 1);
    PlanCase alone;
    alone.config = c.config;
    alone.config.workers = rng.in(1, 200);
    alone.config.limits.workers = rng.one_in(2) ? 0 : rng.in(1, alone.config.workers);
    append_request(alone, c, request);
    const GuardedPlan single(alone);
    if (!single.error().empty()) return single.error();
    const auto expected = chunks_of(c, together.plan(), request);
    if (chunks_of(alone, single.plan(), 0) != expected) return "request " + std::to_string(request) + " alone differs";

    // Neighbours in reverse order, and a padding request without queries in front.
    PlanCase mirrored;
    mirrored.config = alone.config;
    mirrored.seq_lens.push_back(rng.in(0, c.config.limits.max_kv_tokens));
    mirrored.query_start.push_back(0);
    for (std::int32_t b = c.requests() - 1; b >= 0; --b) append_request(mirrored, c, b);
    const GuardedPlan padded(mirrored);
    if (!padded.error().empty()) return padded.error();
    if (chunks_of(mirrored, padded.plan(), c.requests() - request) != expected)
      return "request " + std::to_string(request) + " differs among other neighbours";
    return std::nullopt;
  });
}

TEST(PlanInvariance, BatchInvariantChunksHaveOneSize) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = random_policies(rng, c).back();
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    const Truth truth(c);
    const std::int32_t block = c.config.kv_block;
    const std::int32_t chunk =
        c.config.policy.n == 0 ? c.config.limits.max_kv_tokens + 1 : (c.config.policy.n + block - 1) / block * block;
    for (const WorkRecord& r : guarded.plan().work_info_set) {
      const bool last = r.kv_end >= truth.extent(c, r.row_begin, r.row_end);
      if (r.kv_begin % chunk != 0 || r.kv_end - r.kv_begin > chunk || (!last && r.kv_end - r.kv_begin != chunk))
        return "not a chunk of " + std::to_string(chunk) + ": " + text(r);
    }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
