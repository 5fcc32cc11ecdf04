// The arithmetic of uniform(n), shared with `balanced`, which tries it as a candidate.
#pragma once

#include <cstdint>
#include <span>

#include "plan/policies.hpp"

namespace latte::plan {

// Pieces beyond one per tile; `splits` as kMetaSplits has them.
std::int64_t uniform_extra_pieces(const Step& step, std::int32_t splits);
// `loads` is scratch of one entry a worker.
std::int64_t uniform_makespan(const Step& step, std::int32_t splits, std::span<Ticks> loads);

}  // namespace latte::plan
