// merge, write_kv and gather_kv through the C interface on a device.
#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/gpu/c_abi_support.hpp"

namespace latte::testkit {
namespace {

// What decode left of two batches, joined in the outputs of a third that has other strides and another dtype.
TEST_F(GpuCAbi, Merges) {
  DecodeCase c = gpu_case({{1, 300}, {2, 70}, {1, 0}}, 5, 16);
  std::vector<std::unique_ptr<DeviceStep>> parts;
  std::vector<Partial> on_host;
  std::vector<latte_partial> on_device;
  const auto trimmed = [&](TensorView view) {  // without the spare rows of gapped layouts
    view.shape[0] = c.query_tokens();
    return view;
  };
  for (Layout layout : {Layout::gapped, Layout::transposed}) {
    c.out_layout = layout;
    c.lse_layout = layout == Layout::gapped ? Layout::transposed : Layout::gapped;
    ++c.seed;
    parts.push_back(DeviceStep::make(backend(), c));
    DeviceStep& part = *parts.back();
    ASSERT_TRUE(succeeded(part.run(backend(), stream())));
    const DecodeArgs host = part.batch.args(), device = part.args(stream());
    on_host.push_back({trimmed(host.out), trimmed(host.lse)});
    on_device.push_back({c_tensor(trimmed(device.out)), c_tensor(trimmed(device.lse))});
  }
  c.out_dtype = Dtype::f32;
  c.out_layout = c.lse_layout = Layout::gapped;
  const auto joined = DeviceStep::make(backend(), c);
  const DecodeArgs device = joined->args(stream());
  const auto graph = captured([&] {
    latte_merge_args args = latte_merge_args_init();
    args.partial_count = 2;
    args.partials = on_device.data();
    args.out = c_tensor(trimmed(device.out));
    args.lse = c_tensor(trimmed(device.lse));
    args.stream = stream();
    ASSERT_TRUE(ok(latte_merge(c_backend(), &args, &error)));
  });
  ASSERT_TRUE(succeeded(graph.status()));
  replay(*graph, *joined, joined->batch);
  const DecodeCase formats{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = Dtype::f32};
  const DecodeArgs host = joined->batch.args();
  const Comparison result = compare(host.out, host.lse, merge_oracle(on_host), formats.tolerance(0));
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_FALSE(joined->batch.guard_damage()) << *joined->batch.guard_damage();
}

// Values that e4m3 times the scale has exactly, so that the round trip loses nothing.
TEST_F(GpuCAbi, WritesTokensAndGathersThem) {
  constexpr std::int64_t kTokens = 24, kLatent = 32, kRope = 16, kWidth = kLatent + kRope, kGap = 16;
  constexpr std::int64_t kPageSize = 7, kPages = 6;
  const float kScale = 0.375f;
  Rng rng(8);
  std::vector<std::uint16_t> kv_c(kTokens * (kLatent + kGap), 0xffff), k_pe(kTokens * (kRope + 2 * kGap), 0xffff);
  const auto value = [&] { return encode_bf16(kScale * rng.between(-15, 15)); };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t i = 0; i < kLatent; ++i) kv_c[static_cast<std::size_t>(t * (kLatent + kGap) + i)] = value();
    for (std::int64_t i = 0; i < kRope; ++i) k_pe[static_cast<std::size_t>(t * (kRope + 2 * kGap) + i)] = value();
  }
  // Request 0 has pages 4, 1 and request 1 has pages 0, 5; each 12 tokens, of which the first two are skipped.
  const std::vector<std::int32_t> table = {4, 1, -1, 0, 5, -1}, out_start = {0, 10, 20};
  std::vector<std::int64_t> slots;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t request = t / 12, position = t % 12;
    slots.push_back(position < 2 ? -1
                                 : table[static_cast<std::size_t>(request * 3 + position / kPageSize)] * kPageSize +
                                       position % kPageSize);
  }
  const DeviceMemory d_kv_c = upload(kv_c), d_k_pe = upload(k_pe), d_slots = upload(slots);
  const DeviceMemory d_table = upload(table), d_out_start = upload(out_start), d_scale = upload(std::vector{kScale});
  const auto strided = [](const void* data, std::int32_t dtype, std::int64_t rows, std::int64_t width,
                          std::int64_t stride) {
    const std::int64_t shape[] = {rows, width};
    latte_tensor tensor = latte_dense(data, dtype, 2, shape);
    tensor.stride[0] = stride;
    return tensor;
  };
  for (KvFormat format : {KvFormat::bf16, KvFormat::fp8_e4m3})
    for (bool by_address : {false, true}) {
      const bool fp8 = format == KvFormat::fp8_e4m3;
      if (by_address && !fp8) continue;
      const std::size_t item = fp8 ? 1 : 2;
      std::vector<std::byte> cache(kPages * kPageSize * (kWidth + kGap) * item, std::byte{0xa7});
      const DeviceMemory d_cache = upload(cache);
      const std::int64_t cache_shape[] = {kPages, kPageSize, kWidth};
      latte_tensor c_cache = latte_dense(d_cache.data(), fp8 ? LATTE_FP8_E4M3 : LATTE_BF16, 3, cache_shape);
      c_cache.stride[0] = kPageSize * (kWidth + kGap);
      c_cache.stride[1] = kWidth + kGap;
      std::vector<std::uint16_t> rows(20 * (kWidth + kGap), 0xa7a7);
      const DeviceMemory d_rows = upload(rows);
      const auto set_scale = [&](auto& args) {
        args.kv_format = c_kv_format(format);
        if (fp8) args.kv_scale = by_address ? std::nanf("") : kScale;
        if (by_address) args.kv_scale_ptr = reinterpret_cast<const float*>(d_scale.data());
        args.kv_cache = c_cache;
        args.stream = stream();
      };
      const auto graph = captured([&] {
        latte_write_kv_args write = latte_write_kv_args_init();
        set_scale(write);
        write.kv_c = strided(d_kv_c.data(), LATTE_BF16, kTokens, kLatent, kLatent + kGap);
        write.k_pe = strided(d_k_pe.data(), LATTE_BF16, kTokens, kRope, kRope + 2 * kGap);
        write.slot_mapping = reinterpret_cast<const std::int64_t*>(d_slots.data());
        write.slot_mapping_count = kTokens;
        ASSERT_TRUE(ok(latte_write_kv(c_backend(), &write, &error)));
        latte_gather_kv_args gather = latte_gather_kv_args_init();
        set_scale(gather);
        gather.out = strided(d_rows.data(), LATTE_BF16, 20, kWidth, kWidth + kGap);
        gather.block_table = reinterpret_cast<const std::int32_t*>(d_table.data());
        gather.block_table_stride = 3;
        gather.max_pages = 2;
        gather.out_start = reinterpret_cast<const std::int32_t*>(d_out_start.data());
        gather.out_start_count = 3;
        gather.first_token = 2;
        gather.tokens = 20;
        ASSERT_TRUE(ok(latte_gather_kv(c_backend(), &gather, &error)));
      });
      ASSERT_TRUE(succeeded(graph.status()));
      // Whatever ran before the replay is undone.
      ASSERT_TRUE(succeeded(copy_to_device(backend(), d_cache.data(), cache.data(), cache.size())));
      ASSERT_TRUE(succeeded(copy_to_device(backend(), d_rows.data(), rows.data(), d_rows.size())));
      ASSERT_TRUE(succeeded(graph->launch(stream())));
      ASSERT_TRUE(ok(latte_backend_synchronize(c_backend(), stream(), &error)));

      WriteKvArgs oracle;
      oracle.kv_c = dense(static_cast<const void*>(kv_c.data()), Dtype::bf16, {kTokens, kLatent});
      oracle.kv_c.stride[0] = kLatent + kGap;
      oracle.k_pe = dense(static_cast<const void*>(k_pe.data()), Dtype::bf16, {kTokens, kRope});
      oracle.k_pe.stride[0] = kRope + 2 * kGap;
      oracle.slot_mapping = slots;
      oracle.kv_cache = dense(static_cast<void*>(cache.data()), kv_element_dtype(format), {kPages, kPageSize, kWidth});
      oracle.kv_cache.stride = {kPageSize * (kWidth + kGap), kWidth + kGap, 1};
      oracle.kv_format = format;
      oracle.kv_scale.value = fp8 ? kScale : 1;
      write_kv_oracle(oracle);
      EXPECT_EQ(download<std::byte>(d_cache), cache) << kv_format_name(format) << " by address " << by_address;
      for (std::int64_t t = 0, row = 0; t < kTokens; ++t) {
        if (slots[static_cast<std::size_t>(t)] < 0) continue;
        std::uint16_t* to = rows.data() + row++ * (kWidth + kGap);
        std::copy_n(kv_c.data() + t * (kLatent + kGap), kLatent, to);
        std::copy_n(k_pe.data() + t * (kRope + 2 * kGap), kRope, to + kLatent);
      }
      EXPECT_EQ(download<std::uint16_t>(d_rows), rows) << kv_format_name(format) << " by address " << by_address;
    }
}

}  // namespace
}  // namespace latte::testkit
