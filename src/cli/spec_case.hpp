// Cases of a batch spec, and whether they fit this machine's memory.
#pragma once

#include "cli/batch_spec.hpp"
#include "cli/options.hpp"
#include "latte/status.hpp"
#include "testkit/case.hpp"
#include "testkit/prefill_case.hpp"

namespace latte::cli {

testkit::DecodeCase make_case(const BatchSpec& spec, const Shape& shape);
testkit::PrefillCase make_case(const BatchSpec& spec, const PrefillShape& shape);

// What a case's tensors take: those that a call touches, and the rest of the cache's pages.
double memory_bytes(const testkit::DecodeCase& description);
double memory_bytes(const testkit::PrefillCase& description);

// An error when so many bytes are more than the machine has free: better than being killed half way.
Status check_memory(double bytes);

}  // namespace latte::cli
