#include "testkit/device_prefill.hpp"

#include <algorithm>

#include "testkit/rng.hpp"
#include "testkit/tensors.hpp"

namespace latte::testkit {
namespace {

constexpr std::int64_t kPieceValues = 8 << 20;

// fill_random knows no fp8: the same random bytes over and over, in pieces that a row's length does not divide.
Status fill_fp8(const Backend& backend, std::byte* data, std::int64_t count, Rng& rng) {
  const ValuePool pool(Dtype::fp8_e4m3, 1, rng);
  const Buffer piece(static_cast<std::size_t>(std::min(count, kPieceValues - 13)));
  pool.copy_row(static_cast<std::int64_t>(piece.size()), piece.data(), rng);
  for (std::int64_t at = 0; at < count; at += static_cast<std::int64_t>(piece.size())) {
    const auto bytes = static_cast<std::size_t>(std::min(count - at, static_cast<std::int64_t>(piece.size())));
    if (Status status = copy_to_device(backend, data + at, piece.data(), bytes); !status) return status;
  }
  return {};
}

}  // namespace

Result<DevicePrefill> DevicePrefill::upload(const Backend& backend, const PrefillBatch& batch) {
  DevicePrefill device(backend);
  Status status;
  for (const Buffer& host : batch.input_memory()) device.inputs_.push_back(device.copies_.copy(host, status));
  for (const Buffer& host : batch.output_memory()) device.outputs_.push_back(device.copies_.copy(host, status));
  if (!status) return status;

  PrefillArgs& args = device.args_ = batch.args();
  const DeviceCopies& copies = device.copies_;
  for (ConstTensorView* view : {&args.q, &args.k, &args.v, &args.kv_cache}) copies.move_view(*view);
  copies.move_view(args.out);
  copies.move_view(args.lse);
  for (Fp8Scale* scale : {&args.q_scale, &args.k_scale, &args.v_scale, &args.kv_scale}) copies.move(scale->ptr);
  copies.move(args.pages.block_table);
  copies.move_span(args.pages.page_indptr);
  copies.move_span(args.pages.page_indices);
  return device;
}

Status DevicePrefill::upload_inputs(const PrefillBatch& batch) const {
  const std::vector<Buffer> host = batch.input_memory();
  for (std::size_t i = 0; i < host.size(); ++i)
    if (Status status = copy_to_device(backend_, inputs_[i], host[i].data(), host[i].size()); !status) return status;
  return {};
}

Status DevicePrefill::upload_outputs(const PrefillBatch& batch) const {
  const std::vector<Buffer> host = batch.output_memory();
  for (std::size_t i = 0; i < host.size(); ++i)
    if (Status status = copy_to_device(backend_, outputs_[i], host[i].data(), host[i].size()); !status) return status;
  return {};
}

Status DevicePrefill::download_outputs(PrefillBatch& batch) const {
  const std::vector<Buffer> host = batch.output_memory();
  for (std::size_t i = 0; i < host.size(); ++i)
    if (Status status = copy_to_host(backend_, host[i].data(), outputs_[i], host[i].size()); !status) return status;
  return {};
}

Result<DevicePrefill> DevicePrefill::random(const Backend& backend, const PrefillCase& description) {
  const PrefillCase& c = description;
  DevicePrefill device(backend);
  Rng rng(c.seed);
  Status status;
  const auto make = [&](Dtype dtype, std::int64_t tokens, std::int64_t width, bool filled) {
    const std::int64_t count = tokens * c.heads * width;
    auto* data =
        static_cast<std::byte*>(device.copies_.allocate(static_cast<std::size_t>(count) * dtype_bytes(dtype), status));
    if (status.ok() && filled)
      status =
          dtype == Dtype::fp8_e4m3
              ? fill_fp8(backend, data, count, rng)
              : fill_random(backend, {.data = data, .dtype = dtype, .count = count, .spread = 1, .seed = rng.next()});
    return dense(static_cast<void*>(data), dtype, {tokens, c.heads, width});
  };
  PrefillArgs& args = device.args_;
  args.q = make(c.dtype, c.query_tokens(), c.qk_width, true);
  args.k = make(c.dtype, c.kv_tokens(), c.qk_width, true);
  args.v = make(c.dtype, c.kv_tokens(), c.v_width, true);
  args.out = make(c.out_dtype, c.query_tokens(), c.v_width, false);
  if (c.with_lse) {
    args.lse = make(Dtype::f32, c.query_tokens(), 1, false);
    args.lse.rank = 2;
  }
  args.scale = c.softmax_scale();
  // The fills were queued in the default stream, which others do not wait for.
  if (status.ok()) status = backend.synchronize();
  if (!status) return status;
  return device;
}

}  // namespace latte::testkit
