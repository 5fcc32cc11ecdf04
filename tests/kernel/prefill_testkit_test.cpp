// The prefill half of the test kit, checked apart from any kernel.
#include <cmath>
#include <set>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/prefill_grid.hpp"
#include "testkit/run_prefill.hpp"

namespace latte::testkit {
namespace {

PrefillCase small_case() {
  PrefillCase c;
  c.requests = {{3, 5}, {2, 0}, {0, 4}, {4, 2}};
  c.heads = 3;
  c.qk_width = 32;
  c.v_width = 16;
  c.q_layout = c.k_layout = c.v_layout = c.out_layout = c.lse_layout = Layout::gapped;
  return c;
}

double element(const ConstTensorView& view, std::int64_t i, std::int64_t j, std::int64_t k) {
  const std::int64_t offset = i * view.stride[0] + j * view.stride[1] + k;
  return load(view.dtype, view.bytes() + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype)));
}

// The formula written out once more, for one row.
struct Row {
  std::vector<double> out;
  double lse;
};
Row plain_row(const PrefillBatch& batch, std::int64_t token, std::int32_t head, std::int64_t kv_begin,
              std::int64_t kv_end) {
  const PrefillCase& c = batch.description();
  const PrefillArgs args = batch.args();
  Row row{std::vector<double>(static_cast<std::size_t>(c.v_width)), 0};
  double sum = 0;
  for (std::int64_t t = kv_begin; t < kv_end; ++t) {
    double score = 0;
    for (std::int64_t d = 0; d < c.qk_width; ++d)
      score += element(args.q, token, head, d) * element(args.k, t, head, d);
    const double weight = std::exp(score * static_cast<double>(args.scale));
    sum += weight;
    for (std::int64_t d = 0; d < c.v_width; ++d)
      row.out[static_cast<std::size_t>(d)] += weight * element(args.v, t, head, d);
  }
  for (double& value : row.out) value /= sum;
  row.lse = std::log(sum);
  return row;
}

void expect_row(const OracleResult& oracle, std::int64_t token, std::int32_t head, const Row& want) {
  for (std::size_t d = 0; d < want.out.size(); ++d) EXPECT_NEAR(oracle.out_row(token, head)[d], want.out[d], 1e-12);
  EXPECT_NEAR(oracle.lse_at(token, head), want.lse, 1e-12);
}

TEST(PrefillOracle, IsTheFormulaRowByRow) {
  const PrefillBatch batch(small_case());
  const OracleResult oracle =
      prefill_oracle(batch.description().problem(), batch.lengths(), batch.args(), PrefillMath::half);
  ASSERT_EQ(oracle.tokens, 9);
  for (std::int32_t head = 0; head < 3; ++head) {
    for (std::int64_t j = 0; j < 3; ++j) expect_row(oracle, j, head, plain_row(batch, j, head, 0, 3 + j));
    // No KV, and fewer KV tokens than query tokens: rows that see nothing.
    for (std::int64_t token : {3, 4, 5, 6}) {
      EXPECT_EQ(oracle.lse_at(token, head), -INFINITY);
      EXPECT_EQ(oracle.out_row(token, head)[7], 0);
    }
    expect_row(oracle, 7, head, plain_row(batch, 7, head, 9, 10));
    expect_row(oracle, 8, head, plain_row(batch, 8, head, 9, 11));
  }
}

TEST(PrefillOracle, WithoutAMaskSeesEverything) {
  PrefillCase c = small_case();
  c.mask = Mask::none;
  const PrefillBatch batch(c);
  const OracleResult oracle = prefill_oracle(c.problem(), batch.lengths(), batch.args(), PrefillMath::half);
  for (std::int32_t head = 0; head < 3; ++head) {
    expect_row(oracle, 0, head, plain_row(batch, 0, head, 0, 5));
    expect_row(oracle, 5, head, plain_row(batch, 5, head, 9, 11));
  }
}

// fp8 tensors under scales are tensors of other numbers.
TEST(PrefillOracle, AppliesTheScalesOfEachHead) {
  PrefillCase c = small_case();
  c.dtype = Dtype::fp8_e4m3;
  c.scale_form = ScaleForm::per_head;
  const PrefillBatch batch(c);
  const PrefillArgs scaled = batch.args();
  const OracleResult oracle = prefill_oracle(c.problem(), batch.lengths(), scaled, PrefillMath::half);
  for (std::int32_t head = 0; head < 3; ++head) {
    PrefillArgs plain = scaled;
    plain.scale = scaled.scale * scaled.q_scale.ptr[head] * scaled.k_scale.ptr[head];
    plain.q_scale = plain.k_scale = plain.v_scale = {};
    const OracleResult other = prefill_oracle(c.problem(), batch.lengths(), plain, PrefillMath::half);
    EXPECT_NEAR(oracle.lse_at(2, head), other.lse_at(2, head), 1e-5);
    EXPECT_NEAR(oracle.out_row(2, head)[3], other.out_row(2, head)[3] * static_cast<double>(scaled.v_scale.ptr[head]),
                1e-5);
  }
  EXPECT_NE(scaled.q_scale.ptr[0], scaled.q_scale.ptr[1]);
}

TEST(PrefillOracle, RoundsWhatIsQuantisedOnEntry) {
  PrefillCase c = small_case();
  c.math = PrefillMath::fp8;
  const PrefillBatch batch(c);
  const OracleResult half = prefill_oracle(c.problem(), batch.lengths(), batch.args(), PrefillMath::half);
  const OracleResult fp8 = prefill_oracle(c.problem(), batch.lengths(), batch.args(), PrefillMath::fp8);
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < half.out.size(); ++i) {
    difference += std::pow(half.out[i] - fp8.out[i], 2);
    norm += std::pow(half.out[i], 2);
  }
  EXPECT_GT(std::sqrt(difference / norm), 5e-3);
  EXPECT_LT(std::sqrt(difference / norm), 0.1);
}

// Context is nothing but more tokens before the new ones.
TEST(PrefillOracle, TakesContextLikeEarlierTokens) {
  PrefillCase c;
  c.heads = 2;
  c.requests = {{3, 8}, {2, 6}};
  const PrefillBatch batch(c);
  const OracleResult whole = prefill_oracle(c.problem(), batch.lengths(), batch.args(), PrefillMath::half);

  ExpandedContext context;
  context.requests.resize(2);
  const PrefillArgs all = batch.args();
  const std::int32_t older[] = {5, 4};
  for (std::int32_t b = 0; b < 2; ++b) {
    context.requests[b].tokens = older[b];
    for (std::int32_t t = 0; t < older[b]; ++t)
      for (std::int32_t head = 0; head < 2; ++head) {
        for (std::int32_t d = 0; d < c.qk_width; ++d)
          context.requests[b].k.push_back(element(all.k, 8 * b + t, head, d));
        for (std::int32_t d = 0; d < c.v_width; ++d)
          context.requests[b].v.push_back(element(all.v, 8 * b + t, head, d));
      }
  }
  PrefillCase tail = c;
  tail.requests = {{3, 3}, {2, 2}};
  const PrefillBatch rest(tail);
  PrefillArgs args = rest.args();
  args.q = all.q;
  // Tokens 5..7 of the first request and 4..5 of the second, one behind the other.
  const auto pick = [&](const ConstTensorView& from, const ConstTensorView& to, std::int64_t width) {
    const std::int64_t tokens[] = {5, 6, 7, 12, 13};
    for (std::int64_t t = 0; t < 5; ++t)
      for (std::int64_t head = 0; head < 2; ++head)
        for (std::int64_t d = 0; d < width; ++d)
          store(Dtype::bf16, element(from, tokens[t], head, d),
                const_cast<std::byte*>(to.bytes()) + (t * to.stride[0] + head * to.stride[1] + d) * 2);
  };
  pick(all.k, args.k, c.qk_width);
  pick(all.v, args.v, c.v_width);
  const OracleResult joined = prefill_oracle(tail.problem(), rest.lengths(), args, PrefillMath::half, context);
  for (std::size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(joined.out[i], whole.out[i], 1e-12);
  for (std::size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(joined.lse[i], whole.lse[i], 1e-12);
}

TEST(PrefillBatch, HoldsNanWhereNothingMayBeRead) {
  const PrefillBatch batch(small_case());
  const PrefillArgs args = batch.args();
  ASSERT_EQ(args.k.shape[0], 13) << "11 tokens and two spare ones";
  for (std::int64_t token : {5, 8, 11, 12}) EXPECT_TRUE(std::isnan(element(args.k, token, 1, 3))) << token;
  for (std::int64_t token : {0, 4, 9, 10}) EXPECT_FALSE(std::isnan(element(args.k, token, 1, 3))) << token;
  EXPECT_TRUE(std::isnan(element(args.q, 9, 0, 0)));
  EXPECT_TRUE(std::isnan(element(args.q, 0, 0, 32))) << "the gap behind a row";
}

TEST(PrefillBatch, GuardBandsNoticeWritesOutsideTheRows) {
  PrefillBatch batch(small_case());
  EXPECT_FALSE(batch.guard_damage());
  store(Dtype::bf16, 1.0, batch.args().out.bytes() + 9 * batch.args().out.stride[0] * 2);
  EXPECT_TRUE(batch.guard_damage());
}

TEST(PrefillBatch, ReorderedAndRelaidKeepEveryValue) {
  const PrefillBatch batch(small_case());
  const std::int32_t order[] = {3, PrefillBatch::kPadding, 0};
  const PrefillBatch other = batch.reordered(order);
  EXPECT_EQ(element(other.args().q, 1, 2, 3), element(batch.args().q, 6, 2, 3));
  EXPECT_EQ(element(other.args().k, 2, 1, 31), element(batch.args().k, 0, 1, 31));
  PrefillCase dense_case = small_case();
  dense_case.q_layout = dense_case.k_layout = dense_case.v_layout = Layout::transposed;
  const PrefillBatch moved = batch.relaid(dense_case);
  EXPECT_EQ(element(moved.args().v, 10, 2, 15), element(batch.args().v, 10, 2, 15));
}

TEST(PrefillCase, CountsTheWorkOfAPromptAsHalfTheSquare) {
  PrefillCase c;
  c.heads = 128;
  c.requests = {{8192, 8192}};
  EXPECT_NEAR(c.flops() / (128.0 * 320 * 8192 * 8192), 1, 2e-4);
  c.mask = Mask::none;
  EXPECT_EQ(c.flops(), 2.0 * 128 * 320 * 8192 * 8192);
  c.heads = 1;
  c.mask = Mask::causal;
  c.requests = {{2, 5, 10}, {3, 1}};
  EXPECT_EQ(c.visible_pairs(), 4 + 5 + 20 + 1);
}

TEST(PrefillGrid, HasEveryKindOfCaseAndNamesThemApart) {
  for (GridSize size : {GridSize::quick, GridSize::full}) {
    std::set<std::string> names;
    std::set<std::int32_t> heads;
    std::set<Dtype> dtypes;
    std::set<Mask> masks;
    std::set<PrefillMath> maths;
    std::set<ScaleForm> forms;
    int context = 0, longer = 0, blind = 0, without_lse = 0;
    for (const PrefillCase& c : prefill_grid(size)) {
      names.insert(c.name());
      heads.insert(c.heads);
      dtypes.insert(c.dtype);
      masks.insert(c.mask);
      maths.insert(c.math);
      if (c.has_scales()) forms.insert(c.scale_form);
      context += c.context_tokens() > 0;
      without_lse += !c.with_lse;
      for (const PrefillRequest& request : c.requests) {
        longer += request.kv_tokens > request.query_tokens;
        blind += request.kv_tokens < request.query_tokens;
      }
    }
    EXPECT_EQ(names.size(), prefill_grid(size).size());
    for (std::int32_t h : {1, 3, 16, 24, 128}) EXPECT_TRUE(heads.contains(h)) << h;
    EXPECT_EQ(dtypes.size(), 4u);
    EXPECT_EQ(masks.size(), 2u);
    EXPECT_EQ(maths.size(), 3u);
    EXPECT_EQ(forms.size(), 3u);
    EXPECT_GT(context, 3);
    EXPECT_GT(longer, 3);
    EXPECT_GT(blind, 3);
    EXPECT_GT(without_lse, 3);
  }
}

TEST(PrefillGrid, RandomCasesStaySmall) {
  for (std::uint64_t seed = 1; seed < 500; ++seed) {
    const PrefillCase c = random_prefill_case(seed);
    EXPECT_LT(c.heads * c.visible_pairs(), 6e6) << c.name();
    EXPECT_EQ(c.name(), random_prefill_case(seed).name());
  }
}

}  // namespace
}  // namespace latte::testkit
