// Fetching tokens ahead of their use. Pages defeat the hardware's own prefetching whenever they are not neighbours.
#pragma once

#include "core/codec.hpp"
#include "cpu/kernel.hpp"

namespace latte::cpu {

// Bytes of `width` values of a token.
inline std::int32_t row_bytes(KvFormat format, std::int32_t width) {
  if (format == KvFormat::fp8_ds_mla) return kDsMlaBytes;
  return width * static_cast<std::int32_t>(dtype_bytes(kv_element_dtype(format)));
}

// Fetches tokens' keys or values, a few lines at every turn of an inner loop.
class Prefetch {
 public:
  Prefetch(const TokenReader& reader, std::int32_t token_bytes)
      : reader_(&reader), token_lines_(static_cast<std::int32_t>(ceil_div(token_bytes, 64))) {}

  void aim(std::int32_t first, std::int32_t end) { next_ = first, end_ = end, left_ = 0; }
  // Leaves out tokens that would come too late.
  void skip_to(std::int32_t first) {
    if (next_ < first) aim(first, end_);
  }
  // Lines to fetch at each of `turns` turns to have fetched `tokens` tokens.
  std::int32_t share(std::int64_t tokens, std::int64_t turns) const {
    return static_cast<std::int32_t>(ceil_div(tokens * token_lines_, turns));
  }
  // Fetches some lines into L2. The way there from memory is wider than the one into L1, whose few misses at a time
  // would also have to serve what the kernel reads from L2 meanwhile.
  [[gnu::always_inline]] void lines(std::int32_t count) {
    while (count > 0) {
      if (left_ == 0) {
        if (next_ >= end_) return;
        line_ = reader_->at(next_++);
        left_ = token_lines_;
      }
      const std::int32_t now = count < left_ ? count : left_;
      count -= now, left_ -= now;
      for (const std::byte* end = line_ + now * std::int64_t{64}; line_ != end; line_ += 64)
        __builtin_prefetch(line_, 0, 2);
    }
  }

 private:
  const TokenReader* reader_;
  std::int32_t token_lines_;
  std::int32_t next_ = 0, end_ = 0, left_ = 0;  // tokens; lines of the last one
  const std::byte* line_ = nullptr;
};

}  // namespace latte::cpu
