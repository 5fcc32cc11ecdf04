#include "testkit/device_batch.hpp"

#include <algorithm>
#include <numeric>

#include "testkit/rng.hpp"

namespace latte::testkit {

Status DeviceBatch::copy_lengths(const StepLengths& lengths) {
  Status status;
  const auto take = [&](std::span<const std::int32_t> values) {
    return static_cast<const std::int32_t*>(copies_.copy(values.data(), values.size_bytes(), status));
  };
  lengths_ = {.requests = static_cast<std::int32_t>(lengths.seq_lens.size()),
              .seq_lens = take(lengths.seq_lens),
              .query_start = take(lengths.query_start),
              .visible = lengths.visible.empty() ? nullptr : take(lengths.visible),
              .query_tokens = lengths.query_start.back()};
  return status;
}

Status DeviceBatch::set_lengths(const StepLengths& lengths) const {
  const auto put = [&](const std::int32_t* to, std::span<const std::int32_t> values) {
    return copy_to_device(backend_, const_cast<std::int32_t*>(to), values.data(), values.size_bytes());
  };
  if (Status status = put(lengths_.seq_lens, lengths.seq_lens); !status) return status;
  if (Status status = put(lengths_.query_start, lengths.query_start); !status) return status;
  return lengths.visible.empty() ? Status() : put(lengths_.visible, lengths.visible);
}

Result<DeviceBatch> DeviceBatch::upload(const Backend& backend, const DecodeBatch& batch) {
  DeviceBatch device(backend);
  Status status;
  for (const Buffer& host : batch.input_memory()) device.copies_.copy(host, status);
  for (const Buffer& host : batch.output_memory()) device.outputs_.push_back(device.copies_.copy(host, status));
  if (status.ok()) status = device.copy_lengths(batch.lengths());
  if (!status) return status;

  DecodeArgs& args = device.args_ = batch.args();
  const DeviceCopies& copies = device.copies_;
  for (ConstTensorView* view : {&args.q, &args.q_nope, &args.q_pe, &args.kv_cache}) copies.move_view(*view);
  copies.move_view(args.out);
  copies.move_view(args.lse);
  copies.move(args.pages.block_table);
  copies.move_span(args.pages.page_indptr);
  copies.move_span(args.pages.page_indices);
  copies.move(args.q_scale.ptr);
  copies.move(args.kv_scale.ptr);
  return device;
}

Status DeviceBatch::upload_outputs(const DecodeBatch& batch) const {
  const std::vector<Buffer> host = batch.output_memory();
  for (std::size_t i = 0; i < host.size(); ++i)
    if (Status status = copy_to_device(backend_, outputs_[i], host[i].data(), host[i].size()); !status) return status;
  return {};
}

Status DeviceBatch::download_outputs(DecodeBatch& batch) const {
  const std::vector<Buffer> host = batch.output_memory();
  for (std::size_t i = 0; i < host.size(); ++i)
    if (Status status = copy_to_host(backend_, host[i].data(), outputs_[i], host[i].size()); !status) return status;
  return {};
}

Result<DeviceBatch> DeviceBatch::random(const Backend& backend, const DecodeCase& description) {
  const DecodeCase& c = description;
  Rng rng(c.seed);
  std::vector<std::int32_t> seq_lens, query_start{0};
  std::int64_t pages = 0, columns = 1;
  for (const RequestLengths& request : c.requests) {
    seq_lens.push_back(request.kv_tokens);
    query_start.push_back(query_start.back() + request.query_tokens);
    const std::int64_t needed = (std::int64_t{request.kv_tokens} + c.page_size - 1) / c.page_size;
    pages += needed;
    columns = std::max(columns, needed);
  }
  pages = std::max<std::int64_t>(1, pages);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(pages));
  std::iota(ids.begin(), ids.end(), 0);
  for (auto i = static_cast<std::int32_t>(pages) - 1; i > 0; --i) std::swap(ids[i], ids[rng.between(0, i)]);
  std::vector<std::int32_t> table(c.requests.size() * static_cast<std::size_t>(columns), 0);
  auto next = ids.begin();
  for (std::size_t b = 0; b < seq_lens.size(); ++b) {
    const std::int64_t needed = (std::int64_t{seq_lens[b]} + c.page_size - 1) / c.page_size;
    std::copy(next, next + needed, table.begin() + static_cast<std::int64_t>(b) * columns);
    next += needed;
  }

  DeviceBatch device(backend);
  Status status;
  const std::int64_t tokens = query_start.back(), width = c.latent + c.rope;
  const auto make = [&](Dtype dtype, std::int64_t count, bool filled) {
    void* data = device.copies_.allocate(static_cast<std::size_t>(count) * dtype_bytes(dtype), status);
    if (status.ok() && filled)
      status = fill_random(backend, {.data = data, .dtype = dtype, .count = count, .spread = 1, .seed = rng.next()});
    return data;
  };
  const Dtype cache_dtype = kv_element_dtype(c.kv_format);
  DecodeArgs& args = device.args_;
  args.kv_cache = dense(make(cache_dtype, pages * c.page_size * width, true), cache_dtype, {pages, c.page_size, width});
  args.q = dense(make(c.q_dtype, tokens * c.heads * width, true), c.q_dtype, {tokens, c.heads, width});
  args.out = dense(make(c.out_dtype, tokens * c.heads * c.latent, false), c.out_dtype, {tokens, c.heads, c.latent});
  if (c.with_lse) args.lse = dense(make(Dtype::f32, tokens * c.heads, false), Dtype::f32, {tokens, c.heads});
  args.pages = {.block_table = static_cast<const std::int32_t*>(
                    device.copies_.copy(table.data(), table.size() * sizeof(std::int32_t), status)),
                .block_table_stride = columns,
                .max_pages = columns};
  args.scale = c.softmax_scale();
  if (status.ok()) status = device.copy_lengths({.seq_lens = seq_lens, .query_start = query_start, .visible = {}});
  // The fills were queued in the default stream, which others do not wait for.
  if (status.ok()) status = backend.synchronize();
  if (!status) return status;
  return device;
}

}  // namespace latte::testkit
