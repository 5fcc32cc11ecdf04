// The cases every kernel must pass, and endless random ones.
#pragma once

#include <cstdint>
#include <vector>

#include "testkit/case.hpp"

namespace latte::testkit {

enum class GridSize : std::uint8_t { quick, full };

// The same list on every machine. The quick grid is a sample of the full one.
std::vector<DecodeCase> case_grid(GridSize size);

// Any case that the interface allows, small enough for the oracle; the same for the same seed.
DecodeCase random_case(std::uint64_t seed);

}  // namespace latte::testkit
