// The prefill cases every kernel must pass, and endless random ones.
#pragma once

#include <cstdint>
#include <vector>

#include "testkit/grid.hpp"
#include "testkit/prefill_case.hpp"

namespace latte::testkit {

// The same list on every machine. The quick grid is a sample of the full one.
std::vector<PrefillCase> prefill_grid(GridSize size);

// Any case that the interface allows, small enough for the oracle; the same for the same seed.
PrefillCase random_prefill_case(std::uint64_t seed);

}  // namespace latte::testkit
