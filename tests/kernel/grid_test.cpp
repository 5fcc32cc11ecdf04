// Every usable kernel over the whole grid and over random cases. The oracle works once for all of them.
#include "testkit/grid.hpp"

#include <map>

#include <gtest/gtest.h>

#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

constexpr std::uint64_t kRandomCases = 80;

// Runs a list of cases on every kernel, and each time on `auto`, which has to serve all of them.
class AllKernels {
 public:
  AllKernels() {
    for (const std::string& name : usable_kernels()) backends_.emplace(name, open_backend(name));
  }

  void run(const DecodeCase& description) {
    PreparedCase prepared(description);
    EXPECT_TRUE(auto_.supports(description.problem()).ok) << description.name();
    for (const auto& [name, backend] : backends_)
      if (expect_agreement(backend, prepared)) ++cases_run_[name];
  }

  void expect_that_each_ran() const {
    for (const auto& [name, backend] : backends_) EXPECT_TRUE(cases_run_.contains(name)) << name << " ran no case";
  }

 private:
  Backend auto_ = open_backend();
  std::map<std::string, Backend> backends_;
  std::map<std::string, int> cases_run_;
};

TEST(Kernels, AgreeWithTheOracleOnTheGrid) {
  AllKernels kernels;
  for (const DecodeCase& description : case_grid(GridSize::full)) kernels.run(description);
  kernels.expect_that_each_ran();
}

TEST(Kernels, AgreeWithTheOracleOnRandomCases) {
  AllKernels kernels;
  for (std::uint64_t i = 0; i < kRandomCases; ++i) kernels.run(random_case(run_seed() + i));
  kernels.expect_that_each_ran();
}

TEST(Kernels, AutoPicksAKernelForEveryCaseOfTheGrid) {
  const Backend backend = open_backend();
  for (const DecodeCase& description : case_grid(GridSize::full)) {
    const Support support = backend.supports(description.problem());
    EXPECT_TRUE(support.ok) << description.name() << ": " << support.reason;
    EXPECT_FALSE(support.kernel.empty());
  }
}

}  // namespace
}  // namespace latte::testkit
