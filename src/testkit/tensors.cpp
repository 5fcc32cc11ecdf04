#include "testkit/tensors.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr std::int64_t kGuardBytes = 256;
constexpr std::int64_t kPoolValues = 1 << 16;
constexpr double kOutlier = 10;
constexpr std::byte kPoison{0xff};

std::int64_t bytes_of(Dtype dtype) { return static_cast<std::int64_t>(dtype_bytes(dtype)); }

std::byte guard_pattern(std::size_t offset) { return static_cast<std::byte>(0x5a ^ (offset * 37 & 0xff)); }

}  // namespace

RowLayout RowLayout::make(Layout layout, std::int64_t tokens, std::int64_t heads, std::int64_t width,
                          std::int64_t align) {
  const auto aligned = [&](std::int64_t stride) { return (stride + align - 1) / align * align; };
  RowLayout rows{.tokens = tokens, .heads = heads, .width = width};
  switch (layout) {
    case Layout::dense:
      rows.head_stride = width;
      rows.token_stride = heads * width;
      break;
    case Layout::gapped:
      rows.head_stride = aligned(width + 3);
      rows.token_stride = aligned(heads * rows.head_stride + 5);
      break;
    case Layout::transposed:
      rows.token_stride = width;
      rows.head_stride = tokens * width;
      break;
  }
  return rows;
}

std::int64_t RowLayout::extent() const {
  if (tokens == 0 || heads == 0) return 0;
  return (tokens - 1) * token_stride + (heads - 1) * head_stride + width;
}

TensorView RowLayout::view(std::byte* data, Dtype dtype) const {
  TensorView view = dense(static_cast<void*>(data), dtype, {tokens, heads, width});
  view.stride = {token_stride, head_stride, 1};
  return view;
}

Buffer poisoned_buffer(std::size_t bytes, Fill fill) {
  Buffer buffer = fill == Fill::fenced ? Buffer::fenced(bytes) : Buffer(bytes);
  if (fill != Fill::fast) std::memset(buffer.data(), static_cast<int>(kPoison), bytes);
  return buffer;
}

ValuePool::ValuePool(Dtype dtype, double standard_deviation, Rng& rng, std::int32_t outlier_one_in)
    : dtype_(dtype), values_(static_cast<std::size_t>(kPoolValues * bytes_of(dtype))) {
  for (std::int64_t i = 0; i < kPoolValues; ++i) {
    const double factor = outlier_one_in > 0 && rng.chance(outlier_one_in) ? kOutlier : 1;
    store(dtype, factor * rng.normal() * standard_deviation, values_.data() + i * bytes_of(dtype));
  }
}

void ValuePool::copy_row(std::int64_t count, std::byte* to, Rng& rng) const {
  while (count > 0) {
    const std::int64_t piece = std::min<std::int64_t>(count, kPoolValues / 16);
    const std::int64_t first = rng.between(0, static_cast<std::int32_t>(kPoolValues - piece));
    std::memcpy(to, values_.data() + first * bytes_of(dtype_), static_cast<std::size_t>(piece * bytes_of(dtype_)));
    to += piece * bytes_of(dtype_);
    count -= piece;
  }
}

void write_zeros_but_last(Dtype dtype, std::int64_t count, double last, std::byte* row) {
  const std::size_t item = dtype_bytes(dtype), bytes = static_cast<std::size_t>(count) * item;
  std::memset(row, 0, bytes);
  store(dtype, last, row + bytes - item);
}

double sink_value(Sink sink, std::int64_t token, std::int64_t tokens) {
  return token == (sink == Sink::first ? 0 : tokens - 1) ? 8 : 0;
}

GuardedTensor::GuardedTensor(Layout layout, std::int64_t tokens, std::int64_t live_tokens, std::int64_t heads,
                             std::int64_t width, Dtype dtype, std::int64_t align_bytes)
    : layout_(RowLayout::make(layout, tokens, heads, width, std::max<std::int64_t>(1, align_bytes / bytes_of(dtype)))),
      live_tokens_(live_tokens),
      memory_(static_cast<std::size_t>(layout_.extent() * bytes_of(dtype) + 2 * kGuardBytes)) {
  view_ = layout_.view(memory_.data() + kGuardBytes, dtype);
  poison();
}

const std::byte* GuardedTensor::row(std::int64_t token, std::int64_t head) const {
  return view_.bytes() + (token * layout_.token_stride + head * layout_.head_stride) * bytes_of(view_.dtype);
}

std::int64_t GuardedTensor::row_bytes() const { return layout_.width * bytes_of(view_.dtype); }

void GuardedTensor::fill_live(std::byte* base, std::byte value) const {
  for (std::int64_t token = 0; token < live_tokens_; ++token)
    for (std::int64_t head = 0; head < layout_.heads; ++head)
      std::memset(base + (row(token, head) - memory_.data()), static_cast<int>(value),
                  static_cast<std::size_t>(row_bytes()));
}

void GuardedTensor::poison() {
  for (std::size_t i = 0; i < memory_.size(); ++i) memory_.data()[i] = guard_pattern(i);
  fill_live(memory_.data(), kPoison);
}

std::optional<std::string> GuardedTensor::damage() const {
  std::vector<std::byte> seen(memory_.data(), memory_.data() + memory_.size()), expected(memory_.size());
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = guard_pattern(i);
  fill_live(seen.data(), kPoison);
  fill_live(expected.data(), kPoison);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (seen[i] != expected[i])
      return "byte " + std::to_string(static_cast<std::int64_t>(i) - kGuardBytes) +
             " from the tensor's start (extent " + std::to_string(layout_.extent() * bytes_of(view_.dtype)) +
             " bytes) was overwritten";
  return std::nullopt;
}

TensorView GuardedOutputs::lse_view() const {
  if (!lse) return {};
  TensorView view = lse->view();
  view.rank = 2;
  return view;
}

void GuardedOutputs::poison() {
  out.poison();
  if (lse) lse->poison();
}

std::optional<std::string> GuardedOutputs::damage() const {
  if (auto damaged = out.damage()) return "out: " + *damaged;
  if (lse)
    if (auto damaged = lse->damage()) return "lse: " + *damaged;
  return std::nullopt;
}

std::vector<std::byte> GuardedOutputs::bits(std::int64_t begin, std::int64_t end) const {
  std::vector<std::byte> bits;
  const auto append = [&](const GuardedTensor& tensor, std::int64_t token) {
    for (std::int64_t head = 0; head < tensor.view().shape[1]; ++head) {
      const std::byte* row = tensor.row(token, head);
      bits.insert(bits.end(), row, row + tensor.row_bytes());
    }
  };
  for (std::int64_t token = begin; token < end; ++token) {
    append(out, token);
    if (lse) append(*lse, token);
  }
  return bits;
}

std::vector<Buffer> GuardedOutputs::memory() const {
  std::vector<Buffer> memory = {out.memory()};
  if (lse) memory.push_back(lse->memory());
  return memory;
}

}  // namespace latte::testkit
