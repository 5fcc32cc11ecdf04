// Every kernel of the GPU and every way it loads, in cases so small that compute-sanitizer is soon done with them:
// scripts/sanitize_gpu runs all of this under each of its tools.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "testkit/rng.hpp"
#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuEveryKernel : public OnGpu {};

// Pages that the copy engine loads, in boxes of two sizes, and those whose tokens threads load; tiles in two pieces.
TEST_F(GpuEveryKernel, OfDecodeLoadsPagesOfEveryKind) {
  struct Kernel {
    std::int32_t heads;
    const char* name;
  };
  for (const auto& [heads, name] :
       {Kernel{5, "sm90_swapped16"}, Kernel{20, "sm90_swapped32"}, Kernel{40, "sm90_swapped48"},
        Kernel{64, "sm90_plain64"}, Kernel{100, "sm90_plain64_pair"}})
    for (std::int32_t latent : {512, 256})
      for (bool whole_pages : {true, false})
        for (KvFormat format : {KvFormat::bf16, KvFormat::f16}) {
          DecodeCase c = gpu_case({{1, 150}, {1, 9}}, heads, !whole_pages ? 7 : latent == 512 ? 64 : 8);
          c.latent = latent;
          c.kv_format = format;
          c.q_dtype = c.out_dtype = kv_element_dtype(format);
          PreparedCase prepared(c);
          const auto report = run_case(backend(), prepared, {.policy = Policy::uniform(2)});
          ASSERT_TRUE(succeeded(report.status())) << c.name();
          EXPECT_TRUE(report->ok()) << report->message();
          EXPECT_EQ(report->kernel, name);
        }
}

// The plan kernel, the validation kernel and decode in a graph that runs twice.
TEST_F(GpuEveryKernel, OfPlanningAndValidationRunsInAGraph) {
  for (PageForm form : {PageForm::block_table, PageForm::csr}) {
    DecodeCase c = gpu_case({{2, 150}, {1, 9}, {1, 0}}, 16, 16);
    c.page_form = form;
    const auto step = DeviceStep::make(backend(), c, {.validate = true});
    const Result<Graph> graph = Graph::capture(backend(), stream(), [&]() -> Status {
      const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
      return metadata ? decode(*metadata, step->args(stream())) : metadata.status();
    });
    ASSERT_TRUE(succeeded(graph.status()));
    const OracleResult oracle = decode_oracle(c.problem(), step->batch.lengths(), step->batch.args());
    for (int replay = 0; replay < 2; ++replay) {
      step->batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
      ASSERT_TRUE(succeeded(graph->launch(stream())));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
      const DecodeArgs args = step->batch.args();
      const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
      EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    }
  }
}

// Chunks of the context, validated, gathered and joined; tensors as they are, quantised and converted on entry.
TEST_F(GpuEveryKernel, OfPrefillTakesContext) {
  struct Arithmetic {
    Dtype dtype;
    PrefillMath math;
    KvFormat cache;
  };
  for (const auto& [dtype, math, cache] : {Arithmetic{Dtype::bf16, PrefillMath::half, KvFormat::bf16},
                                           Arithmetic{Dtype::f16, PrefillMath::half, KvFormat::f16},
                                           Arithmetic{Dtype::fp8_e4m3, PrefillMath::fp8, KvFormat::fp8_e4m3},
                                           Arithmetic{Dtype::bf16, PrefillMath::fp8, KvFormat::fp8_ds_mla},
                                           Arithmetic{Dtype::fp8_e4m3, PrefillMath::half, KvFormat::bf16}}) {
    PrefillCase c = gpu_prefill({{70, 70, 300}, {3, 3, 9}, {5, 5, 0}}, 2);
    c.latent = 512;
    c.rope = 64;
    c.dtype = dtype;
    c.math = math;
    c.kv_format = cache;
    c.page_size = 7;
    c.context_workspace_bytes = workspace_for_chunks(backend(), c, 1).value();
    PreparedPrefill prepared(c);
    const auto report = run_case(backend(), prepared, {.policy = Policy::uniform(2), .validate = true});
    ASSERT_TRUE(succeeded(report.status())) << c.name();
    EXPECT_TRUE(report->ok()) << report->message();
    EXPECT_GT(report->chunks, 1);
  }
}

// What three steps wrote, joined in the place of the last.
TEST_F(GpuEveryKernel, OfMergeJoinsSteps) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    DecodeCase c = gpu_case({{2, 40}, {1, 0}}, 3, 16);
    c.out_dtype = dtype;
    c.out_layout = Layout::transposed;
    std::vector<std::unique_ptr<DeviceStep>> steps;
    std::vector<Partial> on_host, on_device;
    for (int part = 0; part < 3; ++part) {
      ++c.seed;
      steps.push_back(DeviceStep::make(backend(), c));
      ASSERT_TRUE(succeeded(steps.back()->run(backend(), stream())));
      const DecodeArgs host = steps.back()->batch.args(), device = steps.back()->args(stream());
      on_host.push_back({host.out, host.lse});
      on_device.push_back({device.out, device.lse});
    }
    const OracleResult oracle = merge_oracle(on_host);
    DeviceStep& last = *steps.back();
    const DecodeArgs device = last.args(stream());
    ASSERT_TRUE(succeeded(merge(backend(), {on_device, device.out, device.lse, stream()})));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(last.device.download_outputs(last.batch)));
    const DecodeCase formats{.kv_format = KvFormat::f32, .q_dtype = Dtype::f32, .out_dtype = dtype};
    const Comparison result =
        compare(last.batch.args().out, last.batch.args().lse, oracle, formats.tolerance(oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << dtype_name(dtype) << ": " << result.message;
  }
}

// Some tokens into the cache and out again: what comes is what the cache holds.
TEST_F(GpuEveryKernel, OfWriteAndGatherServesEveryFormat) {
  constexpr std::int64_t kTokens = 9, kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kPageSize = 4, kPages = 3;
  Rng rng(6);
  std::vector<float> latent(kTokens * kLatent), rope(kTokens * kRope);
  for (float& value : latent) value = static_cast<float>(rng.normal());
  for (float& value : rope) value = static_cast<float>(rng.normal());
  const std::vector<std::int64_t> slots = {8, 9, 10, 11, 0, 1, 2, 3, -1};  // a request's 8 tokens, and one to skip
  const DeviceMemory d_latent = upload(latent), d_rope = upload(rope), d_slots = upload(slots);
  const DeviceMemory table = upload<std::int32_t>({2, 0}), out_start = upload<std::int32_t>({0, 7});
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla}) {
    const Dtype element = kv_element_dtype(format);
    const std::int64_t width = kv_token_elements(format, kLatent, kRope);
    std::vector<std::byte> cache(static_cast<std::size_t>(kPages * kPageSize * width) * dtype_bytes(element));
    const DeviceMemory d_cache = upload(cache), d_rows = upload(std::vector<float>(7 * kWidth));
    const float kv_scale = format == KvFormat::fp8_e4m3 ? 0.375f : 1;
    WriteKvArgs write;
    write.kv_c = dense(static_cast<const void*>(d_latent.data()), Dtype::f32, {kTokens, kLatent});
    write.k_pe = dense(static_cast<const void*>(d_rope.data()), Dtype::f32, {kTokens, kRope});
    write.slot_mapping = {reinterpret_cast<const std::int64_t*>(d_slots.data()), slots.size()};
    write.kv_cache = dense(static_cast<void*>(d_cache.data()), element, {kPages, kPageSize, width});
    write.kv_format = format;
    write.kv_scale.value = kv_scale;
    write.stream = stream();
    ASSERT_TRUE(succeeded(write_kv(backend(), write)));
    GatherKvArgs gather;
    gather.kv_cache = write.kv_cache;
    gather.kv_format = format;
    gather.kv_scale.value = kv_scale;
    gather.pages = {
        .block_table = reinterpret_cast<const std::int32_t*>(table.data()), .block_table_stride = 2, .max_pages = 2};
    gather.first_token = 1;
    gather.out_start = {reinterpret_cast<const std::int32_t*>(out_start.data()), 2};
    gather.tokens = 7;
    gather.out = dense(static_cast<void*>(d_rows.data()), Dtype::f32, {7, kWidth});
    gather.stream = stream();
    ASSERT_TRUE(succeeded(gather_kv(backend(), gather)));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));

    WriteKvArgs oracle = write;
    oracle.kv_c.data = latent.data();
    oracle.k_pe.data = rope.data();
    oracle.slot_mapping = slots;
    oracle.kv_cache.data = cache.data();
    write_kv_oracle(oracle);
    std::vector<float> rows(7 * kWidth);
    ASSERT_TRUE(succeeded(copy_to_host(backend(), rows.data(), d_rows.data(), d_rows.size())));
    const DecodeProblem problem{.heads = 1, .kv_format = format};
    for (std::int64_t row = 0; row < 7; ++row) {
      double want[kWidth];
      load_kv_token(problem,
                    cache.data() + slots[static_cast<std::size_t>(row + 1)] * width *
                                       static_cast<std::int64_t>(dtype_bytes(element)),
                    kv_scale, want);
      for (std::int64_t i = 0; i < kWidth; ++i)
        ASSERT_NEAR(rows[static_cast<std::size_t>(row * kWidth + i)], want[i], std::ldexp(std::fabs(want[i]), -20))
            << kv_format_name(format) << " row " << row << " column " << i;
    }
  }
}

}  // namespace
}  // namespace latte::testkit
