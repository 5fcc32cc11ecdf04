// Offsets beyond 2^31 elements: tensors whose rows lie gigabytes apart, and tensors of that many rows. GpuDecode has
// the cache's.
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

constexpr std::int64_t kFarBytes = std::int64_t{1} << 33;  // 2^31 fp32, 2^32 bf16 and 2^33 fp8 numbers

class GpuFarOffsets : public OnGpu {};

// Tensors of [tokens, heads, width] in one large buffer, all with the same strides, one behind the other.
class SpreadTensors {
 public:
  SpreadTensors(const Backend& backend, std::byte* base, std::int64_t token_bytes, std::int64_t head_bytes,
                std::int64_t room_bytes)
      : backend_(backend), next_(base), token_bytes_(token_bytes), head_bytes_(head_bytes), room_bytes_(room_bytes) {}

  // A tensor like the host's; `lse` has no width.
  template <class View>
  View place(View host) {
    const auto item = static_cast<std::int64_t>(dtype_bytes(host.dtype));
    host.data = next_;
    host.stride = {token_bytes_ / item, head_bytes_ / item, 1};
    next_ += room_bytes_;
    return host;
  }
  template <class Copy>
  Status each_row(const ConstTensorView& host, const ConstTensorView& far, Copy copy) const {
    const auto item = static_cast<std::int64_t>(dtype_bytes(host.dtype));
    const std::int64_t width = host.rank == 3 ? host.shape[2] : 1;
    for (std::int64_t token = 0; token < host.shape[0]; ++token)
      for (std::int64_t head = 0; head < host.shape[1]; ++head)
        if (Status status =
                copy(const_cast<std::byte*>(host.bytes()) + (token * host.stride[0] + head * host.stride[1]) * item,
                     const_cast<std::byte*>(far.bytes()) + token * token_bytes_ + head * head_bytes_,
                     static_cast<std::size_t>(width * item));
            !status)
          return status;
    return {};
  }
  Status upload(const ConstTensorView& host, const ConstTensorView& far) const {
    return each_row(host, far, [&](const std::byte* from, std::byte* to, std::size_t bytes) {
      return copy_to_device(backend_, to, from, bytes);
    });
  }
  Status download(const ConstTensorView& host, const ConstTensorView& far) const {
    return each_row(host, far, [&](std::byte* to, const std::byte* from, std::size_t bytes) {
      return copy_to_host(backend_, to, from, bytes);
    });
  }

 private:
  const Backend& backend_;
  std::byte* next_;
  const std::int64_t token_bytes_, head_bytes_, room_bytes_;
};

struct Arithmetic {
  Dtype dtype;
  PrefillMath math;
};
// What is read as it lies, and what is converted or quantised on entry.
constexpr Arithmetic kArithmetics[] = {{Dtype::bf16, PrefillMath::half},
                                       {Dtype::fp8_e4m3, PrefillMath::fp8},
                                       {Dtype::bf16, PrefillMath::fp8},
                                       {Dtype::fp8_e4m3, PrefillMath::half}};

TEST_F(GpuFarOffsets, OfPrefillsStridesAreFollowed) {
  constexpr std::int64_t kMiB = 1 << 20, kTokenBytes = 48 * kMiB;
  const std::vector<PrefillRequest> requests = {{130, 150},
                                                {66, 66}};  // 196 rows 48 MiB apart are more than 2^33 bytes
  static_assert(195 * kTokenBytes > kFarBytes);
  const auto memory = DeviceMemory::allocate(backend(), 216 * kTokenBytes);
  if (!memory) GTEST_SKIP() << memory.status().message();
  for (const auto& [dtype, math] : kArithmetics)
    for (bool far_tokens : {true, false}) {
      PrefillCase c = gpu_prefill(requests, 2);
      c.dtype = dtype;
      c.math = math;
      const auto step = DevicePrefillStep::make(backend(), c);
      const PrefillArgs host = step->batch().args();
      SpreadTensors spread(backend(), memory->data(), far_tokens ? kTokenBytes : 1024,
                           far_tokens ? 1024 : kFarBytes + kMiB, far_tokens ? 4096 : kMiB / 4);
      PrefillArgs args = step->args(stream());
      args.q = spread.place(host.q);
      args.k = spread.place(host.k);
      args.v = spread.place(host.v);
      args.out = spread.place(host.out);
      args.lse = spread.place(host.lse);
      ASSERT_TRUE(succeeded(spread.upload(host.q, args.q)));
      ASSERT_TRUE(succeeded(spread.upload(host.k, args.k)));
      ASSERT_TRUE(succeeded(spread.upload(host.v, args.v)));
      step->batch().poison_outputs();
      ASSERT_TRUE(succeeded(spread.upload(host.out, args.out)));
      ASSERT_TRUE(succeeded(spread.upload(host.lse, args.lse)));
      const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
      ASSERT_TRUE(succeeded(prefill(metadata, args)));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(spread.download(host.out, args.out)));
      ASSERT_TRUE(succeeded(spread.download(host.lse, args.lse)));
      const Comparison result = compare_prefill(step->prepared, step->builder.math());
      EXPECT_TRUE(result.ok) << (far_tokens ? "tokens" : "heads") << " far apart, " << c.name() << ": "
                             << result.message;
    }
}

// Many prompts alike in length, of which the last lies behind 2^31 elements: alone, through tensors that begin with it,
// it has the same bits.
TEST_F(GpuFarOffsets, OfPrefillsLastPromptAreFollowed) {
  constexpr std::int64_t kHeads = 128, kPrompts = 1040, kFew = 16, kMany = 128;
  static_assert(kHeads * kPrompts * kMany * 128 > std::int64_t{1} << 31);
  for (bool many_queries : {true, false})
    for (PrefillMath math : {PrefillMath::half, PrefillMath::fp8}) {
      // Quantised keys and values would take more memory than there should be.
      const std::int64_t prompts = many_queries || math == PrefillMath::half ? kPrompts : kPrompts * 7 / 10;
      const std::int64_t queries = many_queries ? kMany : kFew, keys = many_queries ? kFew : kMany;
      const PrefillProblem problem{.heads = kHeads, .mask = Mask::none, .math = math};
      const BuilderOptions options{.policy = Policy::batch_invariant(0)};
      const auto allocate = [&](std::int64_t tokens, std::int64_t width) {
        return DeviceMemory::allocate(backend(), static_cast<std::size_t>(prompts * tokens * kHeads * width * 2));
      };
      const auto q = allocate(queries, 192), k = allocate(keys, 192), v = allocate(keys, 128);
      const auto out = allocate(queries, 128);
      for (const auto* memory : {&q, &k, &v, &out})
        if (!*memory) GTEST_SKIP() << memory->status().message();
      std::uint64_t seed = 5;
      for (const auto* memory : {&q, &k, &v})
        ASSERT_TRUE(succeeded(fill_random(
            backend(),
            {.data = (*memory)->data(), .count = static_cast<std::int64_t>((*memory)->size() / 2), .seed = seed++},
            stream())));
      // Prompts [first, prompts) and the output of the last one.
      const auto last_of = [&](std::int64_t first, std::vector<std::byte>& rows) -> Status {
        const std::int64_t count = prompts - first;
        const Limits limits{.max_requests = static_cast<std::int32_t>(count),
                            .max_query_tokens = static_cast<std::int32_t>(queries),
                            .max_kv_tokens = static_cast<std::int32_t>(keys)};
        auto builder = PrefillBuilder::create(backend(), problem, limits, options);
        if (!builder) return builder.status();
        std::vector<std::int32_t> query_start{0}, kv_start{0};
        for (std::int64_t i = 0; i < count; ++i) {
          query_start.push_back(query_start.back() + static_cast<std::int32_t>(queries));
          kv_start.push_back(kv_start.back() + static_cast<std::int32_t>(keys));
        }
        const auto from = [&](const Result<DeviceMemory>& memory, std::int64_t tokens, std::int64_t width) {
          return dense(static_cast<void*>(memory->data() + first * tokens * kHeads * width * 2), Dtype::bf16,
                       {count * tokens, kHeads, width});
        };
        PrefillArgs args;
        args.q = from(q, queries, 192);
        args.k = from(k, keys, 192);
        args.v = from(v, keys, 128);
        args.out = from(out, queries, 128);
        args.scale = 0.07f;
        args.stream = stream();
        const auto metadata = builder->build(0, {.query_start = query_start, .kv_start = kv_start}, stream());
        if (!metadata) return metadata.status();
        if (Status status = prefill(*metadata, args); !status) return status;
        if (Status status = backend().synchronize(stream()); !status) return status;
        rows.resize(static_cast<std::size_t>(queries * kHeads * 128 * 2));
        return copy_to_host(backend(), rows.data(), out->data() + out->size() - rows.size(), rows.size());
      };
      std::vector<std::byte> alone, among_all;
      ASSERT_TRUE(succeeded(last_of(prompts - 1, alone)));
      // Nothing may be left of it.
      const std::vector<std::byte> poison(alone.size(), std::byte{0xff});
      ASSERT_TRUE(succeeded(
          copy_to_device(backend(), out->data() + out->size() - poison.size(), poison.data(), poison.size())));
      ASSERT_TRUE(succeeded(last_of(0, among_all)));
      EXPECT_NE(alone, poison);
      EXPECT_EQ(std::memcmp(among_all.data(), alone.data(), alone.size()), 0)
          << (many_queries ? "many queries, " : "many keys, ") << prefill_math_name(math);
    }
}

// Two tokens, everything of the second one 2^33 bytes behind that of the first; they change places on the way through
// the cache.
TEST_F(GpuFarOffsets, OfTokensAndPagesAreFollowedByWriteAndGather) {
  constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kRoom = 1 << 16;
  const auto memory = DeviceMemory::allocate(backend(), static_cast<std::size_t>(kFarBytes + 4 * kRoom));
  if (!memory) GTEST_SKIP() << memory.status().message();
  std::byte *const kv_c = memory->data(), *const k_pe = kv_c + kRoom, *const cache = k_pe + kRoom,
                   *const out = cache + kRoom;
  const DeviceMemory slots = upload<std::int64_t>({1, 0}), table = upload<std::int32_t>({0, 1}),
                     out_start = upload<std::int32_t>({0, 2});
  for (KvFormat format : {KvFormat::bf16, KvFormat::fp8_e4m3}) {
    // Small integers, which both formats have.
    std::vector<std::uint16_t> tokens[2];
    for (std::int64_t t = 0; t < 2; ++t) {
      for (std::int64_t i = 0; i < kWidth; ++i)
        tokens[t].push_back(encode_bf16(static_cast<double>((i * 7 + t * 3) % 31 - 15)));
      ASSERT_TRUE(succeeded(copy_to_device(backend(), kv_c + t * kFarBytes, tokens[t].data(), kLatent * 2)));
      ASSERT_TRUE(succeeded(copy_to_device(backend(), k_pe + t * kFarBytes, &tokens[t][kLatent], kRope * 2)));
    }
    const auto far = [](auto view) {
      view.stride[0] = kFarBytes / static_cast<std::int64_t>(dtype_bytes(view.dtype));
      return view;
    };
    WriteKvArgs write;
    write.kv_c = far(dense(static_cast<const void*>(kv_c), Dtype::bf16, {2, kLatent}));
    write.k_pe = far(dense(static_cast<const void*>(k_pe), Dtype::bf16, {2, kRope}));
    write.slot_mapping = {reinterpret_cast<const std::int64_t*>(slots.data()), 2};
    write.kv_cache = far(dense(static_cast<void*>(cache), kv_element_dtype(format), {2, 1, kWidth}));
    write.kv_format = format;
    write.stream = stream();
    ASSERT_TRUE(succeeded(write_kv(backend(), write)));
    GatherKvArgs gather;
    gather.kv_cache = write.kv_cache;
    gather.kv_format = format;
    gather.pages = {
        .block_table = reinterpret_cast<const std::int32_t*>(table.data()), .block_table_stride = 2, .max_pages = 2};
    gather.out_start = {reinterpret_cast<const std::int32_t*>(out_start.data()), 2};
    gather.tokens = 2;
    gather.out = far(dense(static_cast<void*>(out), Dtype::bf16, {2, kWidth}));
    gather.stream = stream();
    ASSERT_TRUE(succeeded(gather_kv(backend(), gather)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    for (std::int64_t row = 0; row < 2; ++row) {
      std::vector<std::uint16_t> got(kWidth);
      ASSERT_TRUE(succeeded(copy_to_host(backend(), got.data(), out + row * kFarBytes, kWidth * 2)));
      EXPECT_EQ(got, tokens[1 - row]) << kv_format_name(format) << " row " << row;
    }
  }
}

// So many tokens that the last ones lie behind 2^31 elements. Only these are written; and all rows that are gathered
// come from a few pages.
TEST_F(GpuFarOffsets, OfManyTokensAreFollowedByWriteAndGather) {
  constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kPageSize = 64, kPages = 4;
  constexpr std::int64_t kTokens = 4'300'000 / kPageSize * kPageSize + 11, kWritten = kPages * kPageSize;
  static_assert((kTokens - kWritten) * kLatent > std::int64_t{1} << 31);
  const auto memory = DeviceMemory::allocate(backend(), static_cast<std::size_t>(kTokens * kWidth * 2));
  if (!memory) GTEST_SKIP() << memory.status().message();
  std::vector<std::uint16_t> tokens(kWritten * kWidth), latent, rope;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::uint16_t>(i * 40503 % 0x7f00);  // finite, and no two tokens alike
    (static_cast<std::int64_t>(i) % kWidth < kLatent ? latent : rope).push_back(tokens[i]);
  }
  std::vector<std::int64_t> slots(kTokens, -1);
  for (std::int64_t i = 0; i < kWritten; ++i) slots[static_cast<std::size_t>(kTokens - kWritten + i)] = i;
  // Latent rows at the front of the buffer, rope rows behind them.
  std::byte* const k_pe = memory->data() + kTokens * kLatent * 2;
  ASSERT_TRUE(succeeded(copy_to_device(backend(), memory->data() + (kTokens - kWritten) * kLatent * 2, latent.data(),
                                       latent.size() * 2)));
  ASSERT_TRUE(
      succeeded(copy_to_device(backend(), k_pe + (kTokens - kWritten) * kRope * 2, rope.data(), rope.size() * 2)));
  const DeviceMemory d_slots = upload(slots), cache = upload(std::vector<std::uint16_t>(tokens.size(), 0xffff));
  WriteKvArgs write;
  write.kv_c = dense(static_cast<const void*>(memory->data()), Dtype::bf16, {kTokens, kLatent});
  write.k_pe = dense(static_cast<const void*>(k_pe), Dtype::bf16, {kTokens, kRope});
  write.slot_mapping = {reinterpret_cast<const std::int64_t*>(d_slots.data()), slots.size()};
  write.kv_cache = dense(static_cast<void*>(cache.data()), Dtype::bf16, {kPages, kPageSize, kWidth});
  write.stream = stream();
  ASSERT_TRUE(succeeded(write_kv(backend(), write)));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  std::vector<std::uint16_t> got(tokens.size());
  ASSERT_TRUE(succeeded(copy_to_host(backend(), got.data(), cache.data(), got.size() * 2)));
  EXPECT_EQ(got, tokens);

  std::vector<std::int32_t> table;
  for (std::int64_t page = 0; page * kPageSize < kTokens; ++page)
    table.push_back(static_cast<std::int32_t>(page % kPages));
  const DeviceMemory d_table = upload(table), out_start = upload<std::int32_t>({0, static_cast<std::int32_t>(kTokens)});
  GatherKvArgs gather;
  gather.kv_cache = write.kv_cache;
  gather.pages = {.block_table = reinterpret_cast<const std::int32_t*>(d_table.data()),
                  .block_table_stride = static_cast<std::int64_t>(table.size()),
                  .max_pages = static_cast<std::int64_t>(table.size())};
  gather.out_start = {reinterpret_cast<const std::int32_t*>(out_start.data()), 2};
  gather.tokens = static_cast<std::int32_t>(kTokens);
  gather.out = dense(static_cast<void*>(memory->data()), Dtype::bf16, {kTokens, kWidth});
  gather.stream = stream();
  ASSERT_TRUE(succeeded(gather_kv(backend(), gather)));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  std::vector<std::uint16_t> row(kWidth);
  for (std::int64_t at : {std::int64_t{0}, kTokens - kPageSize, kTokens - 1}) {
    ASSERT_TRUE(succeeded(copy_to_host(backend(), row.data(), memory->data() + at * kWidth * 2, kWidth * 2)));
    const auto* want = tokens.data() + at % kWritten * kWidth;
    EXPECT_EQ(row, std::vector<std::uint16_t>(want, want + kWidth)) << "row " << at;
  }
}

}  // namespace
}  // namespace latte::testkit
