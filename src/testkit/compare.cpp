#include "testkit/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Values are of order one; below this an element's error is not worth a failure.
constexpr double kAbsoluteFloor = 1e-7;

const std::byte* at(const ConstTensorView& view, std::int64_t token, std::int64_t head) {
  return view.bytes() +
         (token * view.stride[0] + head * view.stride[1]) * static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

// NaN counts as infinitely wrong; equal infinities are no error.
double distance(double got, double want) {
  if (got == want) return 0;
  const double difference = std::fabs(got - want);
  return std::isnan(difference) ? kInfinity : difference;
}

class Comparer {
 public:
  Comparer(const OracleResult& oracle, const Tolerance& tolerance) : oracle_(oracle) {
    const auto rows = static_cast<double>(std::max<std::int64_t>(oracle.tokens * oracle.heads, 1));
    result_.tolerance = tolerance;
    result_.out_allowed = batch_factor(rows) * tolerance.out;
  }

  void out_row(std::int64_t token, std::int32_t head, const std::vector<double>& got) {
    const double* want = oracle_.out_row(token, head);
    double error = 0, norm = 0, worst_column_error = -1;
    std::int32_t worst_column = 0;
    for (std::int32_t d = 0; d < oracle_.latent; ++d) {
      const double e = distance(got[d], want[d]);
      error += e * e;
      if (std::isfinite(want[d])) norm += want[d] * want[d];  // an infinity is asked for as it is
      if (e > worst_column_error) {
        worst_column_error = e;
        worst_column = d;
      }
    }
    error_ += error;
    norm_ += norm;
    error = std::sqrt(error);
    norm = std::sqrt(norm);
    if (norm > 0) result_.row_error = std::max(result_.row_error, error / norm);
    // A row that sees nothing is exactly zero.
    const bool sees_nothing = oracle_.lse_at(token, head) == -kInfinity;
    const double floor = sees_nothing ? 0 : kAbsoluteFloor * std::sqrt(static_cast<double>(oracle_.latent));
    const double allowed = kRowFactor * result_.tolerance.out * norm + floor;
    note(error, allowed, {token, head, worst_column, got[worst_column], want[worst_column]}, "out row");
  }

  void lse(std::int64_t token, std::int32_t head, double got) {
    const double want = oracle_.lse_at(token, head);
    const double error = distance(got, want);
    result_.lse_error = std::max(result_.lse_error, error);
    note(error, want == -kInfinity ? 0 : result_.tolerance.lse, {token, head, -1, got, want}, "lse");
  }

  Comparison finish() {
    if (error_ > 0) result_.out_error = norm_ > 0 ? std::sqrt(error_ / norm_) : kInfinity;
    if (!(result_.out_error <= result_.out_allowed)) fail("out of the whole batch");
    return result_;
  }

 private:
  void note(double error, double allowed, const Worst& place, const char* what) {
    const double ratio = error == 0 ? 0 : allowed > 0 ? error / allowed : kInfinity;
    if (ratio > worst_ratio_) {
      worst_ratio_ = ratio;
      result_.worst = place;
      if (ratio > 1) fail(what);
    }
  }

  void fail(const char* what) {
    const Worst& w = result_.worst;
    std::ostringstream text;
    text.precision(9);
    text << what << " differs: token " << w.token << " head " << w.head;
    if (w.column >= 0) text << " column " << w.column;
    text << (w.column < 0 ? " lse" : "") << " got " << w.got << " want " << w.want << "; worst row error "
         << result_.row_error << " (allowed " << kRowFactor * result_.tolerance.out << "), lse error "
         << result_.lse_error << " (allowed " << result_.tolerance.lse << ")";
    if (result_.out_error > 0)
      text << ", batch error " << result_.out_error << " (allowed " << result_.out_allowed << ")";
    result_.ok = false;
    result_.message = text.str();
  }

  const OracleResult& oracle_;
  Comparison result_;
  double error_ = 0, norm_ = 0, worst_ratio_ = 0;
};

}  // namespace

Comparison compare(const ConstTensorView& out, const ConstTensorView& lse, const OracleResult& oracle,
                   const Tolerance& tolerance) {
  Comparer comparer(oracle, tolerance);
  std::vector<double> row(oracle.latent);
  for (std::int64_t token = 0; token < oracle.tokens; ++token) {
    for (std::int32_t head = 0; head < oracle.heads; ++head) {
      load_row(out.dtype, at(out, token, head), oracle.latent, row.data());
      comparer.out_row(token, head, row);
      if (!lse.empty()) comparer.lse(token, head, load(Dtype::f32, at(lse, token, head)));
    }
  }
  return comparer.finish();
}

OracleResult written(const ConstTensorView& out, const ConstTensorView& lse) {
  OracleResult result{.tokens = out.shape[0],
                      .heads = static_cast<std::int32_t>(out.shape[1]),
                      .latent = static_cast<std::int32_t>(out.shape[2])};
  result.out.resize(static_cast<std::size_t>(result.tokens * result.heads * result.latent));
  result.lse.resize(static_cast<std::size_t>(result.tokens * result.heads));
  for (std::int64_t row = 0; row < result.tokens * result.heads; ++row) {
    const std::int64_t token = row / result.heads, head = row % result.heads;
    load_row(out.dtype, at(out, token, head), result.latent,
             &result.out[static_cast<std::size_t>(row * result.latent)]);
    if (!lse.empty()) result.lse[static_cast<std::size_t>(row)] = load(lse.dtype, at(lse, token, head));
  }
  return result;
}

}  // namespace latte::testkit
