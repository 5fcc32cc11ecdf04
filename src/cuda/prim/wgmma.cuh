// Warpgroup matrix products: D[64][N] = A[64][16] . B[16][N] (+ D if `add`), B in shared memory behind a descriptor, A
// there too or in registers, D in registers. The register lists are what the instruction needs; there is
// one overload for each form in use.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace latte::cuda::prim {

// Registers written by ordinary instructions are ready for products issued from here on.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLeft committed groups are unfinished.
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator over this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Zero, for a number that is not negative; only the compiler does not know. What needs it comes after the number.
__device__ __forceinline__ std::uint32_t zero_after(float number) {
  std::uint32_t zero;
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %1, 0f00000000;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(zero) : "f"(number));
  return zero;
}

// A value that is the same in all lanes of a warp, in a form from which the compiler sees that: descriptors made from
// it are added up in uniform registers, one for a warp, instead of in two registers of every lane for every product.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t value) { return __shfl_sync(~0u, value, 0); }

// Operands lie in 128-byte rows with the 128-byte swizzle; eight rows make an atom of 1024 bytes.
//   K-major:  a row holds 64 values of the summed dimension; atoms (8 rows of the other one) are `atom_stride` apart.
//   MN-major: a row holds 64 values of the kept dimension; atoms (8 of the summed one) are `atom_stride` apart, the
//             next 64 values of the kept dimension `wide_stride`.
__device__ __forceinline__ constexpr std::uint64_t operand(std::uint32_t address, std::uint32_t atom_stride,
                                                           std::uint32_t wide_stride = 16) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{atom_stride >> 4} << 32) | (std::uint64_t{wide_stride >> 4} << 16) |
         ((address & 0x3FFFF) >> 4);
}
// K-major in 64-byte rows with the 64-byte swizzle; eight rows make an atom of 512 bytes.
__device__ __forceinline__ constexpr std::uint64_t narrow_operand(std::uint32_t address, std::uint32_t atom_stride) {
  return (std::uint64_t{2} << 62) | (std::uint64_t{atom_stride >> 4} << 32) | (std::uint64_t{1} << 16) |
         ((address & 0x3FFFF) >> 4);
}
// Or, K-major without swizzle, in bricks of 8 rows x 8 values (128 bytes): the next 8 rows `row_stride` on, the next 8
// values of the summed dimension `column_stride`.
__device__ __forceinline__ std::uint64_t bricks(std::uint32_t address, std::uint32_t row_stride,
                                                std::uint32_t column_stride) {
  return (std::uint64_t{row_stride >> 4} << 32) | (std::uint64_t{column_stride >> 4} << 16) |
         ((address & 0x3FFFF) >> 4);
}
// A descriptor made for address 0, moved to a place and so many bytes on, without carries: the low word alone changes.
__device__ __forceinline__ std::uint32_t place(std::uint32_t address) { return uniform((address & 0x3FFFF) >> 4); }
__device__ __forceinline__ std::uint64_t at_place(std::uint64_t operand, std::uint32_t place, std::uint32_t bytes) {
  const std::uint32_t low = static_cast<std::uint32_t>(operand) + place + (bytes >> 4);
  return (operand >> 32 << 32) | low;
}
// A descriptor moved on by so many bytes.
__device__ __forceinline__ std::uint64_t moved(std::uint64_t operand, std::uint32_t bytes) {
  return operand + (bytes >> 4);
}

// clang-format off
template <class Half, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[8], std::uint64_t a, std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %12, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7" \
        "}, %8, %9, p, 1, 1, %10, %11;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]) \
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

template <class Half, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[16], std::uint64_t a, std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %20, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
        "}, %16, %17, p, 1, 1, %18, %19;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

template <class Half, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[24], std::uint64_t a, std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %28, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23" \
        "}, %24, %25, p, 1, 1, %26, %27;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]) \
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

template <class Half, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[64], std::uint64_t a, std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %68, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
        "}, %64, %65, p, 1, 1, %66, %67;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

// A in registers: a thread holds rows lane / 4 and 8 further on, columns 2 (lane % 4) + {0, 1} and 8 further on.
template <class Half, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[24], const std::uint32_t (&a)[4], std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %30, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23" \
        "}, {%24, %25, %26, %27}, %28, p, 1, 1, %29;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

template <class Half, int kTransposeB>
__device__ __forceinline__ void multiply(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int add = 1) {
#define LATTE_WGMMA(TYPE)                                                                     \
  asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %70, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB), "r"(add))
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) LATTE_WGMMA("bf16");
  else LATTE_WGMMA("f16");
#undef LATTE_WGMMA
}

// e4m3 values, 32 of the summed dimension at a time; both operands K-major.
__device__ __forceinline__ void multiply_fp8(float (&d)[64], std::uint64_t a, std::uint64_t b, int add = 1) {
  asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_fp8(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int add = 1) {
  asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// clang-format on

}  // namespace latte::cuda::prim
