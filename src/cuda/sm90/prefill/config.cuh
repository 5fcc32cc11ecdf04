// The shape of the prefill kernel: how values of each type lie in shared memory and are multiplied, and the storage of
// a thread block.
#pragma once

#include <cfloat>
#include <cuda.h>
#include <cuda_fp8.h>
#include <type_traits>

#include "cuda/prim/copy.cuh"
#include "cuda/prim/sync.cuh"
#include "cuda/prim/wgmma.cuh"
#include "cuda/sm90/common/block.cuh"
#include "cuda/sm90/common/math.cuh"
#include "cuda/sm90/prefill/call.hpp"

namespace latte::cuda::sm90::prefill {

using Fp8 = __nv_fp8_e4m3;
template <class T>
inline constexpr bool kIsFp8 = std::is_same_v<T, Fp8>;

inline constexpr int kRows = kPrefillRows;
inline constexpr int kTokens = kPrefillBlock;
inline constexpr int kWidth = kPrefillWidth;
inline constexpr int kValues = kPrefillValues;
inline constexpr int kConsumers = 2;  // warpgroups, 64 rows each
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
static_assert(kWarpgroup * kConsumers / 2 == kRows && kRows == kTokens);

// 16-bit values:  q, k  [3 groups of 64 columns][rows][128 bytes]  K-major, 128-byte swizzle
//                 v     [2 groups of 64 columns][tokens][128 bytes]  MN-major
template <class T>
struct Shape {
  static constexpr int kBytes = 2;
  static constexpr int kStages = 2;
  static constexpr int kStep = 16;  // of the summed dimension, an instruction
  static constexpr int kValueBoxes = kValues / 64;
  static constexpr int kLoaderRegisters = 32, kConsumerRegisters = 232;
  static constexpr bool kQueriesHeld = false;  // in registers
  // A row's probabilities go up to 2^(kHead + kMaxLag): by what power of two they are multiplied, and how many a row's
  // maximum may run ahead of its reference before that moves.
  static constexpr float kHead = 0, kMaxLag = 6;
};
// fp8:  q, k  [3 groups of 64 columns][rows][64 bytes]  K-major, 64-byte swizzle
//       v     transposed (transpose.cuh), as products take K-major operands only: [128 columns][128 tokens], 128-byte
//             swizzle, tokens within groups of 16 in the order in which the probabilities' registers hold them
template <>
struct Shape<Fp8> {
  static constexpr int kBytes = 1;
  static constexpr int kStages = 4;
  static constexpr int kStep = 32;
  static constexpr int kLoaderRegisters = 56, kConsumerRegisters = 224;
  static constexpr bool kQueriesHeld = true;
  // e4m3 has 2^-6 to 448 at full precision; 2^8 is the highest it is used to, so that a row's largest is exact.
  static constexpr float kHead = 8, kMaxLag = 0;
};

inline constexpr int kGroupColumns = 64;  // of q and k, a box
inline constexpr int kGroups = kWidth / kGroupColumns;

// One record of the plan, with what follows from it for every row.
struct Piece {
  WorkRecord record;
  std::int32_t head, token;  // of its first row
  std::int32_t kv_row;       // of its first KV token, in k and v
  std::int32_t slack;        // how many tokens more than the piece has its first row could see; negative: so many less
  float scale_log2, value_scale;

  __device__ std::int32_t rows() const { return record.row_end - record.row_begin; }
  __device__ std::int32_t tokens() const { return record.kv_end - record.kv_begin; }
  __device__ std::int32_t blocks() const { return (tokens() + kTokens - 1) / kTokens; }
  __device__ bool split() const { return record.partial_row >= 0; }
  // Tokens that the request has from the piece's first on.
  __device__ std::int32_t request_tokens() const { return record.kv_after + record.kv_end - record.kv_begin; }
  // How many of the piece's tokens a row sees; not more than there are, maybe less than none.
  __device__ std::int32_t visible(std::int32_t row) const { return min(tokens(), tokens() + slack + row); }
};

// fp8: blocks of values on their way to the form that products take.
struct TransposerStorage {
  static constexpr int kFetched = 2;

  alignas(1024) std::byte fetched[kFetched][kTokens * kValues];  // [tokens][128 bytes], 128-byte swizzle
  prim::Barrier landed[kFetched], launch_known;
  std::uint32_t launch;
};
struct NoStorage {};

template <class T>
struct Storage {
  static constexpr int kRowBytes = kGroupColumns * Shape<T>::kBytes;
  static constexpr int kGroupBytes = kTokens * kRowBytes;
  static constexpr int kKeyBytes = kGroups * kGroupBytes;
  static constexpr int kValueBytes = kTokens * kValues * Shape<T>::kBytes;
  static constexpr int kStages = Shape<T>::kStages;
  // A consumer may give back the queries of piece n before the results of n - 1 are stored. So when the loader has seen
  // piece n given back by both and n + 1 by the first, which n + 2 waits for, the second may still need n - 1.
  static constexpr int kPieces = 4;

  static_assert(Shape<T>::kLoaderRegisters + kConsumers * Shape<T>::kConsumerRegisters <=
                3 * launch_registers(kThreads));

  alignas(1024) std::byte q[kKeyBytes];
  alignas(1024) std::byte k[kStages][kKeyBytes];
  alignas(1024) std::byte v[kStages][kValueBytes];
  std::conditional_t<kIsFp8<T>, TransposerStorage, NoStorage> transposer;
  Piece pieces[kPieces];  // come and go with their queries
  prim::Barrier q_full[kConsumers], q_empty[kConsumers], v_landed;
  prim::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};
static_assert(sizeof(Storage<__half>) <= kSharedLimit && sizeof(Storage<Fp8>) <= kSharedLimit);

// Zeros in rows of 128 bytes from one on to the last of a block, by a warp.
__device__ __forceinline__ void clear_rows_from(std::uint32_t rows, std::int32_t from, int lane) {
  for (int at = from * kRowBytes + lane * 16; at < kTokens * kRowBytes; at += 32 * 16) prim::store_16_zeros(rows + at);
}

__device__ __forceinline__ float scale_of(const Fp8Scale& scale, std::int32_t head) {
  return scale.ptr ? __ldg(scale.ptr + (scale.per_head ? head : 0)) : scale.value;
}

// Four bytes of e4m3 values.
__device__ __forceinline__ std::uint32_t pack_fp8(float a, float b, float c, float d) {
  std::uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<std::uint32_t>(high) << 16 | low;
}

struct Maps {
  CUtensorMap q, k, v;  // of the type that is multiplied; v not transposed
};

// The slack of rows that see everything: more than a piece has rows, and no more than limits keep free of integers.
inline constexpr std::int32_t kMaskNone = 2048;

struct Share {
  const PrefillCall& call;
  std::int32_t begin, end;
  std::int32_t query_tokens;  // of the step: rows are head * query_tokens + token

  __device__ explicit Share(const PrefillCall& of)
      : call(of),
        begin(__ldg(of.plan.indptr + blockIdx.x)),
        end(__ldg(of.plan.indptr + blockIdx.x + 1)),
        query_tokens(__ldg(of.query_start + __ldg(of.meta + kMetaRequests))) {}

  __device__ Piece piece(std::int32_t index) const {
    // Nothing is promised about alignment but that of words.
    const auto* words = reinterpret_cast<const std::int32_t*>(call.plan.records + index);
    Piece piece{.record = {__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3), __ldg(words + 4),
                           __ldg(words + 5), __ldg(words + 6), __ldg(words + 7)}};
    piece.head = piece.record.row_begin / query_tokens;
    piece.token = piece.record.row_begin - piece.head * query_tokens;
    piece.kv_row = __ldg(call.kv_start + piece.record.request) + piece.record.kv_begin;
    return piece;
  }
  // The same with what only consumers need.
  __device__ Piece whole_piece(std::int32_t index) const {
    Piece piece = this->piece(index);
    const std::int32_t behind = __ldg(call.query_start + piece.record.request + 1) - piece.token - 1;
    piece.slack = call.mask == Mask::none ? kMaskNone : piece.record.kv_after - behind;
    // Not zero, which a scale in device memory may be: masked scores are infinite.
    piece.scale_log2 =
        fmaxf(call.scale * kLog2E * scale_of(call.q_scale, piece.head) * scale_of(call.k_scale, piece.head), FLT_MIN);
    piece.value_scale = scale_of(call.v_scale, piece.head);
    return piece;
  }
};

}  // namespace latte::cuda::sm90::prefill
