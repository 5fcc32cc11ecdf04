// What may be read: caches beyond 2^31 elements in full, and nothing past the end of any tensor.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "testkit/grid.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

// Address space without memory behind it: only the pages that are written take any.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMemory() {
    if (ok()) munmap(memory_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  bool ok() const { return memory_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

class HugeCache : public EachKernel {};

// The pages of an ordinary batch, moved to the far end of a cache whose element offsets pass 2^31 (and 2^32).
TEST_P(HugeCache, PagesBeyondTwoToThe31ElementsAreFound) {
  constexpr std::int64_t kElements = (std::int64_t{1} << 32) + (std::int64_t{1} << 28);
  DecodeCase shape;
  shape.requests = {{1, 300}, {2, 70}, {1, 16}};
  shape.heads = 4;
  shape.page_size = 16;
  for (const DecodeCase& c : served_formats(shape)) {
    PreparedCase prepared(c);
    DecodeArgs args = prepared.batch.args();
    const ConstTensorView small = args.kv_cache;
    const auto page_bytes = static_cast<std::int64_t>(dtype_bytes(small.dtype)) * small.stride[0];
    const std::int64_t far_pages = kElements / small.stride[0];
    const SparseMemory memory(static_cast<std::size_t>(far_pages * page_bytes));
    if (!memory.ok()) GTEST_SKIP() << "this system gives no address space of " << far_pages * page_bytes << " bytes";

    // Page p of the small cache lies at stride * p from the end, the last ones beyond 2^32 elements.
    const auto far_page = [&](std::int64_t page) { return far_pages - 1 - page * (far_pages / (2 * small.shape[0])); };
    for (std::int64_t page = 0; page < small.shape[0]; ++page)
      std::memcpy(memory.data() + far_page(page) * page_bytes, small.bytes() + page * page_bytes,
                  static_cast<std::size_t>(page_bytes));
    std::vector<std::int32_t> table;
    const std::int64_t columns = args.pages.max_pages;
    for (std::size_t b = 0; b < c.requests.size(); ++b)
      for (std::int64_t i = 0; i < columns; ++i) {
        const std::int32_t page =
            args.pages.block_table[static_cast<std::int64_t>(b) * args.pages.block_table_stride + i];
        const bool real = page >= 0 && page < small.shape[0];
        table.push_back(real ? static_cast<std::int32_t>(far_page(page)) : page);
      }
    args.kv_cache.data = memory.data();
    args.kv_cache.shape[0] = far_pages;
    args.pages = {.block_table = table.data(), .block_table_stride = columns, .max_pages = columns};

    auto builder = MetadataBuilder::create(backend, c.problem(), c.limits()).value();
    const Status status = decode(builder.build(0, prepared.batch.lengths()).value(), args);
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison result = compare(args.out, args.lse, prepared.oracle, c.tolerance(prepared.oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

TEST(WriteKvHugeCache, SlotsBeyondTwoToThe31ElementsAreFound) {
  constexpr std::int64_t kPages = 70'000, kPageSize = 64, kWidth = 576;  // 2.6e9 elements
  const SparseMemory memory(static_cast<std::size_t>(kPages * kPageSize * kWidth * 2));
  if (!memory.ok()) GTEST_SKIP() << "this system gives no such address space";
  std::vector<std::uint16_t> latent(512), rope(64);
  for (std::size_t i = 0; i < 512; ++i) latent[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
  for (std::size_t i = 0; i < 64; ++i) rope[i] = static_cast<std::uint16_t>(0xbf80 + i);
  const std::int64_t slot[] = {kPages * kPageSize - 1};
  const Status status = write_kv(
      open_backend(), {.kv_c = dense(static_cast<const void*>(latent.data()), Dtype::bf16, {1, 512}),
                       .k_pe = dense(static_cast<const void*>(rope.data()), Dtype::bf16, {1, 64}),
                       .slot_mapping = slot,
                       .kv_cache = dense(static_cast<void*>(memory.data()), Dtype::bf16, {kPages, kPageSize, kWidth})});
  ASSERT_TRUE(status.ok()) << status.message();
  const std::byte* token = memory.data() + slot[0] * kWidth * 2;
  EXPECT_EQ(std::memcmp(token, latent.data(), 1024), 0);
  EXPECT_EQ(std::memcmp(token + 1024, rope.data(), 128), 0);
}

// A kernel that reads behind a tensor dies on the fence; the handler says in which case.
char current_case[1024];

void tell_case_and_die(int signal_number) {
  const ssize_t ignored = write(STDERR_FILENO, current_case, std::strlen(current_case));
  static_cast<void>(ignored);
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

class Fences : public EachKernel {
 protected:
  Fences() : previous_(std::signal(SIGSEGV, tell_case_and_die)) {}
  ~Fences() override { std::signal(SIGSEGV, previous_); }

 private:
  void (*previous_)(int);
};

TEST_P(Fences, NothingIsReadPastTheEndOfATensor) {
  for (std::uint64_t i = 0; i < 60; ++i) {
    const DecodeCase c = random_case(run_seed() + i);
    if (!backend.supports(c.problem()).ok) continue;
    std::snprintf(current_case, sizeof current_case, "\nread past the end of a tensor: [%s] %s\n", GetParam().c_str(),
                  c.name().c_str());
    PreparedCase prepared(c, Fill::fenced);
    expect_agreement(backend, prepared);
  }
}

TEST_P(Fences, NothingIsReadPastAFullLastPage) {
  for (std::int32_t page : {1, 3, 16, 64}) {
    DecodeCase shape;
    shape.requests = {{1, page * 3}, {2, page}};
    shape.heads = 3;
    shape.page_size = page;
    for (const DecodeCase& c : served_formats(shape)) {
      std::snprintf(current_case, sizeof current_case, "\nread past the end of a tensor: [%s] %s\n", GetParam().c_str(),
                    c.name().c_str());
      PreparedCase prepared(c, Fill::fenced);
      expect_agreement(backend, prepared);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, HugeCache, each_kernel(), kernel_test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, Fences, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
