// Seams and twins of plans: both sides see them, and what lies there is what the kernel takes for granted.
#include <gtest/gtest.h>

#include "cuda/sm90/decode/seam.hpp"
#include "plan_cases.hpp"

namespace latte::plan_test {
namespace {

using cuda::sm90::Seam;

class Seams {
 public:
  explicit Seams(const Plan& plan)
      : plan_(plan),
        view_{.indptr = plan.work_indptr.data(),
              .records = plan.work_info_set.data(),
              .reduce_indptr = plan.reduce_indptr.data(),
              .reduce_partial_map = plan.reduce_partial_map.data()} {}

  Seam at(std::int32_t worker, std::int32_t i) const {
    const std::int32_t begin = plan_.work_indptr[worker], end = plan_.work_indptr[worker + 1];
    if (i < begin || i >= end) return Seam::none;
    return cuda::sm90::find_seam(view_, {plan_.workers(), worker, begin, end}, i, plan_.work_info_set[i]);
  }
  // As whoever has record i sees it.
  Seam at(std::int32_t i) const {
    std::int32_t worker = 0;
    while (worker < plan_.workers() && plan_.work_indptr[worker + 1] <= i) ++worker;
    return worker < plan_.workers() ? at(worker, i) : Seam::none;
  }

 private:
  const Plan& plan_;
  cuda::PlanView view_;
};

TEST(PlanSeams, AreSeenFromBothSides) {
  std::int64_t seams = 0, twins = 0;
  for_each_case({.cases = 4000, .options = {.op = Op::decode}}, [&](Rng& rng, PlanCase& c) -> Finding {
    if (rng.one_in(2)) c.config.workers = rng.in(1, 6), c.config.limits.workers = 0;
    for (const Policy& policy : {random_policies(rng, c)[rng.in(0, 2)], Policy::uniform(2)}) {
      c.config.policy = policy;
      const GuardedPlan guarded(c);
      if (!guarded.error().empty()) return guarded.error();
      const Plan& plan = guarded.plan();
      const Seams found(plan);
      const auto pieces = [&](std::int32_t worker) { return plan.work_indptr[worker + 1] - plan.work_indptr[worker]; };
      for (std::int32_t worker = 0; worker < plan.workers(); ++worker)
        for (std::int32_t i = plan.work_indptr[worker]; i < plan.work_indptr[worker + 1]; ++i) {
          const Seam seam = found.at(worker, i);
          if (seam == Seam::behind && found.at(i - 1) != Seam::before) return "nobody waits";
          if (seam == Seam::second_twin && found.at(i - 1) != Seam::first_twin) return "a second twin alone";
          if (seam == Seam::second_twin && pieces(worker) != 1) return "a second twin that is not all of its share";
          if (seam != Seam::before && seam != Seam::first_twin) continue;
          ++(seam == Seam::before ? seams : twins);
          if (found.at(i + 1) != (seam == Seam::before ? Seam::behind : Seam::second_twin)) return "waits for nobody";
          const WorkRecord &first = plan.work_info_set[i], &second = plan.work_info_set[i + 1];
          if (i + 1 != plan.work_indptr[worker + 1]) return "not the last of its share";
          if (seam == Seam::before && pieces(worker) < 2) return "a seam behind a share of one piece";
          if (first.tile != second.tile || first.kv_begin != 0 || second.kv_begin != first.kv_end)
            return "not the two pieces of a tile";
          if (plan.reduce_indptr[first.tile + 1] - plan.reduce_indptr[first.tile] != 2) return "not all of its pieces";
          if (second.partial_row != first.partial_row + first.row_end - first.row_begin)
            return "partials are not one behind the other";
        }
    }
    return std::nullopt;
  });
  EXPECT_GT(seams, 100);
  EXPECT_GT(twins, 100);
}

// The shares of two workers, {tile 0, second piece of tile 1} and {its first piece, tile 2}.
TEST(PlanSeams, AreNotWhereTheSecondPieceComesFirst) {
  PlanCase c;
  c.config = {.heads = 64, .row_tile = 64, .kv_block = 48, .workers = 2, .policy = Policy::uniform(2)};
  c.config.limits = {.max_requests = 3, .max_kv_tokens = 8000};
  c.seq_lens = {40, 8000, 40};
  c.query_start = {0, 1, 2, 3};
  const GuardedPlan guarded(c);
  ASSERT_EQ(guarded.error(), "");
  const auto records = guarded.plan().work_info_set;
  ASSERT_EQ(records.size(), 4u);
  ASSERT_TRUE(records[1].tile == records[2].tile && records[1].kv_begin > 0 && records[2].kv_begin == 0);
  const Seams found(guarded.plan());
  for (std::int32_t i = 0; i < 4; ++i) EXPECT_EQ(found.at(i / 2, i), Seam::none);
}

}  // namespace
}  // namespace latte::plan_test
