// Tiles of two pieces that are not joined in slices like all others, but where their partials are (merge.cuh). For host
// and device: a test asks for those of random plans.
#pragma once

#include <cstdint>

#include "cuda/call.hpp"
#include "cuda/plan/division.hpp"

namespace latte::cuda::sm90 {

// A seam lies between two shares of several pieces each: the last one of the first share and the first one of the
// second are the first and the second piece of a tile that has no others. (uniform(n) on two workers may have them the
// other way round.)
// Twins are such pieces where the second one is all of its share: both then end a share, at about the same time.
enum class Seam { none, before, behind, first_twin, second_twin };
LATTE_DEVICE inline bool is_twin(Seam seam) { return seam == Seam::first_twin || seam == Seam::second_twin; }

// Some worker's records.
struct ShareRange {
  std::int32_t workers, worker, begin, end;
};

// Where record i of a share lies. Both sides must come to the same answer.
LATTE_DEVICE inline Seam find_seam(const PlanView& plan, const ShareRange& share, std::int32_t i,
                                   const WorkRecord& record) {
  if (record.partial_row < 0) return Seam::none;
  const bool before = record.kv_begin == 0;
  if (i != (before ? share.end - 1 : share.begin)) return Seam::none;
  // The share of the other piece, past those that are empty.
  std::int32_t other = before ? share.worker + 1 : share.worker - 1;
  while (other >= 0 && other < share.workers && plan.indptr[other] == plan.indptr[other + 1]) other += before ? 1 : -1;
  if (other < 0 || other >= share.workers) return Seam::none;
  const std::int32_t* partials = plan.reduce_indptr + record.tile;
  if (partials[1] - partials[0] != 2 || plan.records[before ? i + 1 : i - 1].tile != record.tile) return Seam::none;
  const std::int32_t mine = share.end - share.begin, theirs = plan.indptr[other + 1] - plan.indptr[other];
  if ((before ? theirs : mine) == 1) return before ? Seam::first_twin : Seam::second_twin;
  if ((before ? mine : theirs) == 1) return Seam::none;
  return before ? Seam::before : Seam::behind;
}

}  // namespace latte::cuda::sm90
