// write_kv against the oracle: the right bytes in the right slots and nothing else.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

constexpr KvFormat kFormats[] = {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3,
                                 KvFormat::fp8_ds_mla};
constexpr std::byte kUntouched{0xa7};

// Tokens on their way into a cache of a few pages.
struct WriteCase {
  std::int32_t latent = 512, rope = 64;
  std::int64_t tokens = 40, pages = 9, page_size = 7;
  KvFormat format = KvFormat::bf16;
  Dtype dtype = Dtype::bf16;
  bool gapped = false;
  float kv_scale = 1;
  bool by_address = false;  // kv_scale is
  double spread = 1;
};

class Writing {
 public:
  Writing(const WriteCase& c, std::uint64_t seed) : case_(c), rng_(seed) {
    const std::int64_t gap = c.gapped ? 3 : 0;
    kv_c_view_ = make_input(kv_c_, c.latent, gap);
    k_pe_view_ = make_input(k_pe_, c.rope, gap);
    for (std::int64_t slot = 0; slot < c.pages * c.page_size; ++slot) slots_.push_back(slot);
    for (std::size_t i = slots_.size() - 1; i > 0; --i)
      std::swap(slots_[i], slots_[rng_.between(0, static_cast<std::int32_t>(i))]);
    slots_.resize(static_cast<std::size_t>(c.tokens));
    for (std::size_t i = 0; i < slots_.size(); i += 5) slots_[i] = i % 2 == 0 ? -1 : INT64_MIN;
  }

  void set(std::int64_t token, std::int64_t column, double value) {
    const bool rope = column >= case_.latent;
    const ConstTensorView& view = rope ? k_pe_view_ : kv_c_view_;
    std::byte* base = rope ? k_pe_.data() : kv_c_.data();
    const std::int64_t item = static_cast<std::int64_t>(dtype_bytes(case_.dtype));
    store(case_.dtype, value, base + (token * view.stride[0] + (rope ? column - case_.latent : column)) * item);
  }

  // The arguments, for a fresh cache of this case's shape that lies in `memory`.
  WriteKvArgs args(std::vector<std::byte>& memory) const {
    const std::int64_t width = kv_token_elements(case_.format, case_.latent, case_.rope);
    const Dtype dtype = kv_element_dtype(case_.format);
    const std::int64_t gap = case_.gapped ? 16 : 0;
    const std::int64_t token_stride = width + gap, page_stride = case_.page_size * token_stride + 2 * gap;
    memory.assign(static_cast<std::size_t>(case_.pages * page_stride) * dtype_bytes(dtype), kUntouched);
    TensorView cache = dense(static_cast<void*>(memory.data()), dtype, {case_.pages, case_.page_size, width});
    cache.stride = {page_stride, token_stride, 1};
    return {.kv_c = kv_c_view_,
            .k_pe = k_pe_view_,
            .slot_mapping = slots_,
            .kv_cache = cache,
            .kv_format = case_.format,
            .kv_scale = {.value = case_.by_address ? std::numeric_limits<float>::quiet_NaN() : case_.kv_scale,
                         .ptr = case_.by_address ? &case_.kv_scale : nullptr}};
  }

  const std::vector<std::int64_t>& slots() const { return slots_; }

 private:
  ConstTensorView make_input(std::vector<std::byte>& memory, std::int64_t width, std::int64_t gap) {
    const auto item = static_cast<std::int64_t>(dtype_bytes(case_.dtype));
    memory.assign(static_cast<std::size_t>(case_.tokens * (width + gap) * item), std::byte{0xff});
    ConstTensorView view = dense(static_cast<const void*>(memory.data()), case_.dtype, {case_.tokens, width});
    view.stride[0] = width + gap;
    for (std::int64_t token = 0; token < case_.tokens; ++token)
      for (std::int64_t d = 0; d < width; ++d)
        store(case_.dtype, rng_.normal() * case_.spread, memory.data() + (token * view.stride[0] + d) * item);
    return view;
  }

  WriteCase case_;
  Rng rng_;
  std::vector<std::byte> kv_c_, k_pe_;
  ConstTensorView kv_c_view_, k_pe_view_;
  std::vector<std::int64_t> slots_;
};

std::string describe(const WriteCase& c) {
  return std::string(dtype_name(c.dtype)) + " into " + kv_format_name(c.format) + " latent " +
         std::to_string(c.latent) + (c.gapped ? " gapped" : " dense") + " kv_scale " + std::to_string(c.kv_scale);
}

// Byte for byte; the first difference is named.
void expect_same_bytes(const std::vector<std::byte>& got, const std::vector<std::byte>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  const auto [a, b] = std::mismatch(got.begin(), got.end(), want.begin());
  EXPECT_TRUE(a == got.end()) << what << ": byte " << a - got.begin() << " is " << std::to_integer<int>(*a) << ", want "
                              << std::to_integer<int>(*b);
}

class WriteKv : public ::testing::Test {
 protected:
  Backend backend = open_backend();
};

TEST_F(WriteKv, StoresTheBytesOfTheOracle) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3})
    for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32})
      for (bool gapped : {false, true})
        for (std::int32_t latent : {512, 48}) {
          WriteCase c{
              .latent = latent, .rope = latent / 8 / 16 * 16, .format = format, .dtype = dtype, .gapped = gapped};
          if (c.rope == 0) c.rope = 16;
          // Division by a power of two is exact, so that there is one right answer.
          if (format == KvFormat::fp8_e4m3) c.kv_scale = gapped ? 0.25f : 2.0f;
          c.by_address = latent == 48;
          Writing writing(c, run_seed());
          std::vector<std::byte> got, want;
          const Status status = write_kv(backend, writing.args(got));
          ASSERT_TRUE(status.ok()) << status.message();
          write_kv_oracle(writing.args(want));
          expect_same_bytes(got, want, describe(c));
        }
}

TEST_F(WriteKv, RoundsTiesToEvenAndSaturates) {
  const double values[] = {1 + 0x1p-8,  1 + 3 * 0x1p-8,
                           1 + 0x1p-11, 1 + 3 * 0x1p-11,
                           17,          19,
                           -17,         449,
                           464,         480,
                           -1e4,        1e30,
                           0.0,         -0.0,
                           0x1p-9,      0x1p-10,
                           0x1.8p-10,   0x1p-24,
                           0x1.8p-24,   0x1p-25,
                           1e-8,        65504.,
                           INFINITY,    -INFINITY};
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3}) {
    const WriteCase c{.tokens = 2, .format = format, .dtype = Dtype::f32};
    Writing writing(c, 3);
    for (std::size_t i = 0; i < std::size(values); ++i) {
      writing.set(1, static_cast<std::int64_t>(i), values[i]);
      writing.set(1, 512 + static_cast<std::int64_t>(i), values[i]);
    }
    std::vector<std::byte> got, want;
    ASSERT_TRUE(write_kv(backend, writing.args(got)).ok());
    write_kv_oracle(writing.args(want));
    expect_same_bytes(got, want, describe(c));
  }
}

TEST_F(WriteKv, KeepsNanNan) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3}) {
    const WriteCase c{.tokens = 2, .format = format, .dtype = Dtype::f32};
    Writing writing(c, 3);
    writing.set(1, 7, NAN);
    std::vector<std::byte> cache;
    const WriteKvArgs args = writing.args(cache);
    ASSERT_TRUE(write_kv(backend, args).ok());
    const auto item = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
    const std::int64_t slot = writing.slots()[1];
    EXPECT_TRUE(std::isnan(load(kv_element_dtype(format), cache.data() + (slot * args.kv_cache.stride[1] + 7) * item)))
        << kv_format_name(format);
  }
}

// Wherever it is in its group.
TEST_F(WriteKv, ScalesADsMlaGroupByItsLargestNumberBesideANan) {
  for (const std::int64_t column : {0, 60, 127}) {
    const WriteCase c{.tokens = 2, .format = KvFormat::fp8_ds_mla, .dtype = Dtype::f32};
    Writing writing(c, 3);
    for (std::int64_t d = 0; d < 128; ++d) writing.set(1, d, d == 50 ? -700.0 : 1.0);
    writing.set(1, column, NAN);
    std::vector<std::byte> cache;
    const WriteKvArgs args = writing.args(cache);
    ASSERT_TRUE(write_kv(backend, args).ok());
    const std::int64_t slot = writing.slots()[1];
    const std::byte* token = &cache[static_cast<std::size_t>(slot / c.page_size * args.kv_cache.stride[0] +
                                                             slot % c.page_size * args.kv_cache.stride[1])];
    EXPECT_NEAR(load(Dtype::f32, token + 512), 700.0 / 448, 1e-6) << "a NaN at " << column;
    EXPECT_EQ(load(Dtype::fp8_e4m3, token + 50), -448) << "a NaN at " << column;
    EXPECT_TRUE(std::isnan(load(Dtype::fp8_e4m3, token + column))) << "a NaN at " << column;
  }
}

// Any scale: the stored byte is one of the nearest to value / scale, as closely as fp32 can tell.
TEST_F(WriteKv, StoresTheNearestFp8OfScaledValues) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32})
    for (float kv_scale : {0.37f, 1.1f, 0.013f}) {
      const WriteCase c{.format = KvFormat::fp8_e4m3, .dtype = dtype, .kv_scale = kv_scale};
      Writing writing(c, run_seed());
      std::vector<std::byte> got, want;
      ASSERT_TRUE(write_kv(backend, writing.args(got)).ok());
      write_kv_oracle(writing.args(want));
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << describe(c) << " byte " << i;
    }
}

TEST_F(WriteKv, GivesEveryDsMlaGroupItsOwnScale) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32})
    for (bool gapped : {false, true}) {
      const WriteCase c{.format = KvFormat::fp8_ds_mla, .dtype = dtype, .gapped = gapped, .spread = 3};
      Writing writing(c, run_seed());
      for (std::int64_t d = 128; d < 256; ++d) writing.set(1, d, 0);  // a group of zeros
      for (std::int64_t d = 256; d < 384; ++d) writing.set(2, d, 1e-3 * static_cast<double>(d));
      std::vector<std::byte> got, want;
      const WriteKvArgs args = writing.args(got);
      ASSERT_TRUE(write_kv(backend, args).ok());
      write_kv_oracle(writing.args(want));
      const DecodeProblem problem{.heads = 1, .kv_format = KvFormat::fp8_ds_mla};
      std::vector<double> got_values(576), want_values(576);
      for (std::size_t i = 0; i < writing.slots().size(); ++i) {
        const std::int64_t slot = writing.slots()[i];
        if (slot < 0) continue;
        const std::int64_t offset =
            slot / c.page_size * args.kv_cache.stride[0] + slot % c.page_size * args.kv_cache.stride[1];
        for (std::int64_t group = 0; group < 4; ++group) {
          const double got_scale = load(Dtype::f32, &got[offset + 512 + group * 4]);
          const double want_scale = load(Dtype::f32, &want[offset + 512 + group * 4]);
          ASSERT_NEAR(got_scale, want_scale, want_scale * 2.4e-7)
              << describe(c) << " token " << i << " group " << group;
        }
        load_kv_token(problem, &got[offset], 1, got_values.data());
        load_kv_token(problem, &want[offset], 1, want_values.data());
        for (std::size_t d = 0; d < 576; ++d) {
          // One e4m3 step at a tie; the rope part has to be exact.
          const double allowed = d < 512 ? std::fabs(want_values[d]) / 8 + 1e-30 : 0;
          ASSERT_NEAR(got_values[d], want_values[d], allowed) << describe(c) << " token " << i << " column " << d;
        }
      }
      const std::int64_t differing =
          std::inner_product(got.begin(), got.end(), want.begin(), std::int64_t{0}, std::plus<>(),
                             [](std::byte a, std::byte b) { return std::int64_t{a != b}; });
      EXPECT_LE(differing, static_cast<std::int64_t>(got.size()) / 500)
          << describe(c) << ": more than a few ties differ";
    }
}

TEST_F(WriteKv, ScaleOfAnEmptyDsMlaGroupIsTheSmallestNormalNumber) {
  Writing writing({.tokens = 2, .format = KvFormat::fp8_ds_mla, .dtype = Dtype::bf16}, 5);
  for (std::int64_t d = 0; d < 128; ++d) writing.set(1, d, 0);
  std::vector<std::byte> cache;
  const WriteKvArgs args = writing.args(cache);
  ASSERT_TRUE(write_kv(backend, args).ok());
  const std::int64_t offset = writing.slots()[1] * 656;
  EXPECT_EQ(load(Dtype::f32, &cache[offset + 512]), static_cast<double>(FLT_MIN));
  for (std::int64_t d = 0; d < 128; ++d) ASSERT_EQ(load(Dtype::fp8_e4m3, &cache[offset + d]), 0);
}

TEST_F(WriteKv, LeavesEverythingElseAlone) {
  for (KvFormat format : kFormats) {
    const WriteCase c{.format = format, .gapped = true};
    Writing writing(c, run_seed());
    std::vector<std::byte> got;
    const WriteKvArgs args = writing.args(got);
    ASSERT_TRUE(write_kv(backend, args).ok());
    const auto item = static_cast<std::int64_t>(dtype_bytes(args.kv_cache.dtype));
    std::vector<bool> live(got.size(), false);
    for (std::int64_t slot : writing.slots()) {
      if (slot < 0) continue;
      const std::int64_t first =
          (slot / c.page_size * args.kv_cache.stride[0] + slot % c.page_size * args.kv_cache.stride[1]) * item;
      std::fill_n(live.begin() + first, args.kv_cache.shape[2] * item, true);
    }
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(live[i] || got[i] == kUntouched) << describe(c) << " byte " << i;
  }
}

TEST_F(WriteKv, OfNothingDoesNothing) {
  for (KvFormat format : kFormats) {
    Writing writing({.tokens = 0, .format = format}, 1);
    std::vector<std::byte> cache;
    WriteKvArgs args = writing.args(cache);
    std::byte none;
    args.kv_c.data = args.k_pe.data = &none;
    const Status status = write_kv(backend, args);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(std::all_of(cache.begin(), cache.end(), [](std::byte b) { return b == kUntouched; }));
  }
}

}  // namespace
}  // namespace latte::testkit
