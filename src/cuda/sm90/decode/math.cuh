// What both decode kernels' math shares beyond common/math.cuh: a thread's place, and stores of results.
#pragma once

#include "cuda/sm90/common/math.cuh"
#include "cuda/sm90/decode/config.cuh"

namespace latte::cuda::sm90 {

// A thread's place: its warp within the warpgroup, its lane, and which of the two warpgroups that own value columns.
struct Lane {
  int side, warp, lane;
  __device__ Lane()
      : side(static_cast<int>(threadIdx.x / kWarpgroup) - 1),
        warp(static_cast<int>(threadIdx.x / 32 % 4)),
        lane(static_cast<int>(threadIdx.x % 32)) {}
};

// Rows of the caller's output, or of partials.
class Sink {
 public:
  __device__ Sink(const KernelCall& call, const Piece& piece)
      : call_(call),
        first_row_(piece.first_row()),
        rows_(piece.rows),
        partial_row_(piece.split() ? std::int64_t{piece.record.partial_row} + piece.row_begin : -1),
        dtype_(call.out.dtype) {}

  __device__ bool partial() const { return partial_row_ >= 0; }
  __device__ std::int32_t rows() const { return rows_; }

  __device__ const DecodeWorkspace& workspace() const { return call_.workspace; }
  // Where row r of a partial is; negative for rows that are not there.
  __device__ std::int64_t partial_row(int r) const { return r < rows_ ? partial_row_ + r : -1; }
  // The first value of row r of the output; null for rows that are not there.
  __device__ std::byte* row(int r) const {
    if (r >= rows_) return nullptr;
    const RowAddress at(call_, first_row_ + r);
    if (at.token >= call_.query_tokens) return nullptr;
    return static_cast<std::byte*>(call_.out.out) +
           (std::int64_t{at.token} * call_.out.out_token_stride + std::int64_t{at.head} * call_.out.out_head_stride) *
               (dtype_ == Dtype::f32 ? 4 : 2);
  }
  // Of the output too: partials have it in their Tail. Null if nobody wants it.
  __device__ float* lse(int r) const {
    if (r >= rows_) return nullptr;
    const RowAddress at(call_, first_row_ + r);
    if (call_.out.lse == nullptr || at.token >= call_.query_tokens) return nullptr;
    return call_.out.lse + std::int64_t{at.token} * call_.out.lse_token_stride +
           std::int64_t{at.head} * call_.out.lse_head_stride;
  }
  __device__ void put_lse(int r, float value) const {
    if (float* to = lse(r)) *to = value;
  }
  // Calls store(Element{}) with the type of the output, so that the question is asked once and not at every store.
  template <class Store>
  __device__ void with_type(const Store& store) const {
    if (dtype_ == Dtype::f32)
      store(float{});
    else if (dtype_ == Dtype::bf16)
      store(__nv_bfloat16{});
    else
      store(__half{});
  }

 private:
  const KernelCall& call_;
  std::int32_t first_row_, rows_;
  std::int64_t partial_row_;
  Dtype dtype_;
};

}  // namespace latte::cuda::sm90
