#include "testkit/prefill_batch.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "testkit/codec.hpp"
#include "testkit/oracle.hpp"

namespace latte::testkit {
namespace {

constexpr std::int64_t kSpareTokens = 2;
constexpr std::int32_t kOutlierOneIn = 1000;

std::int64_t bytes_of(Dtype dtype) { return static_cast<std::int64_t>(dtype_bytes(dtype)); }

Buffer float_buffer(const std::vector<float>& values, Fill fill) {
  Buffer buffer = poisoned_buffer(values.size() * sizeof(float), fill);
  std::memcpy(buffer.data(), values.data(), buffer.size());
  return buffer;
}

}  // namespace

PrefillBatch::PrefillBatch(const PrefillCase& description, Fill fill) : case_(description) {
  set_lengths();
  q_ = make_input(case_.q_layout, rows_, case_.qk_width, fill);
  k_ = make_input(case_.k_layout, kv_rows_, case_.qk_width, fill);
  v_ = make_input(case_.v_layout, kv_rows_, case_.v_width, fill);
  Rng rng(case_.seed);
  const auto pool = [&](float scale) {
    const double spread = case_.dtype == Dtype::fp8_e4m3 ? 1.0 / static_cast<double>(scale) : 1.0;
    return ValuePool(case_.dtype, spread, rng, case_.outliers ? kOutlierOneIn : 0);
  };
  const ValuePool q_pool = pool(case_.q_scale), k_pool = pool(case_.k_scale), v_pool = pool(case_.v_scale);
  for (std::size_t b = 0; b < case_.requests.size(); ++b) {
    fill_input(q_, query_start_[b], query_start_[b + 1], q_pool, rng);
    if (case_.requests[b].query_tokens == 0 && fill != Fill::fast) continue;
    fill_input(k_, kv_start_[b], kv_start_[b + 1], k_pool, rng);
    fill_input(v_, kv_start_[b], kv_start_[b + 1], v_pool, rng);
  }
  if (case_.opposed) oppose();
  if (case_.sink != Sink::none) score_alike();
  const auto scales = [&](float scale, std::uint64_t salt) {
    const bool per_head = case_.scale_form == ScaleForm::per_head;
    return float_buffer(per_head ? case_.head_scales(scale, salt) : std::vector<float>{scale}, fill);
  };
  q_scales_ = scales(case_.q_scale, 1);
  k_scales_ = scales(case_.k_scale, 2);
  v_scales_ = scales(case_.v_scale, 3);
  if (case_.context_tokens() > 0) make_context(fill);
  const std::int64_t live = query_start_.back();
  outputs_.out =
      GuardedTensor(case_.out_layout, rows_, live, case_.heads, case_.v_width, case_.out_dtype, case_.align_bytes);
  if (case_.with_lse) outputs_.lse = GuardedTensor(case_.lse_layout, rows_, live, case_.heads, 1, Dtype::f32);
}

void PrefillBatch::set_lengths() {
  query_start_ = kv_start_ = {0};
  for (const PrefillRequest& request : case_.requests) {
    query_start_.push_back(query_start_.back() + request.query_tokens);
    kv_start_.push_back(kv_start_.back() + request.kv_tokens);
    context_lens_.push_back(request.context_tokens);
  }
  const auto gapped = [](std::initializer_list<Layout> layouts) {
    return std::find(layouts.begin(), layouts.end(), Layout::gapped) != layouts.end();
  };
  rows_ = query_start_.back() + (gapped({case_.q_layout, case_.out_layout, case_.lse_layout}) ? kSpareTokens : 0);
  kv_rows_ = kv_start_.back() + (gapped({case_.k_layout, case_.v_layout}) ? kSpareTokens : 0);
}

PrefillBatch::Input PrefillBatch::make_input(Layout layout, std::int64_t tokens, std::int64_t width, Fill fill) const {
  const std::int64_t item = bytes_of(case_.dtype), align = std::max<std::int64_t>(1, case_.align_bytes / item);
  const RowLayout rows = RowLayout::make(layout, tokens, case_.heads, width, align);
  Input input;
  input.memory = poisoned_buffer(static_cast<std::size_t>(rows.extent() * item), fill);
  input.view = rows.view(input.memory.data(), case_.dtype);
  return input;
}

std::byte* PrefillBatch::Input::row(std::int64_t token, std::int64_t head) const {
  return view.bytes() + (token * view.stride[0] + head * view.stride[1]) * bytes_of(view.dtype);
}

void PrefillBatch::fill_input(const Input& input, std::int64_t first, std::int64_t end, const ValuePool& pool,
                              Rng& rng) const {
  for (std::int64_t token = first; token < end; ++token)
    for (std::int64_t head = 0; head < case_.heads; ++head)
      pool.copy_row(input.view.shape[2], input.row(token, head), rng);
}

void PrefillBatch::oppose() const {
  const auto set_signs = [&](const Input& input, std::int64_t token, bool negative) {
    const std::int64_t item = bytes_of(case_.dtype);
    for (std::int64_t head = 0; head < case_.heads; ++head)
      for (std::int64_t i = 0; i < input.view.shape[2]; ++i) {
        std::byte& with_sign = input.row(token, head)[(i + 1) * item - 1];
        with_sign = negative ? with_sign | std::byte{0x80} : with_sign & std::byte{0x7f};
      }
  };
  for (std::size_t b = 0; b < case_.requests.size(); ++b) {
    for (std::int64_t token = query_start_[b]; token < query_start_[b + 1]; token += 2) set_signs(q_, token, true);
    const std::int64_t first = b % 2 == 0 ? kv_start_[b] : (kv_start_[b] + kv_start_[b + 1]) / 2;
    for (std::int64_t token = first; token < kv_start_[b + 1]; ++token) set_signs(k_, token, false);
  }
}

void PrefillBatch::score_alike() const {
  const std::int64_t last = (std::int64_t{case_.qk_width} - 1) * bytes_of(case_.dtype);
  for (std::size_t b = 0; b < case_.requests.size(); ++b)
    for (std::int64_t head = 0; head < case_.heads; ++head) {
      for (std::int64_t token = query_start_[b]; token < query_start_[b + 1]; ++token)
        write_zeros_but_last(case_.dtype, case_.qk_width, 1, q_.row(token, head));
      const std::int64_t first = kv_start_[b], tokens = kv_start_[b + 1] - first;
      for (std::int64_t t = 0; t < tokens; ++t)
        store(case_.dtype, sink_value(case_.sink, t, tokens), k_.row(first + t, head) + last);
    }
}

void PrefillBatch::make_context(Fill fill) {
  DecodeCase c{.heads = 1,
               .latent = case_.latent,
               .rope = case_.rope,
               .page_size = case_.page_size,
               .kv_format = case_.kv_format,
               .page_form = case_.page_form,
               .scale_pointers = case_.seed % 2 == 1,
               .kv_scale = case_.kv_scale,
               .seed = case_.seed};
  for (const std::int32_t tokens : context_lens_) c.requests.push_back({.query_tokens = 0, .kv_tokens = tokens});
  context_.emplace(c, fill);
}

std::vector<double> PrefillBatch::context_token(std::int32_t request, std::int32_t token) const {
  const DecodeArgs args = context_->args();
  const std::int32_t index = token / case_.page_size;
  const std::int64_t page =
      args.pages.block_table != nullptr
          ? args.pages.block_table[request * args.pages.block_table_stride + index]
          : args.pages.page_indices[static_cast<std::size_t>(args.pages.page_indptr[request] + index)];
  const std::int64_t offset = page * args.kv_cache.stride[0] + token % case_.page_size * args.kv_cache.stride[1];
  std::vector<double> values(static_cast<std::size_t>(case_.latent + case_.rope));
  load_kv_token(context_->description().problem(), args.kv_cache.bytes() + offset * bytes_of(args.kv_cache.dtype),
                scale_of(args.kv_scale), values.data());
  return values;
}

void PrefillBatch::copy_request(const PrefillBatch& from, std::int32_t source, std::int32_t target) {
  const auto copy = [&](const Input& in, const Input& out, std::int64_t first_in, std::int64_t first_out,
                        std::int64_t tokens) {
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t head = 0; head < case_.heads; ++head)
        std::memcpy(out.row(first_out + t, head), in.row(first_in + t, head),
                    static_cast<std::size_t>(in.view.shape[2] * bytes_of(case_.dtype)));
  };
  const PrefillRequest& request = case_.requests[static_cast<std::size_t>(target)];
  copy(from.q_, q_, from.query_start_[source], query_start_[target], request.query_tokens);
  copy(from.k_, k_, from.kv_start_[source], kv_start_[target], request.kv_tokens);
  copy(from.v_, v_, from.kv_start_[source], kv_start_[target], request.kv_tokens);
}

PrefillBatch PrefillBatch::reordered(std::span<const std::int32_t> order) const {
  PrefillCase c = case_;
  c.requests.clear();
  for (std::int32_t b : order)
    c.requests.push_back(b == kPadding ? PrefillRequest{.query_tokens = 1} : case_.requests[b]);
  PrefillBatch batch(c);
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] != kPadding) batch.copy_request(*this, order[i], static_cast<std::int32_t>(i));
  return batch;
}

PrefillBatch PrefillBatch::relaid(const PrefillCase& description) const {
  PrefillBatch batch(description);
  for (std::size_t b = 0; b < case_.requests.size(); ++b)
    batch.copy_request(*this, static_cast<std::int32_t>(b), static_cast<std::int32_t>(b));
  return batch;
}

void PrefillBatch::copy_joined(const PrefillBatch& from, const ExpandedContext& context) {
  const std::int64_t item = bytes_of(case_.dtype);
  const auto copy_rows = [&](const Input& in, const Input& out, std::int64_t token_in, std::int64_t token_out) {
    for (std::int64_t head = 0; head < case_.heads; ++head)
      std::memcpy(out.row(token_out, head), in.row(token_in, head), static_cast<std::size_t>(in.view.shape[2] * item));
  };
  for (std::int64_t token = 0; token < query_start_.back(); ++token) copy_rows(from.q_, q_, token, token);
  for (std::size_t b = 0; b < case_.requests.size(); ++b) {
    const std::int64_t older = context.requests[b].tokens, first = kv_start_[b];
    const auto put_context = [&](const Input& out, const std::vector<double>& values) {
      std::size_t i = 0;
      for (std::int64_t t = 0; t < older; ++t)
        for (std::int64_t head = 0; head < case_.heads; ++head)
          for (std::int64_t d = 0; d < out.view.shape[2]; ++d)
            store(case_.dtype, values[i++], out.row(first + t, head) + d * item);
    };
    put_context(k_, context.requests[b].k);
    put_context(v_, context.requests[b].v);
    for (std::int64_t t = from.kv_start_[b]; t < from.kv_start_[b + 1]; ++t) {
      copy_rows(from.k_, k_, t, first + older + t - from.kv_start_[b]);
      copy_rows(from.v_, v_, t, first + older + t - from.kv_start_[b]);
    }
  }
}

Fp8Scale PrefillBatch::scale_arg(const Buffer& scales, float value) const {
  if (!case_.has_scales()) return {};
  if (case_.scale_form == ScaleForm::value) return {.value = value};
  // A value that stands beside its address must not be looked at.
  return {.value = std::numeric_limits<float>::quiet_NaN(),
          .ptr = reinterpret_cast<const float*>(scales.data()),
          .per_head = case_.scale_form == ScaleForm::per_head};
}

PrefillArgs PrefillBatch::args() const {
  PrefillArgs args;
  args.q = q_.view;
  args.k = k_.view;
  args.v = v_.view;
  args.out = outputs_.out.view();
  args.lse = outputs_.lse_view();
  args.scale = case_.softmax_scale();
  args.q_scale = scale_arg(q_scales_, case_.q_scale);
  args.k_scale = scale_arg(k_scales_, case_.k_scale);
  args.v_scale = scale_arg(v_scales_, case_.v_scale);
  if (context_) {
    const DecodeArgs paged = context_->args();
    args.kv_cache = paged.kv_cache;
    args.pages = paged.pages;
    args.kv_scale = paged.kv_scale;
  }
  return args;
}

PrefillLengths PrefillBatch::lengths() const {
  PrefillLengths lengths{.query_start = query_start_, .kv_start = kv_start_};
  if (context_) lengths.context_lens = context_lens_;
  return lengths;
}

std::vector<Buffer> PrefillBatch::input_memory() const {
  std::vector<Buffer> memory = {q_.memory, k_.memory, v_.memory, q_scales_, k_scales_, v_scales_};
  if (context_)
    for (const Buffer& buffer : context_->input_memory()) memory.push_back(buffer);
  return memory;
}

}  // namespace latte::testkit
