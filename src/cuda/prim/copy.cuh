// Copies: the tensor copy engine, bulk copies, 16-byte asynchronous copies, and matrix loads and stores.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "cuda/prim/sync.cuh"

namespace latte::cuda::prim {

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// How what a box leaves in L2 is kept: like everything else, or as the first to go.
__device__ __forceinline__ std::uint64_t l2_policy(bool first_to_go) {
  std::uint64_t policy;
  if (first_to_go)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box of a 5-D tensor map into shared memory, at {0, 0, group, slab, page}; its bytes are announced on `barrier`.
__device__ __forceinline__ void load_box(const CUtensorMap& map, Barrier& barrier, std::uint32_t to, std::int32_t group,
                                         std::int32_t slab, std::int32_t page, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(0), "r"(group), "r"(slab), "r"(page), "l"(policy)
      : "memory");
}

// One box of a 3-D tensor map, at {column, row, plane}.
__device__ __forceinline__ void load_box(const CUtensorMap& map, Barrier& barrier, std::uint32_t to,
                                         std::int32_t column, std::int32_t row, std::int32_t plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(plane)
      : "memory");
}

// Bytes as they lie, a multiple of 16, into shared memory; announced on `barrier`.
__device__ __forceinline__ void load_bytes(Barrier& barrier, std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}
// And back. The thread that stores them can wait until all of its stores have been read from shared memory, or are
// written.
__device__ __forceinline__ void store_bytes(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_stores_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 16 bytes, past L1. With `valid` false the destination is filled with zeros and nothing is read.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_16_zeros(std::uint32_t to) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

// The transposes of two 8 x 8 matrices of 16-bit values from a warp's fragments; lane l < 16 names row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void store_matrix_x2_transposed(std::uint32_t to, std::uint32_t first,
                                                           std::uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second)
               : "memory");
}

// Four such matrices as they are; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t to, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3])
               : "memory");
}

// Four 8 x 8 matrices of 16-bit values as a warp's fragments; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same of their transposes: a lane gets two values of a column instead of a row.
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

}  // namespace latte::cuda::prim
