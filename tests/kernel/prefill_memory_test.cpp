// What prefill may read: tensors beyond 2^31 elements in full, and nothing past the end of any of them.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "testkit/prefill_grid.hpp"
#include "tests/kernel/prefill_support.hpp"

namespace latte::testkit {
namespace {

// A kernel that reads behind a tensor dies on the fence; the handler says in which case.
char current_case[1024];

void tell_case_and_die(int signal_number) {
  const ssize_t ignored = write(STDERR_FILENO, current_case, std::strlen(current_case));
  static_cast<void>(ignored);
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

class PrefillFences : public EachPrefillKernel {
 protected:
  PrefillFences() : previous_(std::signal(SIGSEGV, tell_case_and_die)) {}
  ~PrefillFences() override { std::signal(SIGSEGV, previous_); }

  void run(const PrefillCase& c) {
    if (!backend.supports(c.problem()).ok) return;
    std::snprintf(current_case, sizeof current_case, "\nread past the end of a tensor: [%s] %s\n", GetParam().c_str(),
                  c.name().c_str());
    PreparedPrefill prepared(c, Fill::fenced);
    expect_agreement(backend, prepared);
  }

 private:
  void (*previous_)(int);
};

TEST_P(PrefillFences, NothingIsReadPastTheEndOfATensor) {
  for (std::uint64_t i = 0; i < 40; ++i) run(random_prefill_case(run_seed() + i));
}

// The last token of the last head is the last thing in memory, whatever the layout.
TEST_P(PrefillFences, NothingIsReadPastALastTileThatIsNotFull) {
  for (Layout layout : {Layout::dense, Layout::transposed})
    for (std::int32_t length : {1, 15, 16, 17, 63, 64, 65}) {
      PrefillCase shape;
      shape.requests = {{length, length}, {3, length + 1}};
      shape.heads = 3;
      shape.q_layout = shape.k_layout = shape.v_layout = layout;
      for (const PrefillCase& c : served_dtypes(shape)) run(c);
    }
}

class HugePrefill : public EachPrefillKernel {};

// Heads and tokens so far apart that the offset of the last one passes 2^32 elements. Only touched pages take memory.
TEST_P(HugePrefill, OffsetsBeyondTwoToThe32ElementsAreFound) {
  constexpr std::int64_t kHeadStride = (std::int64_t{1} << 31) + (std::int64_t{1} << 27), kTokenStride = 1 << 20;
  PrefillCase shape;
  shape.requests = {{20, 70}, {7, 7}};
  shape.heads = 3;
  for (const PrefillCase& c : served_dtypes(shape)) {
    PreparedPrefill prepared(c);
    PrefillArgs args = prepared.batch.args();
    const auto item = static_cast<std::int64_t>(dtype_bytes(c.dtype));
    const auto bytes = static_cast<std::size_t>((2 * kHeadStride + 77 * kTokenStride) * item);
    std::vector<void*> maps;
    bool mapped = true;
    for (ConstTensorView* view : {&args.q, &args.k, &args.v}) {
      void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) {
        mapped = false;
        break;
      }
      maps.push_back(memory);
#ifdef MADV_NOHUGEPAGE
      madvise(memory, bytes, MADV_NOHUGEPAGE);
#endif
      for (std::int64_t token = 0; token < view->shape[0]; ++token)
        for (std::int64_t head = 0; head < 3; ++head)
          std::memcpy(static_cast<std::byte*>(memory) + (token * kTokenStride + head * kHeadStride) * item,
                      view->bytes() + (token * view->stride[0] + head * view->stride[1]) * item,
                      static_cast<std::size_t>(view->shape[2] * item));
      view->data = memory;
      view->stride = {kTokenStride, kHeadStride, 1};
    }
    if (mapped) {
      auto builder = PrefillBuilder::create(backend, c.problem(), c.limits()).value();
      const Status status = prefill(builder.build(0, prepared.batch.lengths()).value(), args);
      EXPECT_TRUE(status.ok()) << status.message();
      const Comparison result = compare_prefill(prepared, builder.math());
      EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    }
    for (void* memory : maps) munmap(memory, bytes);
    if (!mapped) GTEST_SKIP() << "this system gives no address space of " << bytes << " bytes";
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PrefillFences, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, HugePrefill, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
