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

// Fetches tokens' keys or values into L2, a few lines at every turn of an inner loop.
class Prefetch {
 public:
  Prefetch(const TokenReader& reader, std::int32_t token_bytes) : reader_(&reader), token_bytes_(token_bytes) {}

  void aim(std::int32_t first, std::int32_t end) { next_ = first, end_ = end, offset_ = token_bytes_; }
  // Leaves out tokens that would come too late.
  void skip_to(std::int32_t first) {
    if (next_ < first) aim(first, end_);
  }
  // Lines to fetch at each of `turns` turns to have fetched `tokens` tokens.
  std::int32_t share(std::int64_t tokens, std::int64_t turns) const {
    return static_cast<std::int32_t>(ceil_div(tokens * ceil_div(token_bytes_, 64), turns));
  }
  [[gnu::always_inline]] void lines(std::int32_t count) {
    for (; count > 0; --count) {
      if (offset_ >= token_bytes_) {
        if (next_ >= end_) return;
        token_ = reader_->at(next_++);
        offset_ = 0;
      }
      __builtin_prefetch(token_ + offset_, 0, 2);
      offset_ += 64;
    }
  }

 private:
  const TokenReader* reader_;
  std::int32_t token_bytes_;
  std::int32_t next_ = 0, end_ = 0, offset_ = 0;
  const std::byte* token_ = nullptr;
};

}  // namespace latte::cpu
