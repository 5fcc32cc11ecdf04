// gather_kv against the tokens that write_kv, which has its own tests, has put into the cache.
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/rng.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class GatherKv : public EachKernel {};
INSTANTIATE_TEST_SUITE_P(Kernels, GatherKv, each_kernel(), kernel_test_name);

TEST_P(GatherKv, FindsTheTokensOfEveryFormat) {
  Rng rng(run_seed());
  constexpr std::int64_t kPages = 23, kPageSize = 7;
  const std::vector<std::int32_t> counts{9, 0, 31, 1, 0, 16};
  std::vector<std::int32_t> out_start(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), out_start.begin() + 1);
  constexpr std::int32_t kFirst = 5, kMaxPages = 6;
  std::vector<std::int32_t> table, indptr{0};
  for (std::size_t i = 0; i < counts.size() * kMaxPages; ++i) table.push_back(rng.between(0, kPages - 1));
  for (std::size_t b = 0; b < counts.size(); ++b) indptr.push_back(indptr.back() + kMaxPages);
  const std::int32_t rows = out_start.back();
  for (const KvFormat format :
       {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
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
    write.kv_format = format, write.kv_scale.value = kv_scale;
    ASSERT_TRUE(write_kv(backend, write).ok());

    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      for (const bool csr : {false, true}) {
        constexpr std::int32_t kWidth = kLatent + kRope, kStride = kWidth + 16;
        std::vector<std::byte> out(static_cast<std::size_t>((rows + 1) * kStride) * dtype_bytes(dtype),
                                   std::byte{0xa7});
        GatherKvArgs args;
        args.kv_cache = cache_view, args.kv_format = format, args.kv_scale.value = kv_scale;
        if (csr) args.kv_scale = {.value = std::nanf(""), .ptr = &kv_scale};
        if (csr)
          args.pages.page_indptr = indptr, args.pages.page_indices = table;
        else
          args.pages.block_table = table.data(), args.pages.block_table_stride = args.pages.max_pages = kMaxPages;
        args.first_token = kFirst;
        args.out_start = out_start;
        args.tokens = rows;
        args.out = dense(static_cast<void*>(out.data()), dtype, {rows, kWidth});
        args.out.stride[0] = kStride;
        ASSERT_TRUE(gather_kv(backend, args).ok());
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
