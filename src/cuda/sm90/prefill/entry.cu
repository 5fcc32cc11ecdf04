#include <algorithm>
#include <cfloat>
#include <cuda_fp8.h>

#include "cuda/sm90/prefill/config.cuh"
#include "cuda/sm90/prefill/entry.hpp"

namespace latte::cuda {
namespace {

namespace prefill = sm90::prefill;

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 132 * 16;  // enough to fill a device; they take turns

// 16 bytes of a tensor as fp8: 16 values, or 8 that are divided and rounded.
template <class From>
struct Vector {
  static constexpr int kCount = 16 / sizeof(From);
  static constexpr int kWords = kCount / 4;  // of fp8 values

  __device__ static void to_fp8(const uint4& raw, float inverse, std::uint32_t (&words)[kWords]) {
    if constexpr (std::is_same_v<From, prefill::Fp8>) {
      words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    } else {
      From values[8];
      reinterpret_cast<uint4&>(values) = raw;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto value = [&](int v) { return static_cast<float>(values[4 * i + v]) * inverse; };
        words[i] = prefill::pack_fp8(value(0), value(1), value(2), value(3));
      }
    }
  }
};

// The request that owns a block of 128 transposed tokens, and which of its blocks that is.
struct Owner {
  std::int32_t request, block;

  __device__ Owner(const TransposeCall& call, std::int32_t requests, std::int32_t chunk) {
    std::int32_t low = 0, high = requests;  // the last request that begins at or before the chunk
    while (high - low > 1) {
      const std::int32_t middle = (low + high) / 2;
      if (__ldg(call.kv_start + middle) / kPrefillBlock + middle <= chunk)
        low = middle;
      else
        high = middle;
    }
    request = low;
    block = chunk - (__ldg(call.kv_start + low) / kPrefillBlock + low);
  }
};

// Bytes i of four words become word i.
__device__ __forceinline__ void transpose_bytes(const std::uint32_t (&in)[4], std::uint32_t (&out)[4]) {
  const std::uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const std::uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

// A block of 128 tokens x 128 columns of one head. Four tokens that are neighbours in a register of the products (of
// 16: 2t, 2t + 1, 2t + 8, 2t + 9) become four neighbouring bytes. A thread takes 16 tokens of four columns to 16 bytes
// of each.
//   rows[token][128 bytes], in vectors of 16; vector v lies at v ^ (token / 16), so that the eight threads that read
//   one word of tokens 16 apart find them in different banks.
template <class From>
__device__ void transpose_block(const TransposeCall& call, const Owner& owner, std::int32_t chunk, std::int32_t head) {
  constexpr int kWords = Vector<From>::kWords, kVectors = kPrefillValues / Vector<From>::kCount;  // of a row
  __shared__ __align__(16) std::uint32_t rows[kPrefillBlock][kPrefillValues / 4];
  const auto place = [](int token, int word) { return word ^ token / 16 * 4; };

  const std::int32_t first = __ldg(call.kv_start + owner.request), end = __ldg(call.kv_start + owner.request + 1);
  if (end - first <= owner.block * kPrefillBlock) return;  // no block of a request
  // From the block's first on; what the tensor does not have is zero.
  const std::int32_t tokens = min(end, call.v.tokens) - first - owner.block * kPrefillBlock;
  const float inverse = 1.0f / fmaxf(prefill::scale_of(call.scale, head), FLT_MIN);
  const From* from = static_cast<const From*>(call.v.data) +
                     (std::int64_t{first} + owner.block * kPrefillBlock) * call.v.token_stride +
                     std::int64_t{head} * call.v.head_stride;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // nobody reads the block before any more
#pragma unroll 4
  for (int i = thread; i < kPrefillBlock * kVectors; i += kThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    std::uint32_t words[kWords] = {};
    if (row < tokens)
      Vector<From>::to_fp8(__ldg(reinterpret_cast<const uint4*>(from + row * call.v.token_stride) + vector), inverse,
                           words);
    std::uint32_t* to = &rows[row][place(row, vector * kWords)];
    if constexpr (kWords == 4)
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    else
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
  __syncthreads();
  static_assert(kThreads == kPrefillBlock / 16 * (kPrefillValues / 4));
  const int group = thread % 8, word = thread / 8;
  std::uint32_t out[4][4];  // of four columns: 16 tokens
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    std::uint32_t in[4], transposed[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = 16 * group + 2 * four + t % 2 + t / 2 * 8;
      in[t] = rows[token][place(token, word)];
    }
    transpose_bytes(in, transposed);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i][four] = transposed[i];
  }
  auto* to = static_cast<uint4*>(call.to) +
             ((std::int64_t{head} * (call.tokens / kPrefillBlock) + chunk) * kPrefillValues + 4 * word) * 8 + group;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[8 * i] = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
}

// Thread blocks take what there is in turns, heads first: how much, only the step's lengths say.
template <class From>
__global__ void __launch_bounds__(kThreads) transpose_values(const __grid_constant__ TransposeCall call) {
  prim::allow_next_launch();  // it waits for the end of this one before it reads what is written here
  const std::int32_t requests = __ldg(call.requests);
  const std::int32_t chunks = __ldg(call.kv_start + requests) / kPrefillBlock + requests;
  const auto blocks = static_cast<std::int32_t>(gridDim.x), block = static_cast<std::int32_t>(blockIdx.x);
  std::int32_t chunk = block / call.heads, head = block % call.heads;
  while (chunk < chunks) {
    transpose_block<From>(call, Owner(call, requests, chunk), chunk, head);
    chunk += blocks / call.heads;
    head += blocks % call.heads;
    if (head >= call.heads) head -= call.heads, ++chunk;
  }
}

// 16 source bytes a thread. fp8 values are exact in f16.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ ConvertCall call) {
  const int vectors = call.width / Vector<From>::kCount;  // of a row
  const std::int64_t all = std::int64_t{call.from.tokens} * call.heads * vectors;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / vectors, token = row / call.heads;
    const auto head = static_cast<std::int32_t>(row - token * call.heads);
    const From* from = static_cast<const From*>(call.from.data) + token * call.from.token_stride +
                       std::int64_t{head} * call.from.head_stride;
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i % vectors);
    if constexpr (std::is_same_v<To, prefill::Fp8>) {
      std::uint32_t words[Vector<From>::kWords];
      Vector<From>::to_fp8(raw, 1.0f / fmaxf(prefill::scale_of(call.scale, head), FLT_MIN), words);
      static_cast<uint2*>(call.to)[i] = make_uint2(words[0], words[1]);
    } else {
      From values[16];
      reinterpret_cast<uint4&>(values) = raw;
      To out[16];
#pragma unroll
      for (int v = 0; v < 16; ++v) out[v] = static_cast<To>(static_cast<float>(values[v]));
      static_cast<uint4*>(call.to)[2 * i] = reinterpret_cast<uint4*>(out)[0];
      static_cast<uint4*>(call.to)[2 * i + 1] = reinterpret_cast<uint4*>(out)[1];
    }
  }
}

}  // namespace

cudaError_t launch_transpose_values(const TransposeCall& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(call.tokens / kPrefillBlock * call.heads, kMostBlocks));
  if (blocks == 0) return cudaSuccess;
  if (call.dtype == Dtype::fp8_e4m3)
    transpose_values<prefill::Fp8><<<blocks, kThreads, 0, stream>>>(call);
  else if (call.dtype == Dtype::bf16)
    transpose_values<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(call);
  else
    transpose_values<__half><<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t launch_convert(const ConvertCall& call, cudaStream_t stream) {
  const std::int64_t vectors =
      std::int64_t{call.from.tokens} * call.heads * call.width / (call.from_dtype == Dtype::fp8_e4m3 ? 16 : 8);
  const auto blocks = static_cast<unsigned>(std::min((vectors + kThreads - 1) / kThreads, kMostBlocks));
  if (blocks == 0) return cudaSuccess;
  if (call.from_dtype == Dtype::bf16)
    convert_rows<__nv_bfloat16, prefill::Fp8><<<blocks, kThreads, 0, stream>>>(call);
  else if (call.from_dtype == Dtype::f16)
    convert_rows<__half, prefill::Fp8><<<blocks, kThreads, 0, stream>>>(call);
  else
    convert_rows<prefill::Fp8, __half><<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace latte::cuda
