// What the device can do at best, to be held against the kernels: reading memory from end to end, and products of the
// tensor cores on random bf16 or fp8 values that never leave shared memory. Both are what a kernel cannot beat, not
// what a library reaches; random values matter, as zeros take less power and leave the clock higher.
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "core/hashed_normal.hpp"
#include "cuda/host/measure.hpp"
#include "cuda/prim/launch.cuh"
#include "cuda/prim/sync.cuh"
#include "cuda/prim/wgmma.cuh"

namespace latte::cuda {
namespace {

constexpr std::size_t kReadBytes = std::size_t{4} << 30;  // far beyond the L2 cache
constexpr int kReadThreads = 512, kReadBlocksPerUnit = 4, kReadUnroll = 8;
constexpr int kReadPasses = 8;

__global__ void __launch_bounds__(kReadThreads) read_all(const int4* data, std::int64_t count, int* sink) {
  int sum = 0;
  const std::int64_t chunk = std::int64_t{kReadThreads} * kReadUnroll;
  for (std::int64_t at = blockIdx.x * chunk + threadIdx.x; at < count; at += gridDim.x * chunk) {
    int4 values[kReadUnroll];
#pragma unroll
    for (int i = 0; i < kReadUnroll; ++i) values[i] = __ldcs(data + at + i * kReadThreads);
#pragma unroll
    for (int i = 0; i < kReadUnroll; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  if (sum == 0x12345678) *sink = sum;  // keeps the loads; the buffer holds zeros, so it is never true
}

// Two warpgroups a block, each D[64][128] += A[64][n] . B[n][128], n values a swizzled row, again and again. Wide
// enough that shared memory keeps up: 6 KiB of operands in the 64 cycles of an instruction, where it could deliver 8.
constexpr int kWarpgroups = 2, kBurnThreads = kWarpgroups * 128;
constexpr int kColumns = 128;
template <class T>
constexpr int kDepth = 128 / sizeof(T);  // of the operands: one swizzled row
constexpr int kBurnRounds = 1 << 17;
constexpr int kBurnPasses = 5;

template <class T>
struct alignas(1024) BurnStorage {
  T a[kWarpgroups][64][kDepth<T>];
  T b[kColumns][kDepth<T>];
};

struct BurnClock {
  long long cycles, nanoseconds;
};

__device__ long long now_ns() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

template <class T>
__global__ void __launch_bounds__(kBurnThreads, 1) multiply_registers(int rounds, BurnClock* clock, float* sink) {
  extern __shared__ std::byte raw[];
  auto& storage =
      *reinterpret_cast<BurnStorage<T>*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) & ~std::uintptr_t{1023});
  auto* values = reinterpret_cast<T*>(&storage);
  for (unsigned i = threadIdx.x; i < sizeof(BurnStorage<T>) / sizeof(T); i += kBurnThreads)
    values[i] = T(hashed_normal(blockIdx.x, i));
  prim::fence_async_proxy();
  __syncthreads();

  const std::uint64_t a = prim::operand(prim::shared_address(storage.a[threadIdx.x / 128]), 1024);
  const std::uint64_t b = prim::operand(prim::shared_address(storage.b), 1024);
  float d[kColumns / 2] = {};
  const long long cycles = clock64(), nanoseconds = now_ns();
  for (int round = 0; round < rounds; ++round) {
    prim::begin_products();
#pragma unroll
    for (std::uint32_t k = 0; k < 128; k += 32) {  // bytes
      if constexpr (sizeof(T) == 1)
        prim::multiply_fp8(d, prim::moved(a, k), prim::moved(b, k));
      else
        prim::multiply<T, 0, 0>(d, prim::moved(a, k), prim::moved(b, k));
    }
    prim::commit_products();
    prim::wait_products<1>();
  }
  prim::wait_products<0>();
  prim::pin(d);
  if (blockIdx.x == 0 && threadIdx.x == 0) *clock = {clock64() - cycles, now_ns() - nanoseconds};
  float sum = 0;
  for (float value : d) sum += value;
  if (sum == 1.5f) *sink = sum;
}

// Everything that has to go away again, whatever fails in between.
struct Bench {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  void* memory = nullptr;

  ~Bench() {
    cudaFree(memory);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  cudaError_t open() {
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaEventCreate(&begin);
    if (error == cudaSuccess) error = cudaEventCreate(&end);
    return error;
  }
  template <class Launch>
  cudaError_t seconds(Launch launch, double& result) {
    cudaError_t error = cudaEventRecord(begin, stream);
    if (error == cudaSuccess) error = launch();
    if (error == cudaSuccess) error = cudaEventRecord(end, stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(end);
    float milliseconds = 0;
    if (error == cudaSuccess) error = cudaEventElapsedTime(&milliseconds, begin, end);
    result = static_cast<double>(milliseconds) * 1e-3;
    return error;
  }
};

cudaError_t measure_reads(Bench& bench, int units, Ceilings& ceilings) {
  std::size_t free = 0, total = 0;
  if (const cudaError_t error = cudaMemGetInfo(&free, &total); error != cudaSuccess) return error;
  constexpr std::size_t kChunkBytes = std::size_t{kReadThreads} * kReadUnroll * sizeof(int4);
  const std::size_t bytes = std::min(kReadBytes, free / 2) / kChunkBytes * kChunkBytes;
  if (const cudaError_t error = cudaMalloc(&bench.memory, bytes + sizeof(int)); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaMemsetAsync(bench.memory, 0, bytes, bench.stream); error != cudaSuccess)
    return error;
  auto* sink = reinterpret_cast<int*>(static_cast<std::byte*>(bench.memory) + bytes);
  for (int pass = 0; pass < kReadPasses; ++pass) {
    double seconds = 0;
    const cudaError_t error = bench.seconds(
        [&] {
          return prim::launch(read_all, static_cast<unsigned>(units * kReadBlocksPerUnit), kReadThreads, 0,
                              bench.stream, static_cast<const int4*>(bench.memory),
                              static_cast<std::int64_t>(bytes / sizeof(int4)), sink);
        },
        seconds);
    if (error != cudaSuccess) return error;
    ceilings.read_gbps = std::max(ceilings.read_gbps, static_cast<double>(bytes) / seconds * 1e-9);
  }
  return cudaSuccess;
}

template <class T>
cudaError_t measure_products(Bench& bench, int units, Ceilings& ceilings) {
  constexpr int kSharedBytes = sizeof(BurnStorage<T>) + 1024;
  if (const cudaError_t error =
          cudaFuncSetAttribute(multiply_registers<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess)
    return error;
  auto* clock = static_cast<BurnClock*>(bench.memory);
  auto* sink = reinterpret_cast<float*>(clock + 1);
  constexpr double kOperations = 2.0 * 64 * kColumns * kDepth<T> * kWarpgroups * kBurnRounds;
  for (int pass = 0; pass < kBurnPasses; ++pass) {
    double seconds = 0;
    cudaError_t error = bench.seconds(
        [&] {
          return prim::launch(multiply_registers<T>, static_cast<unsigned>(units), kBurnThreads, kSharedBytes,
                              bench.stream, kBurnRounds, clock, sink);
        },
        seconds);
    BurnClock measured{};
    if (error == cudaSuccess) error = cudaMemcpy(&measured, clock, sizeof measured, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return error;
    const double tflops = kOperations * units / seconds * 1e-12;
    if (tflops <= ceilings.tflops) continue;
    ceilings.tflops = tflops;
    ceilings.clock_mhz = static_cast<double>(measured.cycles) / static_cast<double>(measured.nanoseconds) * 1e3;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t measure_ceilings(std::int32_t multiprocessors, bool fp8, Ceilings& ceilings) {
  Bench bench;
  cudaError_t error = bench.open();
  if (error == cudaSuccess) error = measure_reads(bench, multiprocessors, ceilings);
  if (error == cudaSuccess)
    error = fp8 ? measure_products<__nv_fp8_e4m3>(bench, multiprocessors, ceilings)
                : measure_products<__nv_bfloat16>(bench, multiprocessors, ceilings);
  return error;
}

}  // namespace latte::cuda
