// The rest of the test kit: a check that cannot fail would be worth nothing, so each one is made to fail here.
#include <algorithm>
#include <cmath>
#include <set>

#include <gtest/gtest.h>

#include "testkit/batch.hpp"
#include "testkit/codec.hpp"
#include "testkit/compare.hpp"
#include "testkit/grid.hpp"
#include "testkit/oracle.hpp"

namespace latte::testkit {
namespace {

DecodeCase small_case() {
  DecodeCase c;
  c.requests = {{2, 70}, {1, 0}, {1, 33}};
  c.heads = 3;
  c.latent = 48;
  c.rope = 16;
  c.page_size = 16;
  c.out_dtype = Dtype::f32;
  c.out_layout = c.lse_layout = c.cache_layout = Layout::gapped;
  return c;
}

// A batch whose outputs are the oracle's, rounded to their format.
struct Answered {
  explicit Answered(const DecodeCase& c) : batch(c), oracle(decode_oracle(c.problem(), batch.lengths(), batch.args())) {
    for (std::int64_t token = 0; token < oracle.tokens; ++token)
      for (std::int32_t head = 0; head < c.heads; ++head) {
        for (std::int32_t d = 0; d < c.latent; ++d) set_out(token, head, d, oracle.out_row(token, head)[d]);
        set_lse(token, head, oracle.lse_at(token, head));
      }
  }

  void set_out(std::int64_t token, std::int32_t head, std::int32_t d, double value) {
    const TensorView out = batch.args().out;
    const auto item = static_cast<std::int64_t>(dtype_bytes(out.dtype));
    store(out.dtype, value, out.bytes() + (token * out.stride[0] + head * out.stride[1] + d) * item);
  }
  void set_lse(std::int64_t token, std::int32_t head, double value) {
    const TensorView lse = batch.args().lse;
    store(Dtype::f32, value, lse.bytes() + (token * lse.stride[0] + head * lse.stride[1]) * 4);
  }
  Comparison compared() const {
    return compare(batch.args().out, batch.args().lse, oracle, batch.description().tolerance(oracle.max_abs_score));
  }

  DecodeBatch batch;
  OracleResult oracle;
};

TEST(Compare, AcceptsTheOracleItself) {
  const Comparison result = Answered(small_case()).compared();
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_LT(result.out_error, 1e-6);
  EXPECT_LT(result.lse_error, 1e-6);
}

TEST(Compare, FindsOneWrongRowAmongMany) {
  DecodeCase c = small_case();
  c.requests.assign(400, {1, 20});
  Answered answered(c);
  for (std::int32_t d = 0; d < c.latent; ++d) answered.set_out(317, 2, d, 1.02 * answered.oracle.out_row(317, 2)[d]);
  const Comparison result = answered.compared();
  EXPECT_LT(result.out_error, result.tolerance.out) << "the batch as a whole looks fine";
  EXPECT_FALSE(result.ok);
  EXPECT_EQ(result.worst.token, 317);
  EXPECT_EQ(result.worst.head, 2);
}

TEST(Compare, RejectsErrorsSpreadOverTheBatch) {
  const DecodeCase c = small_case();
  Answered answered(c);
  for (std::int64_t token = 0; token < 4; ++token)
    for (std::int32_t head = 0; head < c.heads; ++head)
      for (std::int32_t d = 0; d < c.latent; ++d)
        answered.set_out(token, head, d, 1.005 * answered.oracle.out_row(token, head)[d]);
  EXPECT_FALSE(answered.compared().ok);
}

// A batch of one row may be off by half as much again, and what is told is what was applied.
TEST(Compare, TellsTheLimitItAppliesToTheBatch) {
  for (const std::int32_t tokens : {1, 40}) {
    DecodeCase c = small_case();
    c.heads = 1;
    c.requests = {{tokens, 70}};
    for (const bool above : {false, true}) {
      Answered answered(c);
      const Comparison exact = answered.compared();
      EXPECT_DOUBLE_EQ(exact.out_allowed, exact.tolerance.out * (tokens == 1 ? 1.5 : 1 + 0.5 / 40));
      const double factor = 1 + exact.out_allowed * (above ? 1.01 : 0.99);
      for (std::int64_t token = 0; token < tokens; ++token)
        for (std::int32_t d = 0; d < c.latent; ++d)
          answered.set_out(token, 0, d, factor * answered.oracle.out_row(token, 0)[d]);
      const Comparison result = answered.compared();
      EXPECT_EQ(result.ok, !above) << result.message;
      EXPECT_EQ(result.out_error > result.out_allowed, above);
      EXPECT_EQ(result.out_allowed, exact.out_allowed);
    }
  }
}

TEST(Compare, RejectsNanAnywhere) {
  Answered answered(small_case());
  answered.set_out(0, 1, 47, NAN);
  EXPECT_FALSE(answered.compared().ok);
}

// A file may expect infinities. Where one is missing that is told, and where all are there the rest is compared.
TEST(Compare, WantsInfinitiesAsTheyAre) {
  for (const bool missing : {false, true}) {
    Answered answered(small_case());
    const DecodeCase& c = answered.batch.description();
    answered.oracle.out[static_cast<std::size_t>((3 * c.heads + 1) * c.latent + 5)] = INFINITY;
    if (!missing) answered.set_out(3, 1, 5, INFINITY);
    const Comparison exact = answered.compared();
    EXPECT_EQ(exact.ok, !missing) << exact.message;
    if (missing) {
      EXPECT_EQ(exact.worst.token, 3);
      EXPECT_EQ(exact.worst.head, 1);
      EXPECT_EQ(exact.worst.column, 5);
    }
    for (std::int64_t token = 0; token < 4; ++token)
      for (std::int32_t head = 0; head < c.heads; ++head)
        for (std::int32_t d = 0; d < c.latent; ++d)
          if (std::isfinite(answered.oracle.out_row(token, head)[d]))
            answered.set_out(token, head, d, 1.005 * answered.oracle.out_row(token, head)[d]);
    EXPECT_FALSE(answered.compared().ok) << "errors spread over the batch";
  }
}

TEST(Compare, RejectsAnythingButZeroInRowsThatSeeNothing) {
  Answered answered(small_case());
  answered.set_out(2, 0, 0, 1e-30);
  const Comparison result = answered.compared();
  EXPECT_FALSE(result.ok);
  EXPECT_EQ(result.worst.token, 2);
}

TEST(Compare, RejectsWrongLse) {
  for (double wrong : {0.0, -1e30, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Answered empty_row(small_case());
    empty_row.set_lse(2, 1, wrong);
    EXPECT_FALSE(empty_row.compared().ok) << wrong;
  }
  Answered answered(small_case());
  answered.set_lse(0, 0, answered.oracle.lse_at(0, 0) + 2e-3);
  const Comparison result = answered.compared();
  EXPECT_FALSE(result.ok);
  EXPECT_EQ(result.worst.column, -1);
  EXPECT_NE(result.message.find("lse"), std::string::npos);
}

TEST(Compare, RejectsOutputsThatWereNeverWritten) {
  Answered answered(small_case());
  answered.batch.poison_outputs();
  EXPECT_FALSE(answered.compared().ok);
}

TEST(Batch, GuardBandsNoticeWritesOutsideTheRows) {
  Answered answered(small_case());
  DecodeBatch& batch = answered.batch;
  EXPECT_FALSE(batch.guard_damage()) << *batch.guard_damage();
  const TensorView out = batch.args().out, lse = batch.args().lse;
  const std::int64_t last = out.shape[0] * out.stride[0] * 4;
  for (std::int64_t offset : {std::int64_t{-1}, out.shape[2] * 4, last - out.stride[0] * 4, last + 16}) {
    const std::byte before = out.bytes()[offset];
    out.bytes()[offset] ^= std::byte{1};
    EXPECT_TRUE(batch.guard_damage()) << "offset " << offset;
    out.bytes()[offset] = before;
  }
  EXPECT_FALSE(batch.guard_damage());
  lse.bytes()[4] ^= std::byte{1};
  EXPECT_TRUE(batch.guard_damage()) << "between two entries of the LSE";
}

TEST(Batch, EverySlotThatNoRequestUsesIsNan) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
    DecodeCase c = small_case();
    c.kv_format = format;
    c.latent = 512;
    c.rope = 64;
    const DecodeBatch batch(c);
    const ConstTensorView cache = batch.args().kv_cache;
    std::int64_t clean = 0, poisoned = 0;
    std::vector<double> token(576);
    for (std::int64_t page = 0; page < cache.shape[0]; ++page)
      for (std::int64_t slot = 0; slot < cache.shape[1]; ++slot) {
        const auto item = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
        load_kv_token(c.problem(), cache.bytes() + (page * cache.stride[0] + slot * cache.stride[1]) * item, 1,
                      token.data());
        const auto nans = std::count_if(token.begin(), token.end(), [](double value) { return std::isnan(value); });
        ASSERT_TRUE(nans == 0 || nans == 576);
        (nans == 0 ? clean : poisoned) += 1;
      }
    EXPECT_EQ(clean, c.kv_tokens());
    EXPECT_GT(poisoned, 3 * c.page_size);
  }
}

TEST(Batch, FastFillIsFiniteEverywhere) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
    DecodeCase c;
    c.requests = {{1, 100}, {1, 30}};
    c.kv_format = format;
    const DecodeBatch batch(c, Fill::fast);
    const ConstTensorView cache = batch.args().kv_cache;
    std::vector<double> token(576);
    std::set<std::vector<double>> tokens;
    for (std::int64_t slot = 0; slot < cache.shape[0] * cache.shape[1]; ++slot) {
      load_kv_token(c.problem(),
                    cache.bytes() + slot * cache.stride[1] * static_cast<std::int64_t>(dtype_bytes(cache.dtype)),
                    c.kv_scale, token.data());
      double squares = 0;
      for (double value : token) squares += value * value;
      EXPECT_GT(squares, 150);
      EXPECT_LT(squares, 1200);
      tokens.insert(token);
    }
    EXPECT_EQ(tokens.size(), static_cast<std::size_t>(cache.shape[0] * cache.shape[1])) << "no two tokens alike";
  }
}

TEST(Batch, SplitAndJoinedQueriesUseTheStridesEnginesHave) {
  DecodeCase c = small_case();
  c.query_form = QueryForm::split;
  const DecodeBatch batch(c);
  const DecodeArgs args = batch.args();
  EXPECT_TRUE(args.q.empty());
  EXPECT_LT(args.q_nope.stride[0], args.q_nope.stride[1]) << "heads are outermost";
  EXPECT_GT(args.q_pe.stride[1], c.rope) << "a slice of wider rows";
}

TEST(Case, CountsWorkAsTheAnchorsDo) {
  DecodeCase c;
  c.requests = {{1, 1000}, {4, 10}};
  c.heads = 16;
  EXPECT_EQ(c.flops(), 2.0 * 16 * (1000 + 40) * (576 + 512));
  EXPECT_EQ(c.bytes(), 1010.0 * 1152 + 5 * 16 * 1152 + 5 * 16 * 1024);
  c.kv_format = KvFormat::fp8_ds_mla;
  EXPECT_EQ(c.bytes(), 1010.0 * 656 + 5 * 16 * 1152 + 5 * 16 * 1024);
}

TEST(Case, NameHoldsTheBatchSpec) {
  DecodeCase c;
  c.requests = {{1, 1024}, {1, 1024}, {4, 100}};
  EXPECT_EQ(c.spec(), "2q1s1024_1q4s100");
  EXPECT_NE(c.name().find("spec=2q1s1024_1q4s100"), std::string::npos);
  EXPECT_EQ(c.name().find('\n'), std::string::npos);
}

TEST(Case, TheCoarsestFormatSetsTheTolerance) {
  DecodeCase c{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = Dtype::f32};
  EXPECT_DOUBLE_EQ(c.tolerance(4).out, 1e-5);
  EXPECT_DOUBLE_EQ(c.tolerance(4).lse, 5e-5);
  c.out_dtype = Dtype::bf16;
  EXPECT_DOUBLE_EQ(c.tolerance(4).out, 3e-3);
  EXPECT_DOUBLE_EQ(c.tolerance(4).lse, 5e-5);
  c.q_dtype = Dtype::f16;
  EXPECT_DOUBLE_EQ(c.tolerance(4).lse, 2e-4);
  c.kv_format = KvFormat::fp8_ds_mla;
  EXPECT_DOUBLE_EQ(c.tolerance(4).out, 5e-3);
  EXPECT_DOUBLE_EQ(c.tolerance(4).lse, 1e-3);
}

TEST(Grid, CoversWhatItPromises) {
  for (GridSize size : {GridSize::quick, GridSize::full}) {
    std::set<std::int32_t> heads, pages, queries, widths;
    std::set<KvFormat> formats;
    std::set<Dtype> q_dtypes, out_dtypes;
    std::set<int> masks;
    std::int32_t longest = 0;
    for (const DecodeCase& c : case_grid(size)) {
      heads.insert(c.heads);
      pages.insert(c.page_size);
      formats.insert(c.kv_format);
      q_dtypes.insert(c.q_dtype);
      out_dtypes.insert(c.out_dtype);
      widths.insert(c.latent);
      masks.insert(c.bounds == Bounds::random ? 2 : static_cast<int>(c.mask));
      for (const RequestLengths& request : c.requests) {
        queries.insert(request.query_tokens);
        longest = std::max(longest, request.kv_tokens);
      }
    }
    for (std::int32_t h : {1, 3, 8, 12, 16, 24, 48, 64, 100, 128}) EXPECT_TRUE(heads.contains(h)) << h;
    for (std::int32_t p : {1, 7, 16, 64, 100, 128}) EXPECT_TRUE(pages.contains(p)) << p;
    for (std::int32_t q = 0; q <= 9; ++q) EXPECT_TRUE(queries.contains(q)) << q;
    EXPECT_EQ(formats.size(), 5u);
    EXPECT_EQ(q_dtypes.size(), 4u);
    EXPECT_EQ(out_dtypes.size(), 3u);
    EXPECT_EQ(masks.size(), 3u);
    EXPECT_GE(widths.size(), 3u);
    EXPECT_GT(longest, 2000);
  }
}

}  // namespace
}  // namespace latte::testkit
