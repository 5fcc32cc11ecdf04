// What every decode kernel is made of: the piece of work it is handed, the scratch it works in, and its description.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/checked.hpp"
#include "cpu/cpu.hpp"
#include "cpu/features.hpp"
#include "plan/layout.hpp"

namespace latte::cpu {

// One record of the plan with where its result goes. Partials are fp32, normalised, `latent` values a row.
struct Piece {
  const DecodeCall& call;
  const WorkRecord& record;
  std::byte* scratch;
  float* partial_out;  // of the whole workspace; the record says which row
  float* partial_lse;

  std::int32_t rows() const { return record.row_end - record.row_begin; }
  std::int32_t token(std::int32_t row) const { return (record.row_begin + row) / call.heads; }
  std::int32_t head(std::int32_t row) const { return (record.row_begin + row) % call.heads; }
  // KV tokens that a row of the piece sees, counted from the request's start.
  std::int32_t visible(std::int32_t row) const {
    return plan::visible_tokens(call.lengths, call.mask, record.request, token(row));
  }
};

// Address of KV token t of a request, page by page.
class TokenReader {
 public:
  TokenReader(const CacheView& kv, std::int32_t request)
      : kv_(kv), pages_(kv.pages + (kv.indptr ? kv.indptr[request] : request * kv.row_stride)) {}

  const std::byte* at(std::int32_t t) const {
    const std::int32_t page = t / kv_.page_size;
    return kv_.data + pages_[page] * kv_.page_stride_bytes + (t - page * kv_.page_size) * kv_.token_stride_bytes;
  }
  // How many tokens from t on, at most `limit`, lie one token stride apart.
  std::int32_t run(std::int32_t t, std::int32_t limit) const {
    const std::int32_t left = kv_.page_size - t % kv_.page_size;
    return left < limit ? left : limit;
  }

 private:
  const CacheView& kv_;
  const std::int32_t* pages_;
};

// Hands out 64-byte aligned slices of one buffer, or, without a buffer, just counts.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* slice = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(T)), 64));
    return slice;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

// One row to be joined from `count` partials, wherever they lie.
struct MergeRow {
  struct Values {
    const std::byte* data;
    Dtype dtype;
  };
  const void* context;
  float (*lse)(const void* context, std::int32_t k);
  Values (*values)(const void* context, std::int32_t k);
  std::int32_t count;
  std::int32_t latent;
  std::byte* out;
  Dtype out_dtype;
  float* lse_out;  // may be null
};

// Wall time since construction.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Makes the compiler believe a value is used.
template <class T>
inline void keep(const T& value) {
  __asm__ volatile("" : : "g"(&value) : "memory");
}

struct Shape {
  std::int32_t row_tile, latent, rope;
  KvFormat format;
};

// How fast a kernel is: what the planner's cost model is made of (docs/plan.md). From `latte bench` on one thread with
// 1 and 16 heads, on a Zen 4; amx on an Emerald Rapids; neon is a guess, nobody has measured it.
struct Speed {
  double block_ns;       // reading and staging a block of kKvBlock tokens
  double row_block_ns;   // arithmetic of one row over one block, 512/64
  std::int32_t granule;  // rows are computed in groups of this many
};

inline constexpr std::int32_t kKvBlock = 64;

struct Kernel {
  std::string_view name;
  std::string_view serves;
  bool (*usable)(const Features&, std::string& reason);
  bool (*takes)(const DecodeProblem&);
  void (*run)(const Piece&);
  void (*merge_row)(const MergeRow&);
  std::size_t (*scratch_bytes)(const Shape&);
  std::int32_t max_row_tile;
  Speed speed;
  // A second or less of the kernel's own multiply-adds on one thread; returns operations done (2 per multiply-add).
  double (*burn)(double seconds);
  // Called by each worker before its first piece of a call (AMX sets its tile shapes) and after its last.
  void (*enter)();
  void (*leave)();
};

// Kernels of this build, best first, usable or not. Each file of kernels contributes its own.
std::span<const Kernel> bf16_kernels();  // simd_kernels.cpp: AMX and AVX-512 BF16
std::span<const Kernel> fp32_kernels();  // simd_kernels.cpp: fp32 multiply-adds, per vector target
const Kernel& scalar_kernel();           // scalar_kernel.cpp
// simd_kernels.cpp: kernels for hardware that is not there, by name only.
std::span<const Kernel> emulated_kernels();

}  // namespace latte::cpu
