// merge against the oracle, and cache writes against the bytes the CPU writes.
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

// A host tensor between guard bands and its copy on the device.
struct Mirrored {
  GuardedTensor host;
  DeviceMemory device;

  Mirrored(const Backend& backend, GuardedTensor tensor)
      : host(std::move(tensor)), device(DeviceMemory::allocate(backend, host.memory().size()).value()) {}

  TensorView view(std::int32_t rank = 3) const {
    TensorView view = host.view();
    view.data = device.data() + (host.view().bytes() - host.memory().data());
    view.rank = rank;
    return view;
  }
  Status upload(const Backend& backend) const {
    return copy_to_device(backend, device.data(), host.memory().data(), host.memory().size());
  }
  Status download(const Backend& backend) const {
    return copy_to_host(backend, host.memory().data(), device.data(), host.memory().size());
  }
};

class GpuMerge : public OnGpu {
 protected:
  static constexpr std::int64_t kTokens = 5;
  static constexpr std::int32_t kHeads = 3;

  Mirrored tensor(Layout layout, std::int64_t width, Dtype dtype) const {
    return {backend(), GuardedTensor(layout, kTokens, kTokens, kHeads, width, dtype, width > 1 ? 16 : 1)};
  }
  // Random values; one row in four saw nothing.
  static void fill(Mirrored& out, Mirrored& lse, Dtype dtype, std::int32_t latent, Rng& rng) {
    const double mean = rng.normal() * 3;
    for (std::int64_t token = 0; token < kTokens; ++token)
      for (std::int32_t head = 0; head < kHeads; ++head) {
        const bool empty = rng.chance(4);
        auto* row = const_cast<std::byte*>(out.host.row(token, head));
        for (std::int32_t d = 0; d < latent; ++d)
          store(dtype, empty ? 0 : rng.normal(), row + d * static_cast<std::int64_t>(dtype_bytes(dtype)));
        store(Dtype::f32, empty ? -INFINITY : mean + rng.normal(), const_cast<std::byte*>(lse.host.row(token, head)));
      }
  }
};

TensorView host_lse(const Mirrored& lse) {
  TensorView view = lse.host.view();
  view.rank = 2;
  return view;
}

TEST_F(GpuMerge, AgreesWithTheOracleInEveryFormat) {
  Rng rng(3);
  for (std::int32_t latent : {512, 256, 80, 16, 1040})
    for (Dtype in : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (Dtype out_dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
        for (std::size_t count : {1, 2, 3, 17}) {
          const Layout layout = rng.pick(std::vector{Layout::dense, Layout::gapped, Layout::transposed});
          std::vector<Mirrored> outs, lses;
          std::vector<Partial> device, host;
          for (std::size_t i = 0; i < count; ++i) {
            outs.push_back(tensor(layout, latent, in));
            lses.push_back(tensor(layout, 1, Dtype::f32));
            fill(outs.back(), lses.back(), in, latent, rng);
            ASSERT_TRUE(succeeded(outs.back().upload(backend())));
            ASSERT_TRUE(succeeded(lses.back().upload(backend())));
            device.push_back({outs.back().view(), lses.back().view(2)});
            host.push_back({outs.back().host.view(), host_lse(lses.back())});
          }
          Mirrored out = tensor(layout, latent, out_dtype), lse = tensor(layout, 1, Dtype::f32);
          ASSERT_TRUE(succeeded(out.upload(backend())));
          ASSERT_TRUE(succeeded(lse.upload(backend())));
          ASSERT_TRUE(succeeded(merge(backend(), {device, out.view(), lse.view(2), stream()})));
          ASSERT_TRUE(succeeded(backend().synchronize(stream())));
          ASSERT_TRUE(succeeded(out.download(backend())));
          ASSERT_TRUE(succeeded(lse.download(backend())));
          const DecodeCase formats{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = out_dtype};
          const Comparison result = compare(out.host.view(), host_lse(lse), merge_oracle(host), formats.tolerance(0));
          EXPECT_TRUE(result.ok) << count << " partials, latent " << latent << ": " << result.message;
          EXPECT_FALSE(out.host.damage()) << *out.host.damage();
          EXPECT_FALSE(lse.host.damage()) << *lse.host.damage();
        }
}

TEST_F(GpuMerge, MayWriteIntoAPartial) {
  Rng rng(4);
  Mirrored a = tensor(Layout::dense, 512, Dtype::f32), a_lse = tensor(Layout::dense, 1, Dtype::f32);
  Mirrored b = tensor(Layout::dense, 512, Dtype::f32), b_lse = tensor(Layout::dense, 1, Dtype::f32);
  fill(a, a_lse, Dtype::f32, 512, rng);
  fill(b, b_lse, Dtype::f32, 512, rng);
  for (const Mirrored* part : {&a, &a_lse, &b, &b_lse}) ASSERT_TRUE(succeeded(part->upload(backend())));
  const Partial host[] = {{a.host.view(), host_lse(a_lse)}, {b.host.view(), host_lse(b_lse)}};
  const OracleResult oracle = merge_oracle(host);
  const Partial partials[] = {{a.view(), a_lse.view(2)}, {b.view(), b_lse.view(2)}};
  ASSERT_TRUE(succeeded(merge(backend(), {partials, b.view(), b_lse.view(2), stream()})));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  ASSERT_TRUE(succeeded(b.download(backend())));
  ASSERT_TRUE(succeeded(b_lse.download(backend())));
  const DecodeCase formats{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = Dtype::f32};
  const Comparison result = compare(b.host.view(), host_lse(b_lse), oracle, formats.tolerance(0));
  EXPECT_TRUE(result.ok) << result.message;
}

class GpuWriteKv : public OnGpu {};

TEST_F(GpuWriteKv, WritesTheBytesTheCpuWrites) {
  const Backend cpu = Backend::open({.threads = 1}).value();
  Rng rng(5);
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla})
    for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32})
      for (std::int64_t page_size : {1, 7, 64}) {
        constexpr std::int64_t kTokens = 40, kLatent = 512, kRope = 64, kGap = 16;
        const std::int64_t pages = 80 / page_size + 2, width = kv_token_elements(format, kLatent, kRope);
        const auto item = static_cast<std::int64_t>(dtype_bytes(dtype));
        std::vector<std::byte> kv_c(static_cast<std::size_t>(kTokens * (kLatent + kGap) * item), std::byte{0xff});
        std::vector<std::byte> k_pe(static_cast<std::size_t>(kTokens * kRope * item), std::byte{0xff});
        // Some values round, some saturate.
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const double spread = t % 4 == 3 ? 300 : 1;
          for (std::int64_t d = 0; d < kLatent; ++d)
            store(dtype, rng.normal() * spread, kv_c.data() + (t * (kLatent + kGap) + d) * item);
          for (std::int64_t d = 0; d < kRope; ++d)
            store(dtype, rng.normal() * spread, k_pe.data() + (t * kRope + d) * item);
        }
        std::vector<std::int64_t> slots;
        for (std::int64_t t = 0; t < kTokens; ++t)
          slots.push_back(t % 5 == 0 ? -1 - t : (t * 2 + 1) % (pages * page_size));
        const Dtype element = kv_element_dtype(format);
        std::vector<std::byte> cache(static_cast<std::size_t>(pages * page_size * width) * dtype_bytes(element),
                                     std::byte{0xa7});
        const auto copy = [&](const void* data, std::size_t bytes) {
          auto memory = DeviceMemory::allocate(backend(), bytes).value();
          EXPECT_TRUE(succeeded(copy_to_device(backend(), memory.data(), data, bytes)));
          return memory;
        };
        const DeviceMemory d_kv_c = copy(kv_c.data(), kv_c.size()), d_k_pe = copy(k_pe.data(), k_pe.size());
        const DeviceMemory d_slots = copy(slots.data(), slots.size() * sizeof(std::int64_t));
        const DeviceMemory d_cache = copy(cache.data(), cache.size());
        const auto arguments = [&](const void* c, const void* pe, const void* s, void* to) {
          WriteKvArgs args;
          args.kv_c = dense(c, dtype, {kTokens, kLatent});
          args.kv_c.stride[0] = kLatent + kGap;
          args.k_pe = dense(pe, dtype, {kTokens, kRope});
          args.slot_mapping = {static_cast<const std::int64_t*>(s), slots.size()};
          args.kv_cache = dense(to, element, {pages, page_size, width});
          args.kv_format = format;
          args.kv_scale.value = format == KvFormat::fp8_e4m3 ? 0.375f : 1;
          return args;
        };
        WriteKvArgs device = arguments(d_kv_c.data(), d_k_pe.data(), d_slots.data(), d_cache.data());
        device.stream = stream();
        const DeviceMemory d_scale = copy(&device.kv_scale.value, sizeof(float));
        if (format == KvFormat::fp8_e4m3 && page_size != 1) {  // by address; the value beside it is not looked at
          device.kv_scale.ptr = reinterpret_cast<const float*>(d_scale.data());
          device.kv_scale.value = std::nanf("");
        }
        ASSERT_TRUE(succeeded(write_kv(backend(), device)));
        ASSERT_TRUE(succeeded(backend().synchronize(stream())));
        ASSERT_TRUE(succeeded(write_kv(cpu, arguments(kv_c.data(), k_pe.data(), slots.data(), cache.data()))));
        std::vector<std::byte> got(cache.size());
        ASSERT_TRUE(succeeded(copy_to_host(backend(), got.data(), d_cache.data(), got.size())));
        EXPECT_EQ(std::memcmp(got.data(), cache.data(), cache.size()), 0)
            << kv_format_name(format) << " from " << dtype_name(dtype) << " page " << page_size;
      }
}

// The host cannot look at a device's slots: those behind the cache are skipped, and nothing outside is written.
TEST_F(GpuWriteKv, SlotsBehindTheCacheAreSkipped) {
  const std::vector<std::uint16_t> values(576, 0x3f80);
  const std::int64_t slots[] = {1'000'000'000'000};
  const std::vector<std::byte> before(2 * 576 * 2, std::byte{0x11});
  const auto copy = [&](const void* data, std::size_t bytes) {
    auto memory = DeviceMemory::allocate(backend(), bytes).value();
    EXPECT_TRUE(succeeded(copy_to_device(backend(), memory.data(), data, bytes)));
    return memory;
  };
  const DeviceMemory d_values = copy(values.data(), values.size() * 2), d_slots = copy(slots, sizeof slots);
  const DeviceMemory d_cache = copy(before.data(), before.size());
  WriteKvArgs args;
  args.kv_c = dense(static_cast<const void*>(d_values.data()), Dtype::bf16, {1, 512});
  args.k_pe = dense(static_cast<const void*>(d_values.data() + 1024), Dtype::bf16, {1, 64});
  args.slot_mapping = {reinterpret_cast<const std::int64_t*>(d_slots.data()), 1};
  args.kv_cache = dense(static_cast<void*>(d_cache.data()), Dtype::bf16, {2, 1, 576});
  args.stream = stream();
  ASSERT_TRUE(succeeded(write_kv(backend(), args)));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  std::vector<std::byte> after(before.size());
  ASSERT_TRUE(succeeded(copy_to_host(backend(), after.data(), d_cache.data(), after.size())));
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace latte::testkit
