// The small things everything stands on: status values, tensor views, checked integers, the softmax state.
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/checked.hpp"
#include "core/softmax_state.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte {
namespace {

TEST(Status, IsOkUnlessItSaysOtherwise) {
  EXPECT_TRUE(Status{}.ok());
  EXPECT_TRUE(static_cast<bool>(Status{}));
  EXPECT_EQ(Status{}.code(), Code::ok);
  EXPECT_EQ(Status{}.message(), "ok");
}

TEST(Status, SaysFieldExpectedAndGot) {
  const Status status(Code::invalid_argument, "q", "last stride 1", "2");
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(static_cast<bool>(status));
  EXPECT_EQ(status.field(), "q");
  EXPECT_EQ(status.expected(), "last stride 1");
  EXPECT_EQ(status.got(), "2");
  EXPECT_EQ(status.message(), "invalid_argument: q: expected last stride 1, got 2");
}

TEST(Status, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(Code::internal); ++code) names.insert(code_name(static_cast<Code>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Code::internal) + 1);
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(ResultType, HoldsAValueOrTheReasonWhyNot) {
  Result<int> good(7);
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good, 7);
  EXPECT_EQ(good.value(), 7);
  EXPECT_TRUE(good.status().ok());

  Result<int> bad(Status(Code::unsupported, "heads", "1", "2"));
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), Code::unsupported);
  try {
    (void)bad.value();
    FAIL() << "value() of an error must throw";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "unsupported: heads: expected 1, got 2");
  }
}

TEST(ResultType, ValueCanBeMovedOut) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(3));
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 3);
}

TEST(Tensor, DenseViewsAreRowMajor) {
  std::array<float, 24> data{};
  const TensorView view = dense(data.data(), Dtype::f32, {2, 3, 4});
  EXPECT_EQ(view.data, data.data());
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, kMaxRank>{2, 3, 4, 0}));
  EXPECT_EQ(view.stride, (std::array<std::int64_t, kMaxRank>{12, 4, 1, 0}));
  EXPECT_FALSE(view.empty());
  EXPECT_TRUE(TensorView{}.empty());
}

TEST(Tensor, StridesAre64Bit) {
  float one = 0;
  const TensorView view = dense(&one, Dtype::f32, {3, 1 << 20, 1 << 20});
  EXPECT_EQ(view.stride[0], std::int64_t{1} << 40);
}

TEST(Tensor, AWritableViewCanBeReadAsAConstOne) {
  std::array<float, 6> data{};
  TensorView view = dense(data.data(), Dtype::bf16, {2, 3});
  view.stride[0] = 17;
  const ConstTensorView read = view;
  EXPECT_EQ(read.data, view.data);
  EXPECT_EQ(read.dtype, Dtype::bf16);
  EXPECT_EQ(read.rank, 2);
  EXPECT_EQ(read.shape, view.shape);
  EXPECT_EQ(read.stride, view.stride);
}

TEST(Tensor, DtypesHaveTheirSizesAndNames) {
  EXPECT_EQ(dtype_bytes(Dtype::f32), 4u);
  EXPECT_EQ(dtype_bytes(Dtype::bf16), 2u);
  EXPECT_EQ(dtype_bytes(Dtype::f16), 2u);
  EXPECT_EQ(dtype_bytes(Dtype::fp8_e4m3), 1u);
  EXPECT_EQ(dtype_bytes(Dtype::u8), 1u);
  std::set<std::string> names;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3, Dtype::u8})
    names.insert(dtype_name(dtype));
  EXPECT_EQ(names.size(), 5u);
}

TEST(Problem, ATokenOfEveryFormatHasTheContractsSize) {
  const auto bytes = [](KvFormat format) {
    return kv_token_elements(format, 512, 64) * static_cast<std::int64_t>(dtype_bytes(kv_element_dtype(format)));
  };
  EXPECT_EQ(bytes(KvFormat::bf16), 1152);
  EXPECT_EQ(bytes(KvFormat::f16), 1152);
  EXPECT_EQ(bytes(KvFormat::f32), 2304);
  EXPECT_EQ(bytes(KvFormat::fp8_e4m3), 576);
  EXPECT_EQ(bytes(KvFormat::fp8_ds_mla), 656);
  EXPECT_EQ(kv_token_elements(KvFormat::bf16, 256, 64), 320);
}

TEST(Checked, SaysWhenAResultDoesNotFit) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  std::int64_t out = 0;
  EXPECT_TRUE(checked_add(kMax - 1, 1, out));
  EXPECT_EQ(out, kMax);
  EXPECT_FALSE(checked_add(kMax, 1, out));
  EXPECT_FALSE(checked_add(-kMax, -2, out));
  EXPECT_TRUE(checked_mul(std::int64_t{1} << 31, std::int64_t{1} << 31, out));
  EXPECT_EQ(out, std::int64_t{1} << 62);
  EXPECT_FALSE(checked_mul(std::int64_t{1} << 32, std::int64_t{1} << 31, out));
}

TEST(Checked, RoundsUpToMultiples) {
  static_assert(ceil_div(0, 16) == 0 && ceil_div(1, 16) == 1 && ceil_div(16, 16) == 1 && ceil_div(17, 16) == 2);
  static_assert(round_up(0, 64) == 0 && round_up(1, 64) == 64 && round_up(64, 64) == 64 && round_up(65, 7) == 70);
  EXPECT_EQ(ceil_div(std::int64_t{1} << 40, 3), 366503875926);
}

TEST(SoftmaxState, AnEmptyRowHasNoMass) { EXPECT_EQ(log_sum_exp(RowState{}), kNegInf); }

TEST(SoftmaxState, LogSumExpDoesNotDependOnTheReference) {
  // Scores 1 and 2 (log2 units): 2^1 + 2^2 = 6, whatever the sum is relative to.
  for (const float reference : {2.0f, 0.0f, -5.0f}) {
    const RowState state{reference, std::exp2(1 - reference) + std::exp2(2 - reference)};
    EXPECT_NEAR(log_sum_exp(state), std::log(6.0), 1e-6) << reference;
  }
}

TEST(SoftmaxState, ANanStaysOne) { EXPECT_TRUE(std::isnan(log_sum_exp(RowState{0.0f, NAN}))); }

}  // namespace
}  // namespace latte
