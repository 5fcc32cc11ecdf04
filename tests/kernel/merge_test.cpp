// merge against the oracle, in every format and with every kind of emptiness.
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class Merge : public ::testing::Test {
 protected:
  Backend backend = open_backend();
};
class MergedDecode : public EachKernel {};

struct MergeShape {
  std::int64_t tokens = 5;
  std::int32_t heads = 3;
  std::int32_t latent = 48;
};

Tolerance merge_tolerance(Dtype out_dtype) {
  const DecodeCase c{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = out_dtype};
  return c.tolerance(0);
}

// A partial with memory; lse drawn around `lse_mean`, and one row in `empty_one_in` saw nothing.
class RandomPartial {
 public:
  RandomPartial(const MergeShape& shape, Dtype dtype, Layout layout, double lse_mean, std::int32_t empty_one_in,
                Rng& rng)
      : out_(layout, shape.tokens, shape.tokens, shape.heads, shape.latent, dtype),
        lse_(layout, shape.tokens, shape.tokens, shape.heads, 1, Dtype::f32) {
    const auto item = static_cast<std::int64_t>(dtype_bytes(dtype));
    for (std::int64_t token = 0; token < shape.tokens; ++token)
      for (std::int32_t head = 0; head < shape.heads; ++head) {
        const bool empty = empty_one_in > 0 && rng.chance(empty_one_in);
        auto* row = const_cast<std::byte*>(out_.row(token, head));
        for (std::int32_t d = 0; d < shape.latent; ++d) store(dtype, empty ? 0 : rng.normal(), row + d * item);
        store(Dtype::f32, empty ? -INFINITY : lse_mean + rng.normal(), const_cast<std::byte*>(lse_.row(token, head)));
      }
  }

  TensorView out() const { return out_.view(); }
  TensorView lse() const {
    TensorView view = lse_.view();
    view.rank = 2;
    return view;
  }
  Partial partial() const { return {out(), lse()}; }

 private:
  GuardedTensor out_, lse_;
};

// Merges into guarded outputs and expects agreement with the oracle.
void expect_merged(const Backend& backend, const std::vector<RandomPartial>& parts, const MergeShape& shape,
                   Dtype out_dtype, Layout layout, bool with_lse = true) {
  std::vector<Partial> partials;
  for (const RandomPartial& part : parts) partials.push_back(part.partial());
  GuardedTensor out(layout, shape.tokens, shape.tokens, shape.heads, shape.latent, out_dtype);
  GuardedTensor lse(layout, shape.tokens, shape.tokens, shape.heads, 1, Dtype::f32);
  TensorView lse_view = lse.view();
  lse_view.rank = 2;
  const Status status =
      merge(backend, {.partials = partials, .out = out.view(), .lse = with_lse ? lse_view : TensorView{}});
  ASSERT_TRUE(status.ok()) << status.message();
  const Comparison result = compare(out.view(), with_lse ? ConstTensorView(lse_view) : ConstTensorView(),
                                    merge_oracle(partials), merge_tolerance(out_dtype));
  EXPECT_TRUE(result.ok) << parts.size() << " partials, latent " << shape.latent << ", out " << dtype_name(out_dtype)
                         << ": " << result.message;
  EXPECT_FALSE(out.damage()) << *out.damage();
  EXPECT_FALSE(lse.damage() && with_lse) << *lse.damage();
}

TEST_F(Merge, AgreesWithTheOracleInEveryFormat) {
  Rng rng(run_seed());
  for (std::int32_t latent : {512, 256, 80, 16, 1040})
    for (Dtype in : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (Dtype out : {Dtype::f32, Dtype::bf16, Dtype::f16})
        for (std::size_t count : {1, 2, 3, 17}) {
          const MergeShape shape{.latent = latent};
          const Layout layout = rng.pick(std::vector{Layout::dense, Layout::gapped, Layout::transposed});
          std::vector<RandomPartial> parts;
          for (std::size_t i = 0; i < count; ++i) parts.emplace_back(shape, in, layout, rng.normal() * 3, 4, rng);
          expect_merged(backend, parts, shape, out, layout, !rng.chance(4));
        }
}

// Widths that are no multiple of 16 may be refused, but never half served.
TEST_F(Merge, OfAnOddWidthIsRightOrRefused) {
  Rng rng(run_seed());
  for (std::int32_t latent : {1, 7, 21, 520, 1037})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      const MergeShape shape{.latent = latent};
      std::vector<RandomPartial> parts;
      for (int i = 0; i < 2; ++i) parts.emplace_back(shape, dtype, Layout::dense, 0, 0, rng);
      const Partial partials[] = {parts[0].partial(), parts[1].partial()};
      GuardedTensor out(Layout::dense, shape.tokens, shape.tokens, shape.heads, latent, dtype);
      const Status status = merge(backend, {.partials = partials, .out = out.view()});
      EXPECT_FALSE(out.damage()) << "latent " << latent << ": " << *out.damage();
      if (status.ok())
        expect_merged(backend, parts, shape, dtype, Layout::gapped);
      else
        EXPECT_EQ(status.code(), Code::unsupported) << status.message();
    }
}

TEST_F(Merge, JoinsPartialsOfDifferentFormatsAndStrides) {
  Rng rng(run_seed());
  const MergeShape shape{.tokens = 9, .heads = 12, .latent = 512};
  std::vector<RandomPartial> parts;
  parts.emplace_back(shape, Dtype::f32, Layout::dense, 0, 0, rng);
  parts.emplace_back(shape, Dtype::bf16, Layout::transposed, 1, 3, rng);
  parts.emplace_back(shape, Dtype::f16, Layout::gapped, -1, 2, rng);
  expect_merged(backend, parts, shape, Dtype::f32, Layout::gapped);
}

// A rank that went wrong must not pass for one that saw nothing.
TEST_F(Merge, PassesANanOn) {
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> ones(16, 1.0f), out(16, 0.0f);
    const float lse[] = {0.0f, broken};
    float merged = 0;
    const auto values = dense(static_cast<const void*>(ones.data()), Dtype::f32, {1, 1, 16});
    const Partial partials[] = {{values, dense(static_cast<const void*>(&lse[0]), Dtype::f32, {1, 1})},
                                {values, dense(static_cast<const void*>(&lse[1]), Dtype::f32, {1, 1})}};
    ASSERT_TRUE(merge(backend, {.partials = partials,
                                .out = dense(out.data(), Dtype::f32, {1, 1, 16}),
                                .lse = dense(&merged, Dtype::f32, {1, 1})}));
    EXPECT_TRUE(std::isnan(merged)) << merged;
    EXPECT_TRUE(std::isnan(out[0])) << out[0];
  }
}

TEST_F(Merge, OfEmptyPartialsIsEmpty) {
  Rng rng(run_seed());
  for (std::size_t count : {1, 2, 40}) {
    std::vector<RandomPartial> parts;
    for (std::size_t i = 0; i < count; ++i) parts.emplace_back(MergeShape{}, Dtype::f32, Layout::dense, 0, 1, rng);
    expect_merged(backend, parts, {}, Dtype::bf16, Layout::dense);
  }
}

TEST_F(Merge, WithAnEmptyPartialChangesNothing) {
  Rng rng(run_seed());
  const RandomPartial full({}, Dtype::f32, Layout::dense, 2, 0, rng), empty({}, Dtype::f32, Layout::dense, 0, 1, rng);
  std::vector<float> out(5 * 3 * 48, NAN), lse(5 * 3, NAN);
  const Partial parts[] = {empty.partial(), full.partial(), empty.partial()};
  const Status status = merge(backend, {.partials = parts,
                                        .out = dense(static_cast<void*>(out.data()), Dtype::f32, {5, 3, 48}),
                                        .lse = dense(static_cast<void*>(lse.data()), Dtype::f32, {5, 3})});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(std::memcmp(out.data(), full.out().data, out.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(lse.data(), full.lse().data, lse.size() * sizeof(float)), 0);
}

TEST_F(Merge, SurvivesSumsThatWouldOverflow) {
  Rng rng(run_seed());
  for (double lse : {1000.0, -1000.0, 3e4}) {
    std::vector<RandomPartial> parts;
    for (int i = 0; i < 3; ++i) parts.emplace_back(MergeShape{}, Dtype::f32, Layout::dense, lse, 0, rng);
    parts.emplace_back(MergeShape{}, Dtype::f32, Layout::dense, 0, 0, rng);
    std::vector<Partial> partials;
    for (const RandomPartial& part : parts) partials.push_back(part.partial());
    GuardedTensor out(Layout::dense, 5, 5, 3, 48, Dtype::f32);
    ASSERT_TRUE(merge(backend, {.partials = partials, .out = out.view()}).ok());
    // fp32 differences of numbers as large as these are good to a few units of their last place.
    const double tolerance = 2e-6 + std::fabs(lse) * 2.4e-7;
    const Comparison result = compare(out.view(), {}, merge_oracle(partials), {.out = tolerance, .lse = 1});
    EXPECT_TRUE(result.ok) << "lse around " << lse << ": " << result.message;
  }
}

TEST_F(Merge, WorksInPlace) {
  Rng rng(run_seed());
  const RandomPartial first({}, Dtype::f32, Layout::gapped, 0, 3, rng),
      second({}, Dtype::f32, Layout::dense, 0, 3, rng);
  for (int target = 0; target < 2; ++target) {
    const Partial parts[] = {first.partial(), second.partial()};
    const OracleResult oracle = merge_oracle(parts);
    const RandomPartial& place = target == 0 ? first : second;
    const Status status = merge(backend, {.partials = parts, .out = place.out(), .lse = place.lse()});
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison result = compare(place.out(), place.lse(), oracle, merge_tolerance(Dtype::f32));
    EXPECT_TRUE(result.ok) << "into partial " << target << ": " << result.message;
  }
}

TEST_F(Merge, OfNoRowsDoesNothing) {
  float byte = 7;
  const TensorView out = dense(static_cast<void*>(&byte), Dtype::f32, {0, 3, 48});
  const TensorView lse = dense(static_cast<void*>(&byte), Dtype::f32, {0, 3});
  const Partial parts[] = {{out, lse}};
  EXPECT_TRUE(merge(backend, {.partials = parts, .out = out, .lse = lse}).ok());
  EXPECT_EQ(byte, 7);
}

// Context parallelism: two ranks hold halves of a request's tokens, and the merge of their answers is the whole answer.
TEST_P(MergedDecode, OfTwoHalvesOfACacheIsTheWhole) {
  constexpr std::int32_t kPage = 16, kCut = 6 * kPage, kTokens = 205;
  DecodeCase shape;
  shape.requests = {{1, kTokens}};
  shape.page_size = kPage;
  for (DecodeCase c : served_formats(shape)) {
    c.out_dtype = Dtype::f32;
    PreparedCase whole(c);
    const auto& problem = c.problem();
    auto builder = MetadataBuilder::create(backend, problem, c.limits()).value();
    std::vector<float> outs[2], lses[2];
    std::vector<Partial> partials;
    for (int half = 0; half < 2; ++half) {
      outs[half].resize(16 * 512);
      lses[half].resize(16);
      const std::int32_t seq_len[] = {half == 0 ? kCut : kTokens - kCut}, query_start[] = {0, 1};
      DecodeArgs args = whole.batch.args();
      args.out = dense(static_cast<void*>(outs[half].data()), Dtype::f32, {1, 16, 512});
      args.lse = dense(static_cast<void*>(lses[half].data()), Dtype::f32, {1, 16});
      if (half == 1) {
        args.pages.block_table += kCut / kPage;
        args.pages.max_pages -= kCut / kPage;
      }
      const Status status = decode(builder.build(0, {seq_len, query_start, {}}).value(), args);
      ASSERT_TRUE(status.ok()) << status.message();
      partials.push_back({args.out, args.lse});
    }
    const DecodeArgs args = whole.batch.args();
    ASSERT_TRUE(merge(backend, {.partials = partials, .out = args.out, .lse = args.lse}).ok());
    const Comparison result = compare(args.out, args.lse, whole.oracle, c.tolerance(whole.oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, MergedDecode, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
