// Every usable kernel over the whole prefill grid and over random cases. The oracle works once for all of them.
#include "testkit/prefill_grid.hpp"

#include <map>

#include <gtest/gtest.h>

#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

constexpr std::uint64_t kRandomCases = 60;

// Runs a list of cases on every kernel; `auto` has to serve all of them.
class AllPrefillKernels {
 public:
  AllPrefillKernels() {
    for (const std::string& name : usable_kernels()) backends_.emplace(name, open_backend(name));
  }

  void run(const PrefillCase& description, const BuilderOptions& options = {}) {
    PreparedPrefill prepared(description);
    const Support support = auto_.supports(description.problem());
    EXPECT_TRUE(support.ok) << description.name() << ": " << support.reason;
    EXPECT_FALSE(support.kernel.empty());
    for (const auto& [name, backend] : backends_)
      if (expect_agreement(backend, prepared, options)) ++cases_run_[name];
  }

  void expect_that_each_ran() const {
    for (const auto& [name, backend] : backends_) EXPECT_TRUE(cases_run_.contains(name)) << name << " ran no case";
  }

 private:
  Backend auto_ = open_backend();
  std::map<std::string, Backend> backends_;
  std::map<std::string, int> cases_run_;
};

TEST(PrefillKernels, AgreeWithTheOracleOnTheGrid) {
  AllPrefillKernels kernels;
  for (const PrefillCase& description : prefill_grid(GridSize::full)) kernels.run(description);
  kernels.expect_that_each_ran();
}

TEST(PrefillKernels, AgreeWithTheOracleOnRandomCases) {
  const Policy policies[] = {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(128)};
  AllPrefillKernels kernels;
  for (std::uint64_t i = 0; i < kRandomCases; ++i)
    kernels.run(random_prefill_case(run_seed() + i), {.policy = policies[i % std::size(policies)]});
  kernels.expect_that_each_ran();
}

}  // namespace
}  // namespace latte::testkit
