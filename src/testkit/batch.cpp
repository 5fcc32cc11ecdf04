#include "testkit/batch.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr std::int32_t kSparePages = 3;
constexpr std::int64_t kSpareRows = 2;
constexpr std::int64_t kSpareColumns = 3;
constexpr std::int64_t kQueryPePrefix = 128;  // q_pe is cut out of rows that begin with the nope part
constexpr double kDsMlaStored = 100;          // spread of the stored bytes; the scales undo it

std::int64_t bytes_of(Dtype dtype) { return static_cast<std::int64_t>(dtype_bytes(dtype)); }

std::int32_t wild_page(Rng& rng) {
  constexpr std::int32_t kWild[] = {std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min(),
                                    -1, 1 << 30};
  return rng.pick(kWild);
}

Buffer int_buffer(std::size_t count, Fill fill) { return poisoned_buffer(count * sizeof(std::int32_t), fill); }

std::int32_t* ints(const Buffer& buffer) { return reinterpret_cast<std::int32_t*>(buffer.data()); }

// Random tokens of a cache format.
class TokenSource {
 public:
  TokenSource(const DecodeCase& c, Rng& rng)
      : case_(c),
        values_(c.kv_format == KvFormat::fp8_ds_mla ? Dtype::fp8_e4m3 : kv_element_dtype(c.kv_format), spread(c), rng),
        rope_(Dtype::bf16, 1.0, rng) {}

  void write(std::byte* token, Rng& rng) const {
    if (case_.kv_format != KvFormat::fp8_ds_mla) return values_.copy_row(case_.latent + case_.rope, token, rng);
    values_.copy_row(case_.latent, token, rng);
    const std::int64_t groups = case_.latent / 128;
    for (std::int64_t group = 0; group < groups; ++group)
      store(Dtype::f32, (0.5 + rng.uniform()) / kDsMlaStored, token + case_.latent + group * 4);
    rope_.copy_row(case_.rope, token + case_.latent + groups * 4, rng);
  }

 private:
  static double spread(const DecodeCase& c) {
    if (c.kv_format == KvFormat::fp8_ds_mla) return kDsMlaStored;
    return c.kv_format == KvFormat::fp8_e4m3 ? 1.0 / static_cast<double>(c.kv_scale) : static_cast<double>(c.kv_spread);
  }

  const DecodeCase& case_;
  ValuePool values_, rope_;
};

}  // namespace

DecodeBatch::DecodeBatch(const DecodeCase& description, Fill fill) : case_(description) {
  Rng page_rng(~case_.seed + case_.page_seed), rng(case_.seed);
  set_lengths();
  assign_pages(page_rng, fill);
  make_page_table(page_rng, fill);
  make_cache(rng, fill);
  make_query(rng, fill);
  const std::int64_t live = query_start_.back();
  outputs_.out =
      GuardedTensor(case_.out_layout, rows_, live, case_.heads, case_.latent, case_.out_dtype, case_.align_bytes);
  if (case_.with_lse) outputs_.lse = GuardedTensor(case_.lse_layout, rows_, live, case_.heads, 1, Dtype::f32);
  scales_ = Buffer(2 * sizeof(float));
  store(Dtype::f32, case_.q_scale, scales_.data());
  store(Dtype::f32, case_.kv_scale, scales_.data() + sizeof(float));
}

void DecodeBatch::set_lengths() {
  seq_lens_.clear();
  query_start_ = {0};
  for (const RequestLengths& request : case_.requests) {
    seq_lens_.push_back(request.kv_tokens);
    query_start_.push_back(query_start_.back() + request.query_tokens);
  }
  visible_ = case_.visible();
  const bool spare = case_.out_layout == Layout::gapped || case_.lse_layout == Layout::gapped;
  rows_ = query_start_.back() + (spare ? kSpareRows : 0);
}

void DecodeBatch::assign_pages(Rng& rng, Fill fill) {
  std::int64_t needed = 0;
  for (std::int64_t length : seq_lens_) needed += (length + case_.page_size - 1) / case_.page_size;
  const std::int64_t spare = fill == Fill::checked ? kSparePages : 0;
  pages_.count = static_cast<std::int32_t>(std::max<std::int64_t>(1, needed + spare));
  std::vector<std::int32_t> ids(pages_.count);
  std::iota(ids.begin(), ids.end(), 0);
  for (std::int32_t i = pages_.count - 1; i > 0; --i) std::swap(ids[i], ids[rng.between(0, i)]);
  auto next = ids.begin();
  for (std::int64_t length : seq_lens_) {
    const std::int64_t count = (length + case_.page_size - 1) / case_.page_size;
    pages_.of_request.emplace_back(next, next + count);
    next += count;
  }
}

void DecodeBatch::make_cache(Rng& rng, Fill fill) {
  const Dtype dtype = kv_element_dtype(case_.kv_format);
  const std::int64_t width = kv_token_elements(case_.kv_format, case_.latent, case_.rope);
  // The bytes of fp8_ds_mla hold floats, so its tokens keep an alignment of 16; the others need none.
  const bool ds_mla = case_.kv_format == KvFormat::fp8_ds_mla;
  const std::int64_t odd_gap = ds_mla ? 16 : case_.align_bytes > 1 ? case_.align_bytes / bytes_of(dtype) : 3;
  const std::int64_t gap = case_.cache_layout == Layout::gapped ? odd_gap : 0;
  const std::int64_t token_stride = width + gap;
  const std::int64_t page_stride = case_.page_size * token_stride + 2 * gap;
  const std::int64_t extent = (pages_.count - 1) * page_stride + (case_.page_size - 1) * token_stride + width;
  cache_ = poisoned_buffer(static_cast<std::size_t>(extent * bytes_of(dtype)), fill);
  cache_view_ = dense(static_cast<void*>(cache_.data()), dtype, {pages_.count, case_.page_size, width});
  cache_view_.stride = {page_stride, token_stride, 1};

  const TokenSource source(case_, rng);
  const auto token_at = [&](std::int64_t page, std::int64_t slot) {
    return cache_.data() + (page * page_stride + slot * token_stride) * bytes_of(dtype);
  };
  if (fill == Fill::fast) {
    // Gibibytes of fresh memory: what takes the time is the kernel handing out pages, which threads share well.
    const std::int64_t threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, 8);
    std::vector<std::thread> fillers;
    for (std::int64_t i = 0; i < threads; ++i)
      fillers.emplace_back([&, i, part_rng = Rng(rng.next())]() mutable {
        for (std::int64_t page = pages_.count * i / threads; page < pages_.count * (i + 1) / threads; ++page)
          for (std::int64_t slot = 0; slot < case_.page_size; ++slot) source.write(token_at(page, slot), part_rng);
      });
    for (std::thread& filler : fillers) filler.join();
    return;
  }
  for (std::size_t b = 0; b < seq_lens_.size(); ++b)
    for (std::int64_t t = 0; t < seq_lens_[b]; ++t) {
      std::byte* token = token_at(pages_.of_request[b][t / case_.page_size], t % case_.page_size);
      source.write(token, rng);
      if (case_.sink == Sink::none) continue;
      const Dtype rope = ds_mla ? Dtype::bf16 : dtype;
      store(rope, sink_value(case_.sink, t, seq_lens_[b]), token + width * bytes_of(dtype) - bytes_of(rope));
    }
}

void DecodeBatch::make_page_table(Rng& rng, Fill fill) {
  std::vector<std::int32_t> flat, indptr{0};
  table_columns_ = 1;
  for (const auto& pages : pages_.of_request)
    table_columns_ = std::max(table_columns_, static_cast<std::int64_t>(pages.size()));
  const bool wild = fill == Fill::checked;
  if (wild) table_columns_ += kSpareColumns;
  table_stride_ = table_columns_ + (wild ? kSpareColumns : 0);
  for (const auto& pages : pages_.of_request) {
    flat.insert(flat.end(), pages.begin(), pages.end());
    std::int64_t padding = wild ? rng.between(0, 2) : 0;
    if (case_.page_form == PageForm::block_table) padding = table_stride_ - static_cast<std::int64_t>(pages.size());
    for (std::int64_t i = 0; i < padding; ++i) flat.push_back(wild_page(rng));
    indptr.push_back(static_cast<std::int32_t>(flat.size()));
  }
  table_ = int_buffer(flat.size(), fill);
  std::copy(flat.begin(), flat.end(), ints(table_));
  indptr_ = int_buffer(indptr.size(), fill);
  std::copy(indptr.begin(), indptr.end(), ints(indptr_));
}

void DecodeBatch::make_query(Rng& rng, Fill fill) {
  const double spread = 1.0 / static_cast<double>(case_.q_dtype == Dtype::fp8_e4m3 ? case_.q_scale : case_.kv_spread);
  const ValuePool pool(case_.q_dtype, spread, rng);
  const std::int64_t item = bytes_of(case_.q_dtype);
  const auto make = [&](const RowLayout& rows, std::int64_t offset, Buffer& memory, TensorView& view, bool rope) {
    memory = poisoned_buffer(static_cast<std::size_t>((rows.extent() + offset) * item), fill);
    view = rows.view(memory.data() + offset * item, case_.q_dtype);
    for (std::int64_t token = 0; token < query_start_.back(); ++token)
      for (std::int64_t head = 0; head < rows.heads; ++head) {
        std::byte* row = view.bytes() + (token * rows.token_stride + head * rows.head_stride) * item;
        pool.copy_row(rows.width, row, rng);
        if (case_.sink != Sink::none) write_zeros_but_last(case_.q_dtype, rows.width, rope ? 1 : 0, row);
      }
  };
  if (case_.query_form == QueryForm::joined) {
    const Layout layout = case_.out_layout == Layout::gapped ? Layout::gapped : Layout::dense;
    const std::int64_t align = std::max<std::int64_t>(1, case_.align_bytes / item);
    make(RowLayout::make(layout, rows_, case_.heads, case_.latent + case_.rope, align), 0, q_, q_view_, true);
    return;
  }
  make(RowLayout::make(Layout::transposed, rows_, case_.heads, case_.latent), 0, q_nope_, q_nope_view_, false);
  RowLayout pe = RowLayout::make(Layout::dense, rows_, case_.heads, kQueryPePrefix + case_.rope);
  pe.width = case_.rope;
  make(pe, rows_ > 0 ? kQueryPePrefix : 0, q_pe_, q_pe_view_, true);
}

std::byte* DecodeBatch::query_row(std::int64_t token, std::int64_t head) const {
  return q_view_.bytes() + (token * q_view_.stride[0] + head * q_view_.stride[1]) * bytes_of(case_.q_dtype);
}

DecodeBatch DecodeBatch::reordered(std::span<const std::int32_t> order) const {
  DecodeCase c = case_;
  c.requests.clear();
  for (std::int32_t b : order)
    c.requests.push_back(b == kPadding ? RequestLengths{.query_tokens = 1, .kv_tokens = 0} : case_.requests[b]);

  DecodeBatch batch(c);
  batch.cache_ = cache_;
  batch.cache_view_ = cache_view_;
  batch.pages_ = {.of_request = {}, .count = pages_.count};
  for (std::int32_t b : order)
    batch.pages_.of_request.push_back(b == kPadding ? std::vector<std::int32_t>() : pages_.of_request[b]);
  Rng rng(c.seed);
  batch.make_page_table(rng, Fill::checked);
  const auto row_bytes = static_cast<std::size_t>((case_.latent + case_.rope) * bytes_of(case_.q_dtype));
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] == kPadding) continue;
    for (std::int32_t j = 0; j < c.requests[i].query_tokens; ++j)
      for (std::int32_t head = 0; head < c.heads; ++head)
        std::memcpy(batch.query_row(batch.query_start_[i] + j, head), query_row(query_start_[order[i]] + j, head),
                    row_bytes);
  }
  return batch;
}

DecodeArgs DecodeBatch::args() const {
  DecodeArgs args;
  if (case_.query_form == QueryForm::joined) {
    args.q = q_view_;
  } else {
    args.q_nope = q_nope_view_;
    args.q_pe = q_pe_view_;
  }
  args.kv_cache = cache_view_;
  if (case_.page_form == PageForm::block_table) {
    args.pages.block_table = ints(table_);
    args.pages.block_table_stride = table_stride_;
    args.pages.max_pages = table_columns_;
  } else {
    args.pages.page_indptr = {ints(indptr_), seq_lens_.size() + 1};
    args.pages.page_indices = {ints(table_), table_.size() / sizeof(std::int32_t)};
  }
  args.out = outputs_.out.view();
  args.lse = outputs_.lse_view();
  args.scale = case_.softmax_scale();
  const bool fp8_q = case_.q_dtype == Dtype::fp8_e4m3, fp8_cache = case_.kv_format == KvFormat::fp8_e4m3;
  // A value that stands beside its address must not be looked at.
  const float unread = std::numeric_limits<float>::quiet_NaN();
  const auto scale = [&](float value, const float* at) {
    return case_.scale_pointers ? Fp8Scale{.value = unread, .ptr = at} : Fp8Scale{.value = value};
  };
  const auto* scales = reinterpret_cast<const float*>(scales_.data());
  if (fp8_q) args.q_scale = scale(case_.q_scale, scales);
  if (fp8_cache) args.kv_scale = scale(case_.kv_scale, scales + 1);
  return args;
}

StepLengths DecodeBatch::lengths() const {
  return {.seq_lens = seq_lens_, .query_start = query_start_, .visible = visible_};
}

}  // namespace latte::testkit
