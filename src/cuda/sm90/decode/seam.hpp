// Seams of a plan, where a tile may be joined by one thread block alone (merge.cuh). For host and device: a test asks
// for those of random plans.
#pragma once

#include <cstdint>

#include "cuda/call.hpp"
#include "cuda/plan/division.hpp"

namespace latte::cuda::sm90 {

// A seam lies between two shares of several pieces each: the last one of the first share and the first one of the
// second are the first and the second piece of a tile that has no others. (uniform(n) on two workers may have them the
// other way round.)
enum class Seam { none, before, behind };

// Some worker's records.
struct ShareRange {
  std::int32_t workers, worker, begin, end;
};

// Where record i of a share lies. Both sides of a seam must come to the same answer.
LATTE_DEVICE inline Seam find_seam(const PlanView& plan, const ShareRange& share, std::int32_t i,
                                   const WorkRecord& record) {
  if (record.partial_row < 0 || share.end - share.begin < 2) return Seam::none;
  const bool before = record.kv_begin == 0;
  if (i != (before ? share.end - 1 : share.begin)) return Seam::none;
  const std::int32_t other = before ? share.worker + 1 : share.worker - 1;
  if (other < 0 || other >= share.workers) return Seam::none;
  const std::int32_t* partials = plan.reduce_indptr + record.tile;
  if (plan.indptr[other + 1] - plan.indptr[other] < 2 || partials[1] - partials[0] != 2) return Seam::none;
  if (plan.records[before ? i + 1 : i - 1].tile != record.tile) return Seam::none;
  return before ? Seam::before : Seam::behind;
}

}  // namespace latte::cuda::sm90
