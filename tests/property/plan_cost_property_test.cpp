// What a plan is estimated to take: the estimate itself, its distance from ideal, and that `balanced` never loses.
#include <gtest/gtest.h>

#include "plan_cases.hpp"
#include "plan_oracle.hpp"

namespace latte {
namespace {

using namespace plan_test;

TEST(PlanCostProperty, TheEstimateIsTheLargestSumOverAWorkersRecords) {
  for_each_plan({}, [](const PlanCase& c, GuardedPlan& guarded) -> Finding {
    const Plan& plan = guarded.plan();
    for (const WorkRecord& record : plan.work_info_set)
      if (record_ticks(c.config, record) != ticks(c.config, record))
        return "record_ticks " + std::to_string(record_ticks(c.config, record)) + ", by the model " +
               std::to_string(ticks(c.config, record)) + ": " + text(record);
    const std::int64_t expected = makespan(c.config, plan);
    if (makespan_ticks(c.config, plan) != expected) return "makespan_ticks, expected " + std::to_string(expected);
    if (plan.makespan_ticks() != expected)
      return "work_meta_data says " + std::to_string(plan.makespan_ticks()) + ", is " + std::to_string(expected);
    const Result<std::int64_t> whole = unsplit_ticks(c.config, c.lengths());
    if (!whole.ok() || *whole != unsplit(c)) return "unsplit_ticks, expected " + std::to_string(unsplit(c));
    return std::nullopt;
  });
}

// (1 + 1/8) * ideal + the fixed cost of one piece, asked of batches with at least 8 blocks of the widest tile a worker.
TEST(PlanCostProperty, BalancedIsWithinAnEighthOfIdeal) {
  std::int32_t asked = 0;
  for_each_case({.cases = 8000, .options = {.op = Op::decode}}, [&asked](Rng& rng, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    // Half the time as many workers as the batch can just feed, where the bound is tightest.
    const std::int64_t eight_blocks = 8 * c.config.cost.block(c.config.row_tile);
    const std::int64_t total = unsplit(c);
    if (rng.one_in(2)) {
      c.config.workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(total / eight_blocks, 1, 300));
    }
    const std::int64_t workers = c.config.workers;
    if (total < eight_blocks * workers) return std::nullopt;
    ++asked;
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    const std::int64_t ideal = (total + workers - 1) / workers;
    const std::int64_t bound = ideal + ideal / 8 + fixed_ticks_of_a_cut(c.config);
    const std::int64_t got = makespan(c.config, guarded.plan());
    if (got > bound) return "makespan " + std::to_string(got) + " > " + std::to_string(bound);
    return std::nullopt;
  });
  EXPECT_GT(asked, 1000) << "too few batches were large enough to ask";
}

TEST(PlanCostProperty, BalancedIsNeverEstimatedWorseThanUniform) {
  for_each_case({.options = {.op = Op::decode}}, [](Rng&, PlanCase& c) -> Finding {
    c.config.policy = Policy::balanced();
    const GuardedPlan balanced(c);
    if (!balanced.error().empty()) return balanced.error();
    const std::int64_t ours = makespan_ticks(c.config, balanced.plan());
    for (std::int32_t n = 1; n <= 16; ++n) {
      PlanCase other = c;
      other.config.policy = Policy::uniform(n);
      const GuardedPlan uniform(other);
      if (!uniform.error().empty()) return uniform.error();
      const std::int64_t theirs = makespan_ticks(other.config, uniform.plan());
      if (ours > theirs)
        return std::to_string(ours) + " against " + std::to_string(theirs) + " of uniform(" + std::to_string(n) + ")";
    }
    return std::nullopt;
  });
}

// Equal pieces on fewer workers: the fewest of at most n blocks for every tile, within one block of equal, one a
// worker. Never above what a line may come to, or the bounds that every plan has; and above the plan there is where
// nothing is shared only within those bounds, as a line does not count all of its splits.
TEST(PlanCostProperty, EqualPiecesAreOneAWorkerAndNoLonger) {
  std::int32_t cut = 0, whole = 0, longer = 0, with_nothing_shared = 0;
  for_each_case(
      {.cases = 6000, .options = {.op = Op::decode, .max_requests = 40}}, [&](Rng& rng, PlanCase& c) -> Finding {
        c.config.policy = Policy::balanced();
        c.config.cost.alone_percent = rng.one_in(3) ? 100 : rng.in(1, 99);
        const GuardedPlan guarded(c);
        if (!guarded.error().empty()) return guarded.error();
        const Plan& plan = guarded.plan();
        const std::int32_t n = -plan.work_meta_data[kMetaSplits];
        if (n <= 0) return std::nullopt;
        if (Finding finding = packed_tiles(c, plan)) return finding;
        for (std::size_t w = 0; w + 1 < plan.work_indptr.size(); ++w)
          if (plan.work_indptr[w + 1] - plan.work_indptr[w] > 1) return "two pieces of worker " + std::to_string(w);
        const Truth truth(c);
        const auto blocks = [&c](std::int32_t tokens) { return (tokens + c.config.kv_block - 1) / c.config.kv_block; };
        for (const auto& pieces : pieces_of_tiles(plan)) {
          const std::int32_t all = blocks(truth.extent(c, pieces[0].row_begin, pieces[0].row_end));
          const auto count = static_cast<std::int32_t>(pieces.size());
          if (count != std::max(1, (all + n - 1) / n))
            return std::to_string(count) + " pieces of " + std::to_string(all) + " blocks, n = " + std::to_string(n);
          for (const WorkRecord& r : pieces)
            if (const std::int32_t own = blocks(r.kv_end - r.kv_begin); own < all / count || own > all / count + 1)
              return "unequal piece: " + text(r);
          ++(count > 1 ? cut : whole);
        }
        PlanCase without = c;
        without.config.cost.alone_percent = 100;
        const GuardedPlan other(without);
        if (!other.error().empty()) return other.error();
        const std::int64_t share = unsplit(c) / c.config.workers, fixed = fixed_ticks_of_a_cut(c.config);
        const std::int64_t ours = plan.makespan_ticks(), theirs = other.plan().makespan_ticks();
        const std::int64_t promised = share + fixed + std::min(share / 8, fixed);
        const std::int64_t of_a_line = share + 1 + c.config.cost.block(c.config.row_tile) + fixed;
        if (ours >= promised && (ours > theirs || ours > of_a_line))
          return std::to_string(ours) + " against " + std::to_string(theirs);
        longer += ours > theirs;
        with_nothing_shared += c.config.cost.alone_percent == 100;
        return std::nullopt;
      });
  EXPECT_GT(cut, 100);
  EXPECT_GT(whole, 100);
  EXPECT_GT(with_nothing_shared, 10);
  EXPECT_GT(longer, 0);
}

// uniform is the baseline, so it must be what it says: min(n, blocks) pieces of every tile, within one block of equal.
TEST(PlanCostProperty, UniformCutsEveryTileIntoEqualPieces) {
  for_each_case({}, [](Rng& rng, PlanCase& c) -> Finding {
    const std::int32_t n = rng.in(1, 20);
    c.config.policy = Policy::uniform(n);
    const GuardedPlan guarded(c);
    if (!guarded.error().empty()) return guarded.error();
    if (Finding finding = packed_tiles(c, guarded.plan())) return finding;
    const Truth truth(c);
    const auto blocks = [&c](std::int32_t tokens) { return (tokens + c.config.kv_block - 1) / c.config.kv_block; };
    for (const auto& pieces : pieces_of_tiles(guarded.plan())) {
      const std::int32_t all = blocks(truth.extent(c, pieces[0].row_begin, pieces[0].row_end));
      if (static_cast<std::int32_t>(pieces.size()) != std::max(1, std::min(n, all)))
        return std::to_string(pieces.size()) + " pieces of " + std::to_string(all) + " blocks";
      for (const WorkRecord& r : pieces) {
        const std::int32_t share = all / static_cast<std::int32_t>(pieces.size());
        const std::int32_t own = blocks(r.kv_end - r.kv_begin);
        if (own < share || own > share + 1) return "unequal piece: " + text(r);
      }
    }
    return std::nullopt;
  });
}

}  // namespace
}  // namespace latte
