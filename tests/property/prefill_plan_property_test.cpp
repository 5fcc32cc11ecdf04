// What only prefill plans promise: the order of the records, how near to ideal they are, and what uniform deals.
#include <algorithm>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "plan_cases.hpp"
#include "plan_oracle.hpp"

namespace latte {
namespace {

using namespace plan_test;

const Sweep kPrompts{.cases = 4000, .options = {.op = Op::prefill}};

std::int64_t largest_tile(const PlanCase& c) {
  const Truth truth(c);
  std::int64_t most = 0;
  for (const Tile& tile : expected_tiles(c))
    most = std::max(most, ticks(c.config, {.request = tile.request,
                                           .partial_row = -1,
                                           .row_begin = tile.row_begin,
                                           .row_end = tile.row_end,
                                           .kv_begin = 0,
                                           .kv_end = truth.extent(c, tile.row_begin, tile.row_end),
                                           .kv_after = 0,
                                           .tile = 0}));
  return most;
}

TEST(PrefillPlanProperty, BalancedIsWithinATileOfIdealAndWithinABlockAndACutWhereThatPays) {
  std::int32_t split = 0, whole = 0;
  for_each_case(kPrompts, [&](Rng&, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    const std::int64_t ideal = (unsplit(c) + c.config.workers - 1) / c.config.workers;
    const std::int64_t got = makespan(c.config, guarded.plan());
    const std::int64_t list_bound = ideal + largest_tile(c);
    const std::int64_t cut_bound = ideal + c.config.cost.block(c.config.row_tile) + fixed_ticks_of_a_cut(c.config);
    if (got > list_bound) return "makespan " + std::to_string(got) + " > ideal + a tile " + std::to_string(list_bound);
    if (got - got / 50 > cut_bound)
      return "makespan " + std::to_string(got) + " > 50/49 of ideal + block + cut " + std::to_string(cut_bound);
    ++(guarded.plan().reduce_partial_map.empty() ? whole : split);
    return std::nullopt;
  });
  EXPECT_GT(split, 300);
  EXPECT_GT(whole, 300);
}

// The same in the terms of decode's bound: 8 blocks of the widest tile a worker.
TEST(PrefillPlanProperty, BalancedIsWithinAnEighthOfIdealAndAPiece) {
  std::int32_t asked = 0;
  for_each_case(kPrompts, [&](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    const std::int64_t eight_blocks = 8 * c.config.cost.block(c.config.row_tile), total = unsplit(c);
    if (rng.one_in(2))
      c.config.workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(total / eight_blocks, 1, 300));
    if (total < eight_blocks * c.config.workers) return std::nullopt;
    ++asked;
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    const std::int64_t ideal = (total + c.config.workers - 1) / c.config.workers;
    const std::int64_t bound = ideal + ideal / 8 + fixed_ticks_of_a_cut(c.config);
    const std::int64_t got = makespan(c.config, guarded.plan());
    if (got - got / 50 > bound) return "makespan " + std::to_string(got) + " > 50/49 of " + std::to_string(bound);
    return std::nullopt;
  });
  EXPECT_GT(asked, 500) << "too few batches were large enough to ask";
}

TEST(PrefillPlanProperty, BalancedIsNeverEstimatedWorseThanThePlainGrid) {
  for_each_case(kPrompts, [](Rng&, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    const GuardedPlan balanced(c);
    c.config.policy = Policy::uniform(1);
    const GuardedPlan grid(c);
    if (!balanced.error().empty() || !grid.error().empty()) return balanced.error() + grid.error();
    const std::int64_t ours = makespan_ticks(c.config, balanced.plan());
    const std::int64_t theirs = makespan_ticks(c.config, grid.plan());
    if (ours > theirs) return std::to_string(ours) + " against " + std::to_string(theirs);
    return std::nullopt;
  });
}

// Where uniform(n) has fewer cuts than workers, balanced tries it. Where it has two for each worker or more, it carries
// them. Either way balanced is at most the margin of a split (1/49) longer.
TEST(PrefillPlanProperty, BalancedDoesNotLoseToFewCutsOrMany) {
  std::int32_t few = 0, many = 0;
  for_each_case(kPrompts, [&](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    const GuardedPlan balanced(c);
    c.config.policy = Policy::uniform(rng.in(2, 16));
    const GuardedPlan uniform(c);
    if (!balanced.error().empty() || !uniform.error().empty()) return balanced.error() + uniform.error();
    const std::size_t cuts = uniform.plan().work_info_set.size() - uniform.plan().reduce_final_map.size();
    const auto workers = static_cast<std::size_t>(c.config.workers);
    if (cuts >= workers && cuts < 2 * workers) return std::nullopt;
    ++(cuts < workers ? few : many);
    const std::int64_t ours = makespan_ticks(c.config, balanced.plan());
    const std::int64_t theirs = makespan_ticks(c.config, uniform.plan());
    if (ours - ours / 50 > theirs) return std::to_string(ours) + " against " + std::to_string(theirs);
    return std::nullopt;
  });
  EXPECT_GT(few, 500);
  EXPECT_GT(many, 500);
}

// Heads in as few groups of about equal size as the shared cache allows.
std::int32_t group_of(const PlanCase& c, const WorkRecord& r) {
  const std::int64_t heads = c.config.heads, cached = c.config.shared_cache_tokens;
  const std::int64_t fit = cached == 0 ? heads : cached / std::max(c.seq_lens[r.request], 1);
  const std::int64_t together = std::max<std::int64_t>(1, std::min(fit, heads));
  const std::int64_t groups = (heads + together - 1) / together;
  std::int64_t group = 0;
  while (heads * (group + 1) / groups <= c.head_of(r.row_begin)) ++group;
  return static_cast<std::int32_t>(group);
}

// Longest KV first, then by request, group of heads, query tokens from the last, head, KV.
auto dealing_order(const PlanCase& c, const WorkRecord& r) {
  return std::tuple(-c.seq_lens[r.request], r.request, group_of(c, r), -c.token_of(r.row_begin), c.head_of(r.row_begin),
                    r.kv_begin);
}

template <class Key>
Finding workers_in_order(const Plan& plan, const Key& key) {
  for (std::size_t w = 0; w + 1 < plan.work_indptr.size(); ++w)
    for (std::int32_t i = plan.work_indptr[w] + 1; i < plan.work_indptr[w + 1]; ++i) {
      const WorkRecord &before = plan.work_info_set[static_cast<std::size_t>(i) - 1],
                       &after = plan.work_info_set[static_cast<std::size_t>(i)];
      if (!(key(before) < key(after))) return "worker " + std::to_string(w) + ": " + text(after) + " too late";
    }
  return std::nullopt;
}

TEST(PrefillPlanProperty, WorkersKeepTheOrderInWhichTilesAreDealt) {
  std::int32_t in_grid_order = 0, all = 0;
  for_each_case(kPrompts, [&](Rng& rng, PlanCase& c) -> Finding {
    c.config.limits.max_total_kv_tokens = 0;
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      const GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      const auto grid = [](const WorkRecord& r) { return std::tuple(r.tile, r.kv_begin); };
      const auto cached = [&c](const WorkRecord& r) { return dealing_order(c, r); };
      if (policy.kind == PolicyKind::uniform) {
        if (Finding finding = workers_in_order(guarded.plan(), grid)) return finding;
        continue;
      }
      const Finding finding = workers_in_order(guarded.plan(), cached);
      if (policy.kind == PolicyKind::batch_invariant && finding) return finding;
      // balanced may have fallen back to the plain grid.
      if (finding && workers_in_order(guarded.plan(), grid)) return finding;
      in_grid_order += finding ? 1 : 0, ++all;
    }
    return std::nullopt;
  });
  EXPECT_LT(in_grid_order, all / 4) << "the plain grid wins too often";
}

// Piece after piece in grid order to the least loaded worker, said in the plainest way.
TEST(PrefillPlanProperty, UniformIsTheGridDealtToWhoeverIsFree) {
  for_each_case(kPrompts, [](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = Policy::uniform(rng.in(1, 6));
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    std::vector<std::int64_t> loads(static_cast<std::size_t>(c.config.workers));
    std::vector<std::int32_t> next(guarded.plan().work_indptr.begin(), guarded.plan().work_indptr.end());
    for (const auto& pieces : pieces_of_tiles(guarded.plan()))
      for (const WorkRecord& piece : pieces) {
        const auto w = static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
        const auto at = static_cast<std::size_t>(next[w]++);
        if (at >= guarded.plan().work_info_set.size() || guarded.plan().work_info_set[at] != piece)
          return "not the next of worker " + std::to_string(w) + ": " + text(piece);
        loads[w] += ticks(c.config, piece);
      }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
