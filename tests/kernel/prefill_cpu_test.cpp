// Prefill pieces on every CPU kernel against fp64, from plans written by hand: splits of any kind, not only those that
// the planner makes. And gather_kv against the tokens it should find.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "backend/impl.hpp"
#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct PrefillShape {
  std::int32_t heads = 3, qk_width = 192, v_width = 128;
  std::vector<std::int32_t> query_lens{70}, kv_lens{200};
  Mask mask = Mask::causal;
  Dtype dtype = Dtype::bf16, out_dtype = Dtype::f32;
  std::int32_t splits = 1;
  bool per_head = false;  // scales of fp8

  PrefillProblem problem() const {
    PrefillProblem p;
    p.heads = heads, p.qk_width = qk_width, p.v_width = v_width;
    p.dtype = dtype, p.out_dtype = out_dtype, p.mask = mask;
    return p;
  }
  Limits limits() const {
    Limits l;
    l.max_requests = static_cast<std::int32_t>(query_lens.size());
    l.max_query_tokens = std::max(1, *std::max_element(query_lens.begin(), query_lens.end()));
    l.max_kv_tokens = std::max(1, *std::max_element(kv_lens.begin(), kv_lens.end()));
    return l;
  }
};

std::vector<std::int32_t> prefix_sums(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> start(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), start.begin() + 1);
  return start;
}

// Every tile cut into `splits` ranges as equal as blocks allow, some of them empty, dealt to the workers by turns.
class HandPlan {
 public:
  HandPlan(const PrefillShape& shape, const PlanConfig& config, std::int32_t workers) {
    const auto query_start = prefix_sums(shape.query_lens);
    std::vector<std::vector<WorkRecord>> dealt(static_cast<std::size_t>(workers));
    std::size_t next = 0;
    std::int32_t partial_rows = 0;
    reduce_indptr_.push_back(0);
    for (std::size_t b = 0; b < shape.query_lens.size(); ++b)
      for (std::int32_t head = 0; head < shape.heads; ++head)
        for (std::int32_t t = query_start[b]; t < query_start[b + 1]; t += config.row_tile) {
          const std::int32_t end = std::min(t + config.row_tile, query_start[b + 1]), base = head * query_start.back();
          std::int32_t extent = shape.kv_lens[b];
          if (shape.mask == Mask::causal) extent = std::max(0, extent - (query_start[b + 1] - end));
          const std::int32_t blocks = (extent + config.kv_block - 1) / config.kv_block;
          const auto tile = static_cast<std::int32_t>(reduce_final_.size());
          for (std::int32_t i = 0; i < shape.splits; ++i) {
            WorkRecord record{.request = static_cast<std::int32_t>(b),
                              .partial_row = -1,
                              .row_begin = base + t,
                              .row_end = base + end,
                              .kv_begin = std::min(extent, blocks * i / shape.splits * config.kv_block),
                              .kv_end = std::min(extent, blocks * (i + 1) / shape.splits * config.kv_block),
                              .kv_after = 0,
                              .tile = tile};
            record.kv_after = shape.kv_lens[b] - record.kv_end;
            if (shape.splits > 1) {
              record.partial_row = partial_rows;
              reduce_partial_.push_back(partial_rows);
              partial_rows += config.row_tile;
            }
            dealt[next++ % dealt.size()].push_back(record);
          }
          reduce_indptr_.push_back(static_cast<std::int32_t>(reduce_partial_.size()));
          reduce_final_.push_back({base + t, base + end});
        }
    indptr_.push_back(0);
    for (const auto& records : dealt) {
      records_.insert(records_.end(), records.begin(), records.end());
      indptr_.push_back(static_cast<std::int32_t>(records_.size()));
    }
    meta_[kMetaWorkers] = workers;
    meta_[kMetaRowTile] = config.row_tile;
    meta_[kMetaPartialRows] = partial_rows;
  }

  Plan plan() const {
    return {.work_meta_data = meta_,
            .work_indptr = indptr_,
            .work_info_set = records_,
            .reduce_indptr = reduce_indptr_,
            .reduce_final_map = reduce_final_,
            .reduce_partial_map = reduce_partial_};
  }
  PlanSizes sizes() const {
    PlanSizes sizes;
    sizes.tiles = static_cast<std::int64_t>(reduce_final_.size());
    sizes.records = static_cast<std::int64_t>(records_.size());
    sizes.partials = static_cast<std::int64_t>(reduce_partial_.size());
    sizes.partial_rows = meta_[kMetaPartialRows];
    return sizes;
  }

 private:
  std::vector<std::int32_t> meta_ = std::vector<std::int32_t>(kMetaFields), indptr_, reduce_indptr_, reduce_partial_;
  std::vector<WorkRecord> records_;
  std::vector<RowRange> reduce_final_;
};

// [tokens, heads, width] of random numbers with gaps; NaN in the gaps and in two rows before and behind.
class Tensor {
 public:
  Tensor(std::int32_t tokens, std::int32_t heads, std::int32_t width, Dtype dtype, Rng& rng)
      : width_(width),
        dtype_(dtype),
        head_stride_(width + 5),
        token_stride_(heads * head_stride_ + 3),
        memory_(static_cast<std::size_t>((tokens + 4) * token_stride_) * dtype_bytes(dtype), std::byte{0xff}) {
    for (std::int32_t t = 0; t < tokens; ++t)
      for (std::int32_t h = 0; h < heads; ++h)
        for (std::int32_t i = 0; i < width; ++i) store(dtype, rng.normal(), address(t, h, i));
    view_.data = memory_.data() + 2 * token_stride_ * static_cast<std::int64_t>(dtype_bytes(dtype));
    view_.dtype = dtype;
    view_.rank = 3;
    view_.shape = {tokens, heads, width};
    view_.stride = {token_stride_, head_stride_, 1};
  }

  double at(std::int32_t t, std::int32_t h, std::int32_t i) const {
    return load(dtype_, const_cast<Tensor*>(this)->address(t, h, i));
  }
  const TensorView& view() const { return view_; }
  void fill(std::byte value) { std::fill(memory_.begin(), memory_.end(), value); }
  // Whether everything but the rows themselves still has the value that fill() gave it.
  bool gaps_hold(std::byte value) const {
    std::vector<std::byte> rest = memory_;
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype_));
    for (std::int64_t t = 0; t < view_.shape[0]; ++t)
      for (std::int64_t h = 0; h < view_.shape[1]; ++h)
        std::memset(rest.data() + ((t + 2) * token_stride_ + h * head_stride_) * bytes, static_cast<int>(value),
                    static_cast<std::size_t>(width_ * bytes));
    return std::all_of(rest.begin(), rest.end(), [&](std::byte b) { return b == value; });
  }

 private:
  std::byte* address(std::int64_t t, std::int64_t h, std::int64_t i) {
    return memory_.data() +
           ((t + 2) * token_stride_ + h * head_stride_ + i) * static_cast<std::int64_t>(dtype_bytes(dtype_));
  }

  const std::int64_t width_;
  const Dtype dtype_;
  const std::int64_t head_stride_, token_stride_;
  std::vector<std::byte> memory_;
  TensorView view_;
};

struct Tolerance {
  double out, lse;
};
Tolerance tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return {1e-5, 1e-4};
    case Dtype::f16: return {6e-4, 2e-4};
    default: return {3e-3, 1e-3};
  }
}

class PrefillOnCpu : public EachKernel {
 protected:
  void expect_truth(const PrefillShape& shape) {
    const PrefillProblem problem = shape.problem();
    if (!backend.impl().choose(problem, shape.limits(), {}).ok()) return;
    SCOPED_TRACE(testing::Message() << "dtype " << dtype_name(shape.dtype) << " out " << dtype_name(shape.out_dtype)
                                    << " heads " << shape.heads << " widths " << shape.qk_width << "/" << shape.v_width
                                    << " mask " << mask_name(shape.mask) << " splits " << shape.splits << " queries "
                                    << testing::PrintToString(shape.query_lens) << " kv "
                                    << testing::PrintToString(shape.kv_lens) << " seed " << run_seed());
    Rng rng(run_seed());
    const auto query_start = prefix_sums(shape.query_lens), kv_start = prefix_sums(shape.kv_lens);
    const Tensor q(query_start.back(), shape.heads, shape.qk_width, shape.dtype, rng);
    const Tensor k(kv_start.back(), shape.heads, shape.qk_width, shape.dtype, rng);
    const Tensor v(kv_start.back(), shape.heads, shape.v_width, shape.dtype, rng);
    Tensor out(query_start.back(), shape.heads, shape.v_width, shape.out_dtype, rng);
    Tensor lse(query_start.back(), shape.heads, 1, Dtype::f32, rng);
    out.fill(std::byte{0xa7});
    lse.fill(std::byte{0xa7});

    std::vector<float> scales[3];
    for (auto& scale : scales)
      for (std::int32_t h = 0; h < shape.heads; ++h)
        scale.push_back(static_cast<float>(shape.dtype == Dtype::fp8_e4m3 ? 0.25 + rng.uniform() : 1.0));
    const auto scale_of = [&](std::size_t tensor, std::int32_t h) {
      return scales[tensor][static_cast<std::size_t>(shape.per_head ? h : 0)];
    };
    PrefillArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.view()};
    args.lse.rank = 2;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape.qk_width));
    Fp8Scale* const given[] = {&args.q_scale, &args.k_scale, &args.v_scale};
    for (std::size_t i = 0; i < 3; ++i) {
      if (shape.per_head)
        *given[i] = {.ptr = scales[i].data(), .per_head = true};
      else
        *given[i] = {.value = scales[i][0]};
    }
    run(shape, query_start, kv_start, args);

    double error = 0, norm = 0, worst_lse = 0;
    for (std::size_t b = 0; b < shape.query_lens.size(); ++b)
      for (std::int32_t t = query_start[b]; t < query_start[b + 1]; ++t)
        for (std::int32_t h = 0; h < shape.heads; ++h) {
          const std::int32_t all = shape.kv_lens[b];
          const std::int32_t seen = shape.mask == Mask::none ? all : std::max(0, all - (query_start[b + 1] - t) + 1);
          std::vector<double> scores(static_cast<std::size_t>(seen)), row(static_cast<std::size_t>(shape.v_width));
          double best = -kInfinity, sum = 0;
          for (std::int32_t j = 0; j < seen; ++j) {
            double s = 0;
            for (std::int32_t i = 0; i < shape.qk_width; ++i) s += q.at(t, h, i) * k.at(kv_start[b] + j, h, i);
            scores[static_cast<std::size_t>(j)] = s * args.scale * scale_of(0, h) * scale_of(1, h);
            best = std::max(best, scores[static_cast<std::size_t>(j)]);
          }
          for (double& s : scores) sum += s = std::exp(s - best);
          for (std::int32_t j = 0; j < seen; ++j)
            for (std::int32_t i = 0; i < shape.v_width; ++i)
              row[static_cast<std::size_t>(i)] += scores[static_cast<std::size_t>(j)] * v.at(kv_start[b] + j, h, i);
          for (std::int32_t i = 0; i < shape.v_width; ++i) {
            const double truth = seen ? row[static_cast<std::size_t>(i)] / sum * scale_of(2, h) : 0;
            const double got = out.at(t, h, i);
            ASSERT_TRUE(std::isfinite(got)) << "token " << t << " head " << h << " column " << i;
            ASSERT_TRUE(seen > 0 || got == 0) << "token " << t << " head " << h << " column " << i << ": " << got;
            error += (got - truth) * (got - truth), norm += truth * truth;
          }
          if (seen == 0)
            ASSERT_EQ(lse.at(t, h, 0), -kInfinity);
          else
            worst_lse = std::max(worst_lse, std::fabs(lse.at(t, h, 0) - (best + std::log(sum))));
        }
    const double allowed = std::max(tolerance(shape.dtype).out, tolerance(shape.out_dtype).out);
    EXPECT_LE(std::sqrt(error / std::max(norm, 1e-30)), allowed);
    EXPECT_LE(worst_lse, tolerance(shape.dtype).lse);
    EXPECT_TRUE(out.gaps_hold(std::byte{0xa7})) << "wrote beside the output";
    EXPECT_TRUE(lse.gaps_hold(std::byte{0xa7})) << "wrote beside the lse";
  }

 private:
  void run(const PrefillShape& shape, std::span<const std::int32_t> query_start, std::span<const std::int32_t> kv_start,
           const PrefillArgs& args) {
    backend::Impl& impl = backend.impl();
    backend::PrefillSetup setup{
        .problem = shape.problem(), .choice = impl.choose(shape.problem(), shape.limits(), {}).value(), .sizes = {}};
    const HandPlan plan(shape, setup.choice.plan, backend.workers());
    setup.sizes = plan.sizes();
    std::vector<std::byte> memory(impl.prefill_workspace_bytes(setup) + 256, std::byte{0xff});
    auto* workspace = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 255) / 256 * 256);
    const auto step = impl.make_prefill_step(setup).value();
    ASSERT_TRUE(step->publish(plan.plan(), {.query_start = query_start, .kv_start = kv_start}, nullptr).ok());
    ASSERT_TRUE(step->run(args, workspace).ok());
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, PrefillOnCpu, each_kernel(), kernel_test_name);

TEST_P(PrefillOnCpu, AgreesWithTruthForEveryDtype) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3})
    for (const Mask mask : {Mask::causal, Mask::none})
      for (const Dtype out : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        PrefillShape shape;
        shape.dtype = dtype, shape.mask = mask, shape.out_dtype = out;
        shape.per_head = mask == Mask::causal;
        expect_truth(shape);
      }
}

TEST_P(PrefillOnCpu, MixesLengths) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32})
    for (const Mask mask : {Mask::causal, Mask::none}) {
      PrefillShape shape;
      shape.heads = 2, shape.dtype = dtype, shape.mask = mask;
      shape.query_lens = {0, 1, 127, 40, 5, 129, 3, 300};
      shape.kv_lens = {17, 1, 127, 0, 3, 257, 130, 300};
      expect_truth(shape);
    }
}

TEST_P(PrefillOnCpu, TakesAnyMultipleOf16) {
  const std::int32_t widths[][2] = {{16, 16}, {48, 80}, {256, 128}, {80, 240}, {256, 256}, {576, 512}};
  for (const auto& [qk, v] : widths)
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}) {
      PrefillShape shape;
      shape.heads = 1, shape.qk_width = qk, shape.v_width = v, shape.dtype = dtype;
      shape.query_lens = {37, 20}, shape.kv_lens = {37, 151};
      expect_truth(shape);
    }
}

TEST_P(PrefillOnCpu, JoinsSplits) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32})
    for (const std::int32_t splits : {2, 5}) {
      PrefillShape shape;
      shape.dtype = dtype, shape.splits = splits;
      shape.query_lens = {150, 10, 30}, shape.kv_lens = {700, 4, 90};
      expect_truth(shape);
    }
}

TEST_P(PrefillOnCpu, SaysThatFp8IsConverted) {
  PrefillShape shape;
  shape.dtype = Dtype::fp8_e4m3;
  const auto fp8 = backend.impl().choose(shape.problem(), shape.limits(), {});
  if (!fp8.ok()) return;
  EXPECT_EQ(fp8->math, PrefillMath::half);
  EXPECT_NE(fp8->reason.find("no fp8"), std::string::npos) << fp8->reason;
}

TEST_P(PrefillOnCpu, GathersTokensOfEveryFormat) {
  Rng rng(run_seed());
  constexpr std::int64_t kPages = 23, kPageSize = 7;
  const std::vector<std::int32_t> counts{9, 0, 31, 1, 0, 16};
  const auto out_start = prefix_sums(counts);
  constexpr std::int32_t kFirst = 5, kMaxPages = 6;
  std::vector<std::int32_t> table, indptr{0};
  for (std::size_t i = 0; i < counts.size() * kMaxPages; ++i) table.push_back(rng.between(0, kPages - 1));
  for (std::size_t b = 0; b < counts.size(); ++b) indptr.push_back(indptr.back() + kMaxPages);
  const std::int32_t rows = out_start.back();
  for (const KvFormat format :
       {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
    // Tokens are written with write_kv, which has its own tests, and then compared with what was stored.
    constexpr std::int32_t kLatent = 512, kRope = 64;
    const std::int64_t width = kv_token_elements(format, kLatent, kRope);
    const Dtype element = kv_element_dtype(format);
    std::vector<std::byte> cache(static_cast<std::size_t>(kPages * kPageSize * width) * dtype_bytes(element));
    std::vector<float> latent(kPages * kPageSize * kLatent), rope(kPages * kPageSize * kRope);
    for (float& x : latent) x = static_cast<float>(rng.normal());
    for (float& x : rope) x = static_cast<float>(rng.normal());
    std::vector<std::int64_t> slots(kPages * kPageSize);
    std::iota(slots.begin(), slots.end(), 0);
    const float kv_scale = format == KvFormat::fp8_e4m3 ? 0.75f : 1.0f;
    const TensorView cache_view = dense(static_cast<void*>(cache.data()), element, {kPages, kPageSize, width});
    WriteKvArgs write;
    write.kv_c = dense(static_cast<const void*>(latent.data()), Dtype::f32, {kPages * kPageSize, kLatent});
    write.k_pe = dense(static_cast<const void*>(rope.data()), Dtype::f32, {kPages * kPageSize, kRope});
    write.slot_mapping = slots;
    write.kv_cache = cache_view;
    write.format = format, write.kv_scale = kv_scale;
    ASSERT_TRUE(write_kv(backend, write).ok());

    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (const bool csr : {false, true}) {
        constexpr std::int32_t kWidth = kLatent + kRope, kStride = kWidth + 16;
        std::vector<std::byte> out(static_cast<std::size_t>((rows + 1) * kStride) * dtype_bytes(dtype),
                                   std::byte{0xa7});
        GatherKvArgs args;
        args.kv_cache = cache_view, args.format = format, args.kv_scale = kv_scale;
        if (csr)
          args.pages.page_indptr = indptr, args.pages.page_indices = table;
        else
          args.pages.block_table = table.data(), args.pages.block_table_stride = args.pages.max_pages = kMaxPages;
        args.first_token = kFirst;
        args.out_start = out_start;
        args.tokens = rows;
        args.out = dense(static_cast<void*>(out.data()), dtype, {rows, kWidth});
        args.out.stride[0] = kStride;
        ASSERT_TRUE(backend.impl().gather_kv(args).ok());
        // bf16, f16 and f32 caches lose at most what the output's rounding costs; fp8 ones what theirs did.
        const double within = dtype_bytes(element) == 1 ? 0.07 : 0.005;
        for (std::size_t b = 0; b < counts.size(); ++b)
          for (std::int32_t i = 0; i < counts[b]; ++i) {
            const std::int32_t token = kFirst + i;
            const std::int64_t slot =
                table[b * kMaxPages + static_cast<std::size_t>(token / kPageSize)] * kPageSize + token % kPageSize;
            for (std::int32_t c = 0; c < kWidth; ++c) {
              const double truth = c < kLatent ? latent[static_cast<std::size_t>(slot * kLatent + c)]
                                               : rope[static_cast<std::size_t>(slot * kRope + c - kLatent)];
              const double got = load(
                  dtype, out.data() + static_cast<std::size_t>((out_start[b] + i) * kStride + c) * dtype_bytes(dtype));
              ASSERT_NEAR(got, truth, within * std::fabs(truth) + within * 0.1)
                  << kv_format_name(format) << " to " << dtype_name(dtype) << " request " << b << " token " << token
                  << " column " << c;
            }
          }
        for (std::int32_t r = 0; r <= rows; ++r)
          for (std::size_t i = r < rows ? kWidth * dtype_bytes(dtype) : 0; i < kStride * dtype_bytes(dtype); ++i)
            ASSERT_EQ(out[static_cast<std::size_t>(r * kStride) * dtype_bytes(dtype) + i], std::byte{0xa7});
      }
  }
}

}  // namespace
}  // namespace latte::testkit
