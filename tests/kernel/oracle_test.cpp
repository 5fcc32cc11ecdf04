// The reference against numbers worked out by hand: whatever judges the kernels is judged here.
#include "testkit/oracle.hpp"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-12;

TEST(Codec, Bf16RoundsToNearestEven) {
  EXPECT_EQ(encode_bf16(1.0), 0x3f80);
  EXPECT_EQ(encode_bf16(-2.0), 0xc000);
  EXPECT_EQ(encode_bf16(1.0 + 0x1p-8), 0x3f80) << "a tie goes down to the even neighbour";
  EXPECT_EQ(encode_bf16(1.0 + 3 * 0x1p-8), 0x3f82) << "a tie goes up to the even neighbour";
  EXPECT_EQ(encode_bf16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81) << "beyond float's precision, but above the tie";
  EXPECT_EQ(encode_bf16(0x1p-133), 0x0001) << "the smallest subnormal";
  EXPECT_EQ(encode_bf16(1e39), 0x7f80);
  EXPECT_EQ(encode_bf16(-kInfinity), 0xff80);
  EXPECT_TRUE(std::isnan(decode_bf16(encode_bf16(std::nan("")))));
}

TEST(Codec, F16RoundsToNearestEven) {
  EXPECT_EQ(encode_f16(1.0), 0x3c00);
  EXPECT_EQ(encode_f16(65504.0), 0x7bff);
  EXPECT_EQ(encode_f16(65519.99), 0x7bff);
  EXPECT_EQ(encode_f16(65520.0), 0x7c00);
  EXPECT_EQ(encode_f16(0x1p-24), 0x0001);
  EXPECT_EQ(encode_f16(0x1p-25), 0x0000);
  EXPECT_EQ(encode_f16(1.5 * 0x1p-24), 0x0002);
  EXPECT_EQ(encode_f16(-0.0), 0x8000);
  EXPECT_EQ(encode_f16(2047.0 / 2048.0 * 0x1p-14), 0x0400) << "the largest tie of the subnormals becomes normal";
}

TEST(Codec, E4m3SaturatesAndHasNoInfinity) {
  EXPECT_EQ(encode_e4m3(1.0), 0x38);
  EXPECT_EQ(encode_e4m3(448.0), 0x7e);
  EXPECT_EQ(encode_e4m3(449.0), 0x7e);
  EXPECT_EQ(encode_e4m3(-1e30), 0xfe);
  EXPECT_EQ(encode_e4m3(kInfinity), 0x7e);
  EXPECT_EQ(encode_e4m3(17.0), 0x58) << "a tie between 16 and 18";
  EXPECT_EQ(encode_e4m3(19.0), 0x5a) << "a tie between 18 and 20";
  EXPECT_EQ(encode_e4m3(0x1p-9), 0x01);
  EXPECT_EQ(encode_e4m3(0x1p-10), 0x00);
  EXPECT_EQ(encode_e4m3(std::nan("")) & 0x7f, 0x7f);
  EXPECT_EQ(decode_e4m3(0x7e), 448.0);
  EXPECT_TRUE(std::isnan(decode_e4m3(0x7f)));
  EXPECT_TRUE(std::isnan(decode_e4m3(0xff)));
}

TEST(Codec, EveryNumberSurvivesDecodingAndEncoding) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    if (!std::isnan(decode_bf16(b))) {
      ASSERT_EQ(encode_bf16(decode_bf16(b)), b);
      const std::uint32_t widened = bits << 16;
      float value;
      std::memcpy(&value, &widened, sizeof value);
      ASSERT_EQ(decode_bf16(b), static_cast<double>(value));
    }
    if (!std::isnan(decode_f16(b))) {
      ASSERT_EQ(encode_f16(decode_f16(b)), b);
    }
    if (bits < 0x100 && !std::isnan(decode_e4m3(static_cast<std::uint8_t>(bits)))) {
      ASSERT_EQ(encode_e4m3(decode_e4m3(static_cast<std::uint8_t>(bits))), bits);
    }
  }
}

// One request, one head, latent 1 and rope 1, fp32, pages of two tokens in the order 2, 0.
struct TinyDecode {
  DecodeProblem problem{.heads = 1,
                        .latent = 1,
                        .rope = 1,
                        .q_dtype = Dtype::f32,
                        .out_dtype = Dtype::f32,
                        .kv_format = KvFormat::f32,
                        .page_size = 2,
                        .mask = Mask::causal};
  std::vector<float> cache = {5, 0, NAN, NAN, NAN, NAN, NAN, NAN, 1, 0, 3, 1};  // tokens: (1,0), (3,1), (5,0)
  std::vector<std::int32_t> table = {2, 0, 1 << 30};
  std::vector<std::int32_t> seq_lens = {3};
  std::vector<std::int32_t> query_start;
  std::vector<std::int32_t> visible;
  std::vector<float> q;

  OracleResult run(std::vector<float> queries, float scale = 1) {
    q = std::move(queries);
    const auto tokens = static_cast<std::int32_t>(q.size() / 2);
    query_start = {0, tokens};
    DecodeArgs args;
    args.q = dense(static_cast<const void*>(q.data()), Dtype::f32, {tokens, 1, 2});
    args.kv_cache = dense(static_cast<const void*>(cache.data()), Dtype::f32, {3, 2, 2});
    args.pages.block_table = table.data();
    args.pages.block_table_stride = args.pages.max_pages = 3;
    args.scale = scale;
    return decode_oracle(problem, {seq_lens, query_start, visible}, args);
  }
};

TEST(Oracle, SoftmaxOverThreeTokensMatchesHandArithmetic) {
  // q = (0, 2): scores 0, 2, 0 at scale 1; values 1, 3, 5.
  const OracleResult result = TinyDecode().run({0, 2});
  const double e2 = std::exp(2.0);
  EXPECT_NEAR(result.out[0], (1 + 3 * e2 + 5) / (2 + e2), kTiny);
  EXPECT_NEAR(result.lse[0], std::log(2 + e2), kTiny);
  EXPECT_NEAR(result.max_abs_score, 2.0, kTiny);
}

TEST(Oracle, ScaleMultipliesScoresOnly) {
  const OracleResult result = TinyDecode().run({0, 2}, 0.5f);
  const double e1 = std::exp(1.0);
  EXPECT_NEAR(result.out[0], (6 + 3 * e1) / (2 + e1), kTiny);
  EXPECT_NEAR(result.lse[0], std::log(2 + e1), kTiny);
}

TEST(Oracle, CausalMaskIsAlignedToTheEnd) {
  // Two zero queries: the first sees two tokens, the second all three, each the plain mean.
  const OracleResult result = TinyDecode().run({0, 0, 0, 0});
  EXPECT_NEAR(result.out[0], 2, kTiny);
  EXPECT_NEAR(result.lse[0], std::log(2.0), kTiny);
  EXPECT_NEAR(result.out[1], 3, kTiny);
  EXPECT_NEAR(result.lse[1], std::log(3.0), kTiny);
}

TEST(Oracle, WithoutMaskEveryQuerySeesEverything) {
  TinyDecode tiny;
  tiny.problem.mask = Mask::none;
  const OracleResult result = tiny.run({0, 0, 0, 0});
  EXPECT_NEAR(result.out[0], 3, kTiny);
  EXPECT_NEAR(result.out[1], 3, kTiny);
}

TEST(Oracle, BoundsReplaceTheMask) {
  TinyDecode tiny;
  tiny.visible = {1, 0};
  const OracleResult result = tiny.run({0, 0, 0, 0});
  EXPECT_EQ(result.out[0], 1);
  EXPECT_EQ(result.lse[0], 0);
  EXPECT_EQ(result.out[1], 0);
  EXPECT_EQ(result.lse[1], -kInfinity);
}

TEST(Oracle, RowsThatSeeNothingAreZeroAndMinusInfinity) {
  TinyDecode tiny;
  tiny.seq_lens = {1};
  const OracleResult masked = tiny.run({0, 0, 0, 0});
  EXPECT_EQ(masked.out[0], 0);
  EXPECT_EQ(masked.lse[0], -kInfinity);
  EXPECT_EQ(masked.out[1], 1) << "the second of two queries sees the one token";
  tiny.seq_lens = {0};
  const OracleResult empty = tiny.run({0, 0});
  EXPECT_EQ(empty.out[0], 0);
  EXPECT_EQ(empty.lse[0], -kInfinity);
}

TEST(Oracle, Fp8TokensAreScaled) {
  const std::byte token[2] = {std::byte{0x38}, std::byte{0xc0}};  // 1, -2
  double values[2];
  load_kv_token({.heads = 1, .latent = 1, .rope = 1, .kv_format = KvFormat::fp8_e4m3}, token, 0.25, values);
  EXPECT_EQ(values[0], 0.25);
  EXPECT_EQ(values[1], -0.5);
}

TEST(Oracle, DsMlaTokensHaveFourScalesAndBf16Rope) {
  std::vector<std::byte> token(656, std::byte{0x38});
  for (int group = 0; group < 4; ++group) store(Dtype::f32, 1 << group, token.data() + 512 + 4 * group);
  for (int d = 0; d < 64; ++d) store(Dtype::bf16, -d, token.data() + 528 + 2 * d);
  std::vector<double> values(576);
  load_kv_token({.heads = 1, .kv_format = KvFormat::fp8_ds_mla}, token.data(), 99, values.data());
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[127], 1);
  EXPECT_EQ(values[128], 2);
  EXPECT_EQ(values[511], 8);
  EXPECT_EQ(values[512], 0);
  EXPECT_EQ(values[575], -63);
}

TEST(Oracle, MergeWeighsPartialsByTheirSums) {
  const float a = 4, b = 8, zero = 0, lse_a = 0, lse_b = std::log(3.0f), nothing = -INFINITY;
  const auto partial = [](const float* out, const float* lse) {
    return Partial{dense(static_cast<const void*>(out), Dtype::f32, {1, 1, 1}),
                   dense(static_cast<const void*>(lse), Dtype::f32, {1, 1})};
  };
  const Partial parts[] = {partial(&a, &lse_a), partial(&zero, &nothing), partial(&b, &lse_b)};
  const OracleResult result = merge_oracle(parts);
  EXPECT_NEAR(result.out[0], 0.25 * 4 + 0.75 * 8, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4.0), 1e-6);
  const Partial empty[] = {partial(&zero, &nothing), partial(&zero, &nothing)};
  EXPECT_EQ(merge_oracle(empty).out[0], 0);
  EXPECT_EQ(merge_oracle(empty).lse[0], -kInfinity);
}

TEST(Oracle, WriteKvPutsTokensIntoTheirSlots) {
  const std::vector<float> latent = {1, 2, 1000, 4}, rope = {-1, -2, -3, -4};
  const std::vector<std::int64_t> slots = {3, -1, 0, 2};
  std::vector<std::uint8_t> cache(8, 0xaa);
  write_kv_oracle({.kv_c = dense(static_cast<const void*>(latent.data()), Dtype::f32, {4, 1}),
                   .k_pe = dense(static_cast<const void*>(rope.data()), Dtype::f32, {4, 1}),
                   .slot_mapping = slots,
                   .kv_cache = dense(static_cast<void*>(cache.data()), Dtype::fp8_e4m3, {2, 2, 2}),
                   .kv_format = KvFormat::fp8_e4m3,
                   .kv_scale = {.value = 2}});
  const std::vector<std::uint8_t> expected = {0x7e, 0xbc, 0xaa, 0xaa, 0x40, 0xc0, 0x30, 0xb0};
  EXPECT_EQ(cache, expected);
}

TEST(Oracle, WriteKvScalesDsMlaGroupsByTheirLargestValue) {
  std::vector<float> latent(512, 0), rope(64, 1);
  latent[5] = -44.8f;
  latent[6] = 22.4f;
  const std::vector<std::int64_t> slots = {0};
  std::vector<std::byte> cache(656, std::byte{0xaa});
  write_kv_oracle({.kv_c = dense(static_cast<const void*>(latent.data()), Dtype::f32, {1, 512}),
                   .k_pe = dense(static_cast<const void*>(rope.data()), Dtype::f32, {1, 64}),
                   .slot_mapping = slots,
                   .kv_cache = dense(static_cast<void*>(cache.data()), Dtype::u8, {1, 1, 656}),
                   .kv_format = KvFormat::fp8_ds_mla});
  EXPECT_FLOAT_EQ(static_cast<float>(load(Dtype::f32, cache.data() + 512)), 0.1f);
  EXPECT_EQ(load(Dtype::f32, cache.data() + 516), static_cast<double>(FLT_MIN)) << "a group of zeros";
  EXPECT_EQ(cache[5], std::byte{0xfe});
  EXPECT_EQ(cache[6], std::byte{0x76});  // 224
  EXPECT_EQ(cache[200], std::byte{0});
  EXPECT_EQ(load(Dtype::bf16, cache.data() + 528), 1);
}

}  // namespace
}  // namespace latte::testkit
