// Tensors with their own memory: inputs full of NaN until filled, outputs between guard bands, and rows of random
// values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "latte/tensor.hpp"
#include "testkit/buffer.hpp"
#include "testkit/case.hpp"
#include "testkit/rng.hpp"

namespace latte::testkit {

enum class Fill : std::uint8_t {
  fast,     // for benchmarks: valid values everywhere, no poison
  checked,  // NaN in everything that must not be read, wild page ids, guard bands around outputs
  fenced,   // as checked, and every input ends at an unreadable page
};

// [tokens, heads, width] as one of the layouts; the last dimension is dense.
struct RowLayout {
  std::int64_t tokens = 0, heads = 0, width = 0;
  std::int64_t token_stride = 0, head_stride = 0;

  // Gaps make strides multiples of `align` elements.
  static RowLayout make(Layout layout, std::int64_t tokens, std::int64_t heads, std::int64_t width,
                        std::int64_t align = 1);
  // Elements from the first to behind the last.
  std::int64_t extent() const;
  TensorView view(std::byte* data, Dtype dtype) const;
};

// Memory of `bytes` bytes, all NaN in every format: 0xff.
Buffer poisoned_buffer(std::size_t bytes, Fill fill);

// Rows of random normal values, copied from random places of a pool that was encoded once: filling runs at the speed of
// memory, and no two rows are alike. With `outlier_one_in` every so many-th value, by chance, is ten times as large.
class ValuePool {
 public:
  ValuePool(Dtype dtype, double standard_deviation, Rng& rng, std::int32_t outlier_one_in = 0);
  void copy_row(std::int64_t count, std::byte* to, Rng& rng) const;

 private:
  Dtype dtype_;
  Buffer values_;
};

// For Sink: a query of zeros but for its last value, and the last value of the key it meets.
void write_zeros_but_last(Dtype dtype, std::int64_t count, double last, std::byte* row);
double sink_value(Sink sink, std::int64_t token, std::int64_t tokens);

// An output. Its live elements are NaN until written; everything else, the gaps and the rows from `live_tokens` on
// included, holds a known pattern.
class GuardedTensor {
 public:
  GuardedTensor() = default;
  GuardedTensor(Layout layout, std::int64_t tokens, std::int64_t live_tokens, std::int64_t heads, std::int64_t width,
                Dtype dtype, std::int64_t align_bytes = 1);

  void poison();
  // Where the pattern was damaged, if it was.
  std::optional<std::string> damage() const;
  // [tokens, heads, width].
  const TensorView& view() const { return view_; }
  const std::byte* row(std::int64_t token, std::int64_t head) const;
  std::int64_t row_bytes() const;
  // All of it, guard bands included.
  const Buffer& memory() const { return memory_; }

 private:
  void fill_live(std::byte* base, std::byte value) const;

  RowLayout layout_;
  std::int64_t live_tokens_ = 0;
  Buffer memory_;
  TensorView view_;
};

// What a call writes: out [tokens, heads, width] and lse [tokens, heads], unless nobody asked for it.
struct GuardedOutputs {
  GuardedTensor out{};
  std::optional<GuardedTensor> lse{};

  TensorView lse_view() const;
  void poison();
  std::optional<std::string> damage() const;
  // Every bit of both, of tokens [begin, end).
  std::vector<std::byte> bits(std::int64_t begin, std::int64_t end) const;
  std::vector<Buffer> memory() const;
};

// What the batches of both operations have alike: outputs, and whose rows are whose.
class BatchOutputs {
 public:
  // Makes the outputs NaN again.
  void poison_outputs() { outputs_.poison(); }
  std::optional<std::string> guard_damage() const { return outputs_.damage(); }
  // Every bit of out and lse, of all requests, of one, or of one token.
  std::vector<std::byte> result_bits() const { return outputs_.bits(0, query_start_.back()); }
  std::vector<std::byte> result_bits(std::int32_t request) const {
    const auto b = static_cast<std::size_t>(request);
    return outputs_.bits(query_start_[b], query_start_[b + 1]);
  }
  std::vector<std::byte> token_bits(std::int64_t token) const { return outputs_.bits(token, token + 1); }
  const GuardedTensor& out() const { return outputs_.out; }
  const GuardedTensor& lse() const { return *outputs_.lse; }
  std::vector<Buffer> output_memory() const { return outputs_.memory(); }

 protected:
  std::vector<std::int32_t> query_start_;
  GuardedOutputs outputs_;
};

}  // namespace latte::testkit
