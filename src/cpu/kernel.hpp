// What every kernel is made of: the piece of work it is handed, the scratch it works in, and its description.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "core/checked.hpp"
#include "cpu/cpu.hpp"
#include "cpu/features.hpp"
#include "plan/layout.hpp"

namespace latte::cpu {

// Address of KV token t of a request: page by page, or, in prefill, in one tensor, which is a single page.
class TokenReader {
 public:
  TokenReader(const CacheView& kv, std::int32_t request)
      : data_(kv.data),
        page_stride_bytes_(kv.page_stride_bytes),
        token_stride_bytes_(kv.token_stride_bytes),
        page_size_(kv.page_size),
        pages_(kv.pages + (kv.indptr ? kv.indptr[request] : request * kv.row_stride)) {}
  TokenReader(const HeadsView& tensor, std::int64_t first_token, std::int64_t head)
      : data_(tensor.data + first_token * tensor.token_stride_bytes + head * tensor.head_stride_bytes),
        page_stride_bytes_(0),
        token_stride_bytes_(tensor.token_stride_bytes),
        page_size_(std::numeric_limits<std::int32_t>::max()),
        pages_(&kPageZero) {}

  const std::byte* at(std::int32_t t) const {
    const std::int32_t page = t < page_size_ ? 0 : t / page_size_;
    return data_ + pages_[page] * page_stride_bytes_ + (t - page * page_size_) * token_stride_bytes_;
  }
  // How many tokens from t on, at most `limit`, lie one token stride apart.
  std::int32_t run(std::int32_t t, std::int32_t limit) const {
    const std::int32_t left = page_size_ - t % page_size_;
    return left < limit ? left : limit;
  }
  std::int64_t token_stride_bytes() const { return token_stride_bytes_; }

 private:
  static constexpr std::int32_t kPageZero = 0;

  const std::byte* data_;
  std::int64_t page_stride_bytes_, token_stride_bytes_;
  std::int32_t page_size_;
  const std::int32_t* pages_;
};

// Which query token and head a row of the plan is: decode counts heads within a token, prefill tokens within a head.
struct RowMap {
  std::int32_t inner;  // heads of decode, query tokens of prefill
  bool head_major;

  std::int32_t token(std::int32_t row) const { return head_major ? row % inner : row / inner; }
  std::int32_t head(std::int32_t row) const { return head_major ? row / inner : row % inner; }
};

// What keys and values look like to a kernel, and the plan's row tile: what scratch is sized for.
struct Shape {
  std::int32_t row_tile;
  std::int32_t width, v_width;  // of a key, of a value and an output row
  KvFormat format;              // of keys and values
  bool values_in_keys;          // a token's values are the first v_width of its key
};

// One record of the plan, resolved: what its rows are multiplied with and where the result goes. The same for decode
// and prefill, which differ in where values lie: V is the front of K in decode, a tensor of its own in prefill.
struct Piece {
  const WorkRecord& record;
  RowMap map;
  Shape shape;

  const QueryView& q;
  TokenReader keys, values;
  float score_scale, value_scale;

  // What the rows see: bounds[token], or, without bounds, what follows from the mask.
  const std::int32_t* bounds;
  Mask mask;
  std::int32_t kv_tokens, query_end;  // of the request

  const OutputView& out;
  // Partials are fp32, normalised, v_width values a row, and their LSE fp64; the buffers are those of the whole
  // workspace, the record says which row.
  float* partial_out = nullptr;
  double* partial_lse = nullptr;
  std::byte* scratch = nullptr;

  std::int32_t rows() const { return record.row_end - record.row_begin; }
  std::int32_t token(std::int32_t row) const { return map.token(record.row_begin + row); }
  std::int32_t head(std::int32_t row) const { return map.head(record.row_begin + row); }
  // KV tokens that a row of the piece sees, counted from the request's start.
  std::int32_t visible(std::int32_t row) const {
    if (bounds != nullptr) return bounds[token(row)];
    return mask == Mask::none ? kv_tokens : plan::causal_tokens(kv_tokens, query_end, token(row));
  }
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
  double (*lse)(const void* context, std::int32_t k);
  Values (*values)(const void* context, std::int32_t k);
  std::int32_t count;
  std::int32_t width;
  std::byte* out;
  Dtype out_dtype;
  float* lse_out;  // may be null
};

// One token of the cache to be copied to a dense row.
struct TokenCopy {
  const std::byte* token;
  KvFormat format;
  std::int32_t width;
  float scale;
  std::byte* out;
  Dtype dtype;
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

// How fast a kernel is: what the planner's cost model is made of (docs/plan.md). From `latte bench` on one thread with
// 1 to 128 heads, on a Zen 5; scalar with 1 and 16 on a Zen 4, amx on an Emerald Rapids; neon is a guess, nobody has
// measured it. Prefill's from 8, 16, 64 and 128 query tokens over 4096, in processor time of a Zen 4; its amx is
// computed from the time of a tile product.
struct Speed {
  double block_ns;       // reading and staging a block of kKvBlock tokens
  double row_block_ns;   // arithmetic of one row over one block, 512/64 in decode, 192/128 in prefill
  std::int32_t granule;  // rows are computed in groups of this many
};

inline constexpr std::int32_t kKvBlock = 64;

// How keys and values of prefill are stored, in the words of the cache.
KvFormat format_of(Dtype dtype);

struct Kernel {
  std::string_view name;
  std::string_view serves;
  bool (*usable)(const Features&, std::string& reason);
  bool (*takes)(Dtype q, KvFormat kv);
  void (*run)(const Piece&);
  void (*merge_row)(const MergeRow&);
  void (*copy_token)(const TokenCopy&);
  std::size_t (*scratch_bytes)(const Shape&);
  std::int32_t max_row_tile;
  Speed speed;
  std::int32_t prefill_row_tile;
  Speed prefill_speed;
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

// registry.cpp: what kernels() says on a machine with these features, and the best usable one of a list that takes the
// dtypes, or the one asked for.
std::vector<KernelListing> list_kernels(const Features& machine);
const Kernel* choose_kernel(std::span<const KernelListing> list, Dtype q, KvFormat kv, std::string_view override_name,
                            std::string& reason);

}  // namespace latte::cpu
