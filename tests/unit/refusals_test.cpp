// Calls that must be refused although every number in them is one that other calls may have.
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "latte/latte.hpp"
#include "tests/unit/allocation_count.hpp"

namespace latte {
namespace {

using allocation_count::AllocationFailure;

// Pages that only the request's last query token sees.
TEST(Refusals, AWildPageThatOnlyTheLastTokenSees) {
  const Backend backend = Backend::open({.threads = 1}).value();
  const DecodeProblem problem{.heads = 1,
                              .latent = 16,
                              .rope = 16,
                              .q_dtype = Dtype::f32,
                              .out_dtype = Dtype::f32,
                              .kv_format = KvFormat::f32,
                              .page_size = 16};
  auto builder =
      MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_query_tokens = 2, .max_kv_tokens = 40})
          .value();
  const std::vector<float> q(2 * 32, 1.0f), cache(3 * 16 * 32, 1.0f);
  const std::int32_t seq_lens[] = {40}, pages[] = {0, 1, 99999}, page_indptr[] = {0, 3};
  const auto decoded = [&](std::vector<std::int32_t> visible, bool lists) {
    const std::int32_t query_start[] = {0, static_cast<std::int32_t>(visible.size())};
    const auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}).value();
    std::vector<float> out(2 * 16);
    const auto tokens = static_cast<std::int64_t>(visible.size());
    DecodeArgs args{.q = dense(q.data(), Dtype::f32, {tokens, 1, 32}),
                    .kv_cache = dense(cache.data(), Dtype::f32, {3, 16, 32}),
                    .out = dense(out.data(), Dtype::f32, {tokens, 1, 16}),
                    .scale = 0.1f};
    if (lists)
      args.pages = {.page_indptr = page_indptr, .page_indices = pages};
    else
      args.pages = {.block_table = pages, .block_table_stride = 3, .max_pages = 3};
    return decode(step, args);
  };
  for (const bool lists : {false, true}) {
    const char* field = lists ? "pages.page_indices" : "pages.block_table";
    EXPECT_EQ(decoded({1, 40}, lists).field(), field);
    EXPECT_EQ(decoded({40, 1}, lists).field(), field);
    EXPECT_EQ(decoded({33}, lists).field(), field);
    EXPECT_TRUE(decoded({1, 32}, lists).ok()) << "a page that nobody sees may be anything";
    EXPECT_TRUE(decoded({32}, lists).ok());
  }
}

TEST(Refusals, Fp8ScalesThatVanish) {
  const Backend backend = Backend::open({.threads = 1}).value();
  const DecodeProblem problem{.heads = 1,
                              .latent = 16,
                              .rope = 16,
                              .q_dtype = Dtype::fp8_e4m3,
                              .out_dtype = Dtype::f32,
                              .kv_format = KvFormat::fp8_e4m3,
                              .page_size = 16};
  auto builder = MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_kv_tokens = 16}).value();
  const std::vector<std::uint8_t> q(32, 0x38), cache(16 * 32, 0x38);  // ones
  const std::int32_t seq_lens[] = {16}, query_start[] = {0, 1}, pages[] = {0};
  const auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start}).value();
  const auto field = [&](float scale, float q_scale, float kv_scale) {
    std::vector<float> out(16);
    return decode(step, {.q = dense(q.data(), Dtype::fp8_e4m3, {1, 1, 32}),
                         .kv_cache = dense(cache.data(), Dtype::fp8_e4m3, {1, 16, 32}),
                         .pages = {.block_table = pages, .block_table_stride = 1, .max_pages = 1},
                         .out = dense(out.data(), Dtype::f32, {1, 1, 16}),
                         .scale = scale,
                         .q_scale = {.value = q_scale},
                         .kv_scale = {.value = kv_scale}})
        .field();
  };
  EXPECT_EQ(field(1, 1, 1), "");
  EXPECT_EQ(field(1e30f, 1e-30f, 1), "") << "a product of 1";
  EXPECT_EQ(field(1e-30f, 1e-30f, 1), "scale") << "a product of 0";
  EXPECT_EQ(field(1, 1, 1e-40f), "kv_scale") << "fewer digits than a number has";
  EXPECT_EQ(field(1, 1e-40f, 1), "q_scale");
}

// Each request by itself is within its limit.
TEST(Refusals, PromptsOfOneTokenTooManyInAll) {
  const Backend backend = Backend::open({.threads = 1}).value();
  const PrefillProblem problem{.heads = 1, .context = PrefillContext{.max_tokens = 64, .max_total_tokens = 100}};
  const Limits limits{.max_requests = 2,
                      .max_query_tokens = 8,
                      .max_total_query_tokens = 10,
                      .max_kv_tokens = 20,
                      .max_total_kv_tokens = 30};
  auto builder = PrefillBuilder::create(backend, problem, limits).value();
  using Lengths = std::vector<std::int32_t>;
  const auto field = [&](const Lengths& query, const Lengths& kv, const Lengths& context) {
    const Status status = builder.build(0, {.query_start = query, .kv_start = kv, .context_lens = context}).status();
    EXPECT_TRUE(status.ok() || status.code() == Code::out_of_limits) << status.message();
    return status.field();
  };
  EXPECT_EQ(field({0, 5, 10}, {0, 15, 30}, {50, 50}), "");
  EXPECT_EQ(field({0, 5, 11}, {0, 15, 30}, {50, 50}), "query_start");
  EXPECT_EQ(field({0, 5, 10}, {0, 15, 31}, {50, 50}), "kv_start");
  EXPECT_EQ(field({0, 5, 10}, {0, 15, 30}, {50, 51}), "context_lens");
}

// In place works row by row: rows that lie elsewhere in the same memory would be read after they were written.
TEST(Refusals, AMergeIntoAPartialsLseWithOtherStrides) {
  const Backend backend = Backend::open({.threads = 1}).value();
  std::vector<float> values(2 * 3 * 16, 1.0f), out(2 * 3 * 16), lse(6, 0.0f);
  const Partial parts[] = {{.out = dense(static_cast<const void*>(values.data()), Dtype::f32, {2, 3, 16}),
                            .lse = dense(static_cast<const void*>(lse.data()), Dtype::f32, {2, 3})}};
  MergeArgs args{.partials = parts,
                 .out = dense(out.data(), Dtype::f32, {2, 3, 16}),
                 .lse = dense(lse.data(), Dtype::f32, {2, 3})};
  EXPECT_TRUE(merge(backend, args).ok());
  args.lse.stride[0] = 1, args.lse.stride[1] = 2;
  EXPECT_EQ(merge(backend, args).field(), "lse");
}

TEST(Refusals, PlansForMoreWorkersThanAnyHas) {
  for (const char* backend : {"cpu", "cuda"}) {
    const auto choice = [&](std::int32_t workers) {
      return choose_for({.backend = backend, .workers = workers}, DecodeProblem{.heads = 16},
                        {.max_requests = 1, .max_kv_tokens = 1000});
    };
    EXPECT_TRUE(choice(65536).ok()) << backend << choice(65536).status().message();
    for (const std::int32_t workers : {65537, 21474837, INT32_MAX})
      EXPECT_EQ(choice(workers).status().field(), "workers") << backend;
  }
}

// Whichever allocation fails: an error, no exception, and nothing that is broken afterwards.
TEST(Refusals, AnyAllocationThatFailsIsAnError) {
  const auto sweep = [](const char* what, const auto& call) {
    for (std::int64_t n = 0;; ++n) {
      ASSERT_LT(n, 10000) << what;
      bool happened = false;
      Code code = Code::ok;
      {
        const AllocationFailure failure(n);
        EXPECT_NO_THROW(code = call()) << what << ", allocation " << n;
        happened = failure.happened();
      }
      EXPECT_TRUE(code == Code::ok || code == Code::out_of_memory) << what << ", allocation " << n;
      if (!happened) {
        EXPECT_EQ(code, Code::ok) << what;
        return;
      }
    }
  };
  const DecodeProblem decode{.heads = 16};
  const PrefillProblem prefill{.heads = 2, .context = PrefillContext{.max_tokens = 64}};
  const Limits limits{.max_requests = 2, .max_query_tokens = 8, .max_kv_tokens = 64};
  sweep("open", [] { return Backend::open({.threads = 2}).status().code(); });
  sweep("open auto", [] { return Backend::open({.name = "auto", .threads = 2}).status().code(); });
  const Backend backend = Backend::open({.threads = 2}).value();
  sweep("choose", [&] { return backend.choose(decode, limits).status().code(); });
  sweep("choose_for", [&] { return choose_for({.backend = "cuda", .workers = 132}, decode, limits).status().code(); });
  sweep("needs", [&] { return MetadataBuilder::needs(backend, decode, limits).status().code(); });
  sweep("create", [&] { return MetadataBuilder::create(backend, decode, limits).status().code(); });
  sweep("prefill needs", [&] { return PrefillBuilder::needs(backend, prefill, limits).status().code(); });
  sweep("prefill create", [&] { return PrefillBuilder::create(backend, prefill, limits).status().code(); });
  sweep("layout", [&] {
    const WorkspaceNeed needs[] = {{.name = "a", .bytes = 10}, {.name = "b", .bytes = 20}};
    return lay_out_workspace(needs).status().code();
  });
  auto builder = MetadataBuilder::create(backend, decode, limits).value();
  const std::int32_t seq_lens[] = {8, 64}, query_start[] = {0, 1, 2};
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start};
  const auto step = builder.build(0, lengths).value();
  sweep("copy_plan", [&] { return builder.copy_plan(step).status().code(); });
  sweep("check_plan", [&] { return check_plan(step.plan_config(), lengths, step.plan()).code(); });
}

}  // namespace
}  // namespace latte
