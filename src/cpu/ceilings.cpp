// What the machine can do at best, on the very threads that run decode: streaming reads and the kernel's products.
#include <algorithm>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 30;  // beyond every cache
constexpr int kReadPasses = 4;
constexpr double kBurnSeconds = 0.3;

struct Reading {
  const std::uint64_t* data;
  std::size_t words_each;
};

void fill_share(void* opaque, std::int32_t worker) {
  const auto& reading = *static_cast<const Reading*>(opaque);
  auto* begin = const_cast<std::uint64_t*>(reading.data) + static_cast<std::size_t>(worker) * reading.words_each;
  std::fill(begin, begin + reading.words_each, std::uint64_t{0x3f803f803f803f80});
}

// `ahead` bytes of software prefetch, or none: which reads faster depends on the machine, so both are tried.
template <std::size_t ahead>
void read_share(void* opaque, std::int32_t worker) {
  const auto& reading = *static_cast<const Reading*>(opaque);
  const std::uint64_t* begin = reading.data + static_cast<std::size_t>(worker) * reading.words_each;
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 8 <= reading.words_each; i += 8) {
    if constexpr (ahead > 0) __builtin_prefetch(begin + i + ahead / sizeof(std::uint64_t), 0, 2);
    for (std::size_t j = 0; j < 8; ++j) sums[j] ^= begin[i + j];
  }
  for (std::size_t j = 1; j < 8; ++j) sums[0] ^= sums[j];
  keep(sums[0]);
}

Result<double> read_gbps(Workers& workers) {
  void* memory = mmap(nullptr, kReadBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return Status(Code::out_of_memory, "memory", std::to_string(kReadBytes) + " bytes to read from", "none");
  madvise(memory, kReadBytes, MADV_HUGEPAGE);
  Reading reading{static_cast<const std::uint64_t*>(memory),
                  kReadBytes / sizeof(std::uint64_t) / static_cast<std::size_t>(workers.count())};
  workers.run(workers.count(), fill_share, &reading);
  double best = 0;
  for (int pass = 0; pass < kReadPasses; ++pass)
    for (const Workers::Task read : {read_share<0>, read_share<2048>, read_share<8192>}) {
      const Stopwatch watch;
      workers.run(workers.count(), read, &reading);
      best = std::max(best, static_cast<double>(kReadBytes) / watch.seconds() * 1e-9);
    }
  munmap(memory, kReadBytes);
  return best;
}

struct Burning {
  const Kernel& kernel;
  std::vector<double> operations;
};

void burn_share(void* opaque, std::int32_t worker) {
  auto& burning = *static_cast<Burning*>(opaque);
  burning.operations[static_cast<std::size_t>(worker)] = burning.kernel.burn(kBurnSeconds);
}

}  // namespace

Result<MeasuredCeilings> measure_ceilings(Workers& workers, const Kernel& kernel) {
  Burning burning{kernel, std::vector<double>(static_cast<std::size_t>(workers.count()))};
  const Stopwatch watch;
  workers.run(workers.count(), burn_share, &burning);
  const double seconds = watch.seconds();
  double operations = 0;
  for (const double each : burning.operations) operations += each;
  const Result<double> gbps = read_gbps(workers);
  if (!gbps.ok()) return gbps.status();
  return MeasuredCeilings{.read_gbps = *gbps, .tflops = operations / seconds * 1e-12};
}

}  // namespace latte::cpu
