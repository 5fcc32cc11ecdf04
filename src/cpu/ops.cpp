// merge, write_kv and gather_kv on the resident workers: rows, or tokens, dealt out in contiguous shares.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/codec.hpp"
#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

// The share of [0, count) that belongs to a worker.
struct Share {
  std::int64_t begin, end;
  Share(std::int64_t count, std::int64_t worker, std::int64_t workers)
      : begin(count * worker / workers), end(count * (worker + 1) / workers) {}
};

// Small jobs are not worth waking anybody for.
std::int32_t workers_for(const Workers& workers, std::int64_t items, std::int64_t items_each) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(items / items_each, 1, workers.count()));
}

// From the list that was made when a backend was opened: workers allocate nothing.
const Kernel& vector_kernel() {
  for (const Kernel& kernel : fp32_kernels())
    for (const KernelListing& listing : kernels())
      if (listing.kernel == &kernel && listing.usable) return kernel;
  return scalar_kernel();
}

struct MergeContext {
  std::span<const MergePart> parts;
  std::int64_t tokens;
  std::int32_t heads, latent, workers;
  const OutputView& out;
};

struct PartsOfRow {
  std::span<const MergePart> parts;
  std::int64_t token, head;

  static double lse(const void* context, std::int32_t k) {
    const auto& row = *static_cast<const PartsOfRow*>(context);
    const MergePart& part = row.parts[static_cast<std::size_t>(k)];
    return part.lse[row.token * part.lse_token_stride + row.head * part.lse_head_stride];
  }
  static MergeRow::Values values(const void* context, std::int32_t k) {
    const auto& row = *static_cast<const PartsOfRow*>(context);
    const MergePart& part = row.parts[static_cast<std::size_t>(k)];
    const std::int64_t element = row.token * part.token_stride + row.head * part.head_stride;
    return {part.out + element * static_cast<std::int64_t>(dtype_bytes(part.dtype)), part.dtype};
  }
};

void merge_worker(void* opaque, std::int32_t worker) {
  const auto& m = *static_cast<const MergeContext*>(opaque);
  const Share share(m.tokens * m.heads, worker, m.workers);
  for (std::int64_t i = share.begin; i < share.end; ++i) {
    const PartsOfRow row{m.parts, i / m.heads, i % m.heads};
    vector_kernel().merge_row({
        .context = &row,
        .lse = PartsOfRow::lse,
        .values = PartsOfRow::values,
        .count = static_cast<std::int32_t>(m.parts.size()),
        .width = m.latent,
        .out = m.out.row(row.token, row.head),
        .out_dtype = m.out.dtype,
        .lse_out = m.out.lse_at(row.token, row.head),
    });
  }
}

struct WriteContext {
  const WriteKvCall& call;
  std::int32_t workers;
};

float value_at(const std::byte* row, Dtype dtype, std::int32_t i) {
  const auto read16 = [&] {
    std::uint16_t bits;
    std::memcpy(&bits, row + i * 2, 2);
    return bits;
  };
  if (dtype == Dtype::bf16) return bf16_to_f32(read16());
  if (dtype == Dtype::f16) return f16_to_f32(read16());
  float value;
  std::memcpy(&value, row + i * 4, 4);
  return value;
}

void store_value(std::byte* row, KvFormat format, std::int32_t i, float value, float kv_scale) {
  const auto write16 = [&](std::uint16_t bits) { std::memcpy(row + i * 2, &bits, 2); };
  switch (format) {
    case KvFormat::bf16: return write16(f32_to_bf16(value));
    case KvFormat::f16: return write16(f32_to_f16(value));
    case KvFormat::f32: std::memcpy(row + i * 4, &value, 4); return;
    case KvFormat::fp8_e4m3: row[i] = static_cast<std::byte>(quotient_to_e4m3(value, kv_scale)); return;
    case KvFormat::fp8_ds_mla: return;  // write_ds_mla
  }
}

void write_ds_mla(const WriteKvCall& call, const std::byte* latent, const std::byte* rope, std::byte* token) {
  for (std::int32_t group = 0; group < kDsMlaGroups; ++group) {
    float largest = 0;
    for (std::int32_t i = 0; i < kDsMlaGroup; ++i)
      largest = std::max(largest, std::fabs(value_at(latent, call.dtype, group * kDsMlaGroup + i)));
    const float scale = std::max(largest / kE4m3Max, FLT_MIN);
    std::memcpy(token + kDsMlaScaleOffset + group * 4, &scale, 4);
    for (std::int32_t i = group * kDsMlaGroup; i < (group + 1) * kDsMlaGroup; ++i)
      token[i] = static_cast<std::byte>(quotient_to_e4m3(value_at(latent, call.dtype, i), scale));
  }
  for (std::int32_t i = 0; i < kDsMlaRope; ++i)
    store_value(token + kDsMlaRopeOffset, KvFormat::bf16, i, value_at(rope, call.dtype, i), 1);
}

void write_worker(void* opaque, std::int32_t worker) {
  const auto& context = *static_cast<const WriteContext*>(opaque);
  const WriteKvCall& call = context.call;
  const auto element = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const Share share(static_cast<std::int64_t>(call.slots.size()), worker, context.workers);
  for (std::int64_t n = share.begin; n < share.end; ++n) {
    const std::int64_t slot = call.slots[static_cast<std::size_t>(n)];
    if (slot < 0) continue;
    const std::byte* latent = call.kv_c + n * call.kv_c_stride * element;
    const std::byte* rope = call.k_pe + n * call.k_pe_stride * element;
    std::byte* token =
        call.cache + slot / call.page_size * call.page_stride_bytes + slot % call.page_size * call.token_stride_bytes;
    if (call.format == KvFormat::fp8_ds_mla) {
      write_ds_mla(call, latent, rope, token);
      continue;
    }
    for (std::int32_t i = 0; i < call.latent; ++i)
      store_value(token, call.format, i, value_at(latent, call.dtype, i), call.kv_scale);
    for (std::int32_t i = 0; i < call.rope; ++i)
      store_value(token, call.format, call.latent + i, value_at(rope, call.dtype, i), call.kv_scale);
  }
}

struct GatherContext {
  const GatherKvCall& call;
  std::int32_t workers;
};

void gather_worker(void* opaque, std::int32_t worker) {
  const auto& context = *static_cast<const GatherContext*>(opaque);
  const GatherKvCall& call = context.call;
  const std::span<const std::int32_t> start = call.out_start;
  const auto element = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const Share share(start.back(), worker, context.workers);
  // The first request that ends behind the share's begin; empty ones are stepped over as the rows go by.
  auto b = static_cast<std::size_t>(std::upper_bound(start.begin() + 1, start.end(), share.begin) - start.begin() - 1);
  for (std::int64_t n = share.begin; n < share.end; ++b) {
    const TokenReader reader(call.kv, static_cast<std::int32_t>(b));
    for (const std::int64_t end = std::min<std::int64_t>(start[b + 1], share.end); n < end; ++n)
      vector_kernel().copy_token({.token = reader.at(call.first_token + static_cast<std::int32_t>(n - start[b])),
                                  .format = call.kv.format,
                                  .width = call.width,
                                  .scale = call.kv.format == KvFormat::fp8_e4m3 ? call.kv_scale : 1,
                                  .out = call.out + n * call.out_stride * element,
                                  .dtype = call.dtype});
  }
}

}  // namespace

void run_merge(Workers& workers, std::span<const MergePart> parts, std::int64_t tokens, std::int32_t heads,
               std::int32_t latent, const OutputView& out) {
  MergeContext context{parts, tokens, heads, latent, workers_for(workers, tokens * heads, 64), out};
  workers.run(context.workers, merge_worker, &context);
}

void run_write_kv(Workers& workers, const WriteKvCall& call) {
  WriteContext context{call, workers_for(workers, static_cast<std::int64_t>(call.slots.size()), 16)};
  workers.run(context.workers, write_worker, &context);
}

void run_gather_kv(Workers& workers, const GatherKvCall& call) {
  GatherContext context{call, workers_for(workers, call.out_start.back(), 64)};
  workers.run(context.workers, gather_worker, &context);
}

}  // namespace latte::cpu
