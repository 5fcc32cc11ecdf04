// Every one of the 256 codes of e4m3, normal, subnormal, zero and NaN, of either sign, on its way through a kernel.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr std::int32_t kPage = 0;
constexpr PageTable kOnePage{.block_table = &kPage, .block_table_stride = 1, .max_pages = 1};

// A token of codes, 0 up to 255 and again.
std::vector<std::uint8_t> all_codes() {
  std::vector<std::uint8_t> codes(kWidth);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  return codes;
}

double value_of(const std::uint8_t& code) { return load(Dtype::fp8_e4m3, reinterpret_cast<const std::byte*>(&code)); }

class E4m3 : public EachKernel {};

TEST_P(E4m3, IsGatheredExactly) {
  const std::vector<std::uint8_t> codes = all_codes();
  const std::int32_t out_start[] = {0, 1};
  std::vector<float> out(kWidth);
  GatherKvArgs args;
  args.kv_cache = dense(static_cast<const void*>(codes.data()), Dtype::fp8_e4m3, {1, 1, kWidth});
  args.kv_format = KvFormat::fp8_e4m3;
  args.pages = kOnePage;
  args.out_start = out_start;
  args.tokens = 1;
  args.out = dense(static_cast<void*>(out.data()), Dtype::f32, {1, kWidth});
  const Status status = gather_kv(backend, args);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const double truth = value_of(codes[i]);
    EXPECT_EQ(std::signbit(out[i]), codes[i] >= 0x80) << "code " << int{codes[i]};
    EXPECT_TRUE(std::isnan(truth) ? std::isnan(out[i]) : out[i] == truth) << "code " << int{codes[i]} << ": " << out[i];
  }
}

// The output of a single token is its values. A few heads and many: kernels may have products of their own for a few.
// Narrow tokens, too: kernels may convert so many values at a time that only wide ones have as many.
TEST_P(E4m3, OfASingleTokenIsTheOutput) {
  const std::int32_t seq_lens[] = {1}, query_start[] = {0, 1};
  for (const auto& [latent, rope] : {std::pair{512, 64}, {64, 16}, {16, 16}}) {
    const std::int64_t width = latent + rope;
    for (const std::int32_t heads : {3, 40}) {
      const DecodeProblem problem{.heads = heads,
                                  .latent = latent,
                                  .rope = rope,
                                  .out_dtype = Dtype::f32,
                                  .kv_format = KvFormat::fp8_e4m3,
                                  .page_size = 1};
      auto builder = MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_kv_tokens = 1}).value();
      const auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start}).value();
      const std::vector<std::uint16_t> q(static_cast<std::size_t>(heads * width), 0x3f80);
      for (std::int32_t first = 0; first < 256; first += latent) {
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < codes.size(); ++i) {
          codes[i] = static_cast<std::uint8_t>(static_cast<std::size_t>(first) + i);
          if (std::isnan(value_of(codes[i]))) codes[i] = 0;
        }
        std::vector<float> out(static_cast<std::size_t>(heads * latent), NAN);
        const Status status = decode(step, {.q = dense(q.data(), Dtype::bf16, {1, heads, width}),
                                            .kv_cache = dense(codes.data(), Dtype::fp8_e4m3, {1, 1, width}),
                                            .pages = kOnePage,
                                            .out = dense(out.data(), Dtype::f32, {1, heads, latent}),
                                            .scale = 1e-3f});
        ASSERT_TRUE(status.ok()) << status.message();
        for (std::size_t i = 0; i < out.size(); ++i) {
          const std::uint8_t code = codes[i % static_cast<std::size_t>(latent)];
          EXPECT_EQ(out[i], value_of(code)) << "code " << int{code} << ", " << heads << " heads, " << latent << " wide";
        }
      }
    }
  }
}

// With a scale for every 128 of them. The product has more digits than bf16, and where a group's are all alike whatever
// is lost of one is lost of all: at scores of 1000 the LSE shows it. One head, a few, and many.
TEST_P(E4m3, ScaledByGroupsKeepTheLseOfLargeScores) {
  const float scales[] = {0.0022371328f, 0.0011171328f, 0.0022323f, 0.00067771f};
  std::vector<std::byte> token(656);
  double latent = 0;
  for (std::size_t i = 0; i < 512; ++i) {
    token[i] = std::byte{0x7e};
    latent += 448.0 * scales[i / 128];
  }
  std::memcpy(&token[512], scales, sizeof scales);
  for (std::size_t i = 0; i < 64; ++i) store(Dtype::bf16, 0.5, &token[528 + 2 * i]);
  const std::int32_t seq_lens[] = {1}, query_start[] = {0, 1};
  for (const std::int32_t heads : {1, 3, 16, 40}) {
    const DecodeProblem problem{
        .heads = heads, .out_dtype = Dtype::f32, .kv_format = KvFormat::fp8_ds_mla, .page_size = 1};
    auto builder = MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_kv_tokens = 1}).value();
    const auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start}).value();
    const std::vector<std::uint16_t> q(static_cast<std::size_t>(heads * kWidth), 0x3f80);
    std::vector<float> out(static_cast<std::size_t>(heads * kLatent), NAN), lse(static_cast<std::size_t>(heads), NAN);
    const float scale = 2.6f;
    const Status status =
        decode(step, {.q = dense(q.data(), Dtype::bf16, {1, heads, kWidth}),
                      .kv_cache = dense(token.data(), kv_element_dtype(problem.kv_format), {1, 1, 656}),
                      .pages = kOnePage,
                      .out = dense(out.data(), Dtype::f32, {1, heads, kLatent}),
                      .lse = dense(lse.data(), Dtype::f32, {1, heads}),
                      .scale = scale});
    ASSERT_TRUE(status.ok()) << status.message();
    for (const float got : lse) EXPECT_NEAR(got, scale * (latent + 64 * 0.5), 1e-3) << heads << " heads";
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, E4m3, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
