// Broken calls around prefill(): create, build and gather_kv, from C++ and from C.
#include <limits>

#include <gtest/gtest.h>

#include "tests/unit/bad_prefill.hpp"

namespace latte::bad_input {
namespace {

constexpr float kMinusOne = -1;

using enum Code;

constexpr std::int32_t kMaxInt = std::numeric_limits<std::int32_t>::max();

using P = PrefillProblem;
using L = Limits;
using O = BuilderOptions;
using CreateCase = Case<P, L, O>;

const std::vector<CreateCase>& create_cases() {
  static const std::vector<CreateCase> kCases = {
      {"no heads", invalid_argument, "heads", [](P& p, L&, O&) { p.heads = 0; }},
      {"heads beyond all sense", unsupported, "heads", [](P& p, L&, O&) { p.heads = kMaxInt; }},
      {"no qk_width", invalid_argument, "qk_width", [](P& p, L&, O&) { p.qk_width = 0; }},
      {"qk_width not a multiple of 16", unsupported, "qk_width", [](P& p, L&, O&) { p.qk_width = 100; }},
      {"negative v_width", invalid_argument, "v_width", [](P& p, L&, O&) { p.v_width = -16; }},
      {"v_width not a multiple of 16", unsupported, "v_width", [](P& p, L&, O&) { p.v_width = 129; }},
      {"tensors of bytes", unsupported, "dtype", [](P& p, L&, O&) { p.dtype = Dtype::u8; }},
      {"tensors of no dtype", invalid_argument, "dtype", [](P& p, L&, O&) { p.dtype = static_cast<Dtype>(9); }},
      {"fp8 out", unsupported, "out_dtype", [](P& p, L&, O&) { p.out_dtype = Dtype::fp8_e4m3; }},
      {"out of no dtype", invalid_argument, "out_dtype", [](P& p, L&, O&) { p.out_dtype = static_cast<Dtype>(200); }},
      {"no such mask", invalid_argument, "mask", [](P& p, L&, O&) { p.mask = static_cast<Mask>(2); }},
      {"no such math", invalid_argument, "math", [](P& p, L&, O&) { p.math = static_cast<PrefillMath>(3); }},
      {"fp8 math of fp32 tensors", unsupported, "math", [](P& p, L&, O&) { p.math = PrefillMath::fp8; }},
      {"context without latent", invalid_argument, "context.latent", [](P& p, L&, O&) { p.context->latent = 0; }},
      {"context rope not a multiple of 16", unsupported, "context.rope", [](P& p, L&, O&) { p.context->rope = 63; }},
      {"context of no format", invalid_argument, "context.kv_format",
       [](P& p, L&, O&) { p.context->kv_format = static_cast<KvFormat>(5); }},
      {"context fp8_ds_mla of another width", unsupported, "context.latent",
       [](P& p, L&, O&) { p.context->kv_format = KvFormat::fp8_ds_mla; }},
      {"context without page size", invalid_argument, "context.page_size",
       [](P& p, L&, O&) { p.context->page_size = 0; }},
      {"context of no tokens", invalid_argument, "context.max_tokens", [](P& p, L&, O&) { p.context->max_tokens = 0; }},
      {"context of too many tokens", unsupported, "context.max_tokens",
       [](P& p, L&, O&) { p.context->max_tokens = kMaxInt; }},
      {"context of negative tokens in all", invalid_argument, "context.max_total_tokens",
       [](P& p, L&, O&) { p.context->max_total_tokens = -1; }},
      {"context in negative memory", invalid_argument, "context.workspace_bytes",
       [](P& p, L&, O&) { p.context->workspace_bytes = -1; }},
      {"context in too little memory", out_of_limits, "context.workspace_bytes",
       [](P& p, L&, O&) { p.context->workspace_bytes = 1; }},
      {"no requests", invalid_argument, "limits.max_requests", [](P&, L& l, O&) { l.max_requests = 0; }},
      {"negative query tokens", invalid_argument, "limits.max_query_tokens",
       [](P&, L& l, O&) { l.max_query_tokens = -1; }},
      {"negative KV tokens", invalid_argument, "limits.max_kv_tokens", [](P&, L& l, O&) { l.max_kv_tokens = -1; }},
      {"rows that 32 bits cannot number", out_of_limits, "limits.max_total_query_tokens",
       [](P&, L& l, O&) {
         l.max_requests = kMaxInt;
         l.max_query_tokens = kMaxInt;
       }},
      {"more workers than threads", unsupported, "limits.workers", [](P&, L& l, O&) { l.workers = 2; }},
      {"no slots", invalid_argument, "options.slots", [](P&, L&, O& o) { o.slots = 0; }},
      {"plan memory too small", invalid_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = plan_memory; }},
      {"plan memory misaligned", invalid_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = kMisaligned; }},
      {"plan memory without address", missing_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = kNowhere; }},
      {"uniform(0)", invalid_argument, "policy.n", [](P&, L&, O& o) { o.policy = Policy::uniform(0); }},
      {"no such policy", invalid_argument, "policy.kind",
       [](P&, L&, O& o) { o.policy.kind = static_cast<PolicyKind>(3); }},
  };
  return kCases;
}

TEST(BadPrefillInput, EveryBrokenCreateNamesItsField) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  for (const CreateCase& broken : create_cases()) {
    SCOPED_TRACE(broken.name);
    const PrefillCase step;
    PrefillProblem problem = step.problem;
    Limits limits = step.limits;
    BuilderOptions options;
    broken.break_it(problem, limits, options);
    expect_error(answer(PrefillBuilder::create(backend, problem, limits, options).status()), broken.code, broken.field);

    latte_prefill_context context;
    const latte_prefill_problem c_problem = to_c(problem, context);
    const latte_limits c_limits = to_c(limits);
    const latte_builder_options c_options = to_c(options);
    latte_prefill_builder* builder = nullptr;
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code =
        latte_prefill_builder_create(c_backend, &c_problem, &c_limits, &c_options, &builder, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(builder, nullptr);
  }
  latte_backend_close(c_backend, nullptr);
}

using S = PrefillLengths;
using I = std::int32_t;
using BuildCase = Case<PrefillCase, S, I>;

const std::vector<BuildCase>& build_cases() {
  static const std::vector<BuildCase> kCases = {
      {"slot -1", invalid_argument, "slot", [](PrefillCase&, S&, I& slot) { slot = -1; }},
      {"slot 1 of 1", invalid_argument, "slot", [](PrefillCase&, S&, I& slot) { slot = 1; }},
      {"too many requests", out_of_limits, "query_start",
       [](PrefillCase& c, S& l, I&) {
         c.query_start = c.kv_start = {0, 1, 2, 3};
         c.context_lens = {};
         l = c.lengths();
       }},
      {"no query_start", missing_argument, "query_start", [](PrefillCase&, S& l, I&) { l.query_start = {}; }},
      {"no kv_start", missing_argument, "kv_start", [](PrefillCase&, S& l, I&) { l.kv_start = {}; }},
      {"kv_start of another batch", invalid_argument, "kv_start",
       [](PrefillCase&, S& l, I&) { l.kv_start = l.kv_start.first(2); }},
      {"query_start not from zero", invalid_argument, "query_start[0]",
       [](PrefillCase& c, S&, I&) { c.query_start[0] = 1; }},
      {"kv_start not from zero", invalid_argument, "kv_start[0]", [](PrefillCase& c, S&, I&) { c.kv_start[0] = -1; }},
      {"query_start that falls", invalid_argument, "query_start[2]",
       [](PrefillCase& c, S&, I&) { c.query_start[2] = 1; }},
      {"kv_start that falls", invalid_argument, "kv_start[2]", [](PrefillCase& c, S&, I&) { c.kv_start[2] = 0; }},
      {"too many query tokens", out_of_limits, "query_start[1]", [](PrefillCase& c, S&, I&) { c.query_start[1] = 3; }},
      {"too many KV tokens", out_of_limits, "kv_start[2]", [](PrefillCase& c, S&, I&) { c.kv_start[2] = 9; }},
      {"context of another batch", invalid_argument, "context_lens",
       [](PrefillCase&, S& l, I&) { l.context_lens = l.context_lens.first(1); }},
      {"negative context", invalid_argument, "context_lens[1]", [](PrefillCase& c, S&, I&) { c.context_lens[1] = -1; }},
      {"too much context", out_of_limits, "context_lens[0]", [](PrefillCase& c, S&, I&) { c.context_lens[0] = 9; }},
      {"query_start without address", missing_argument, "query_start",
       [](PrefillCase&, S& l, I&) {
         l.query_start = {static_cast<const std::int32_t*>(nullptr), 3};
       }},
      {"kv_start without address", missing_argument, "kv_start",
       [](PrefillCase&, S& l, I&) {
         l.kv_start = {static_cast<const std::int32_t*>(nullptr), 3};
       }},
      {"context without address", missing_argument, "context_lens",
       [](PrefillCase&, S& l, I&) {
         l.context_lens = {static_cast<const std::int32_t*>(nullptr), 2};
       }},
  };
  return kCases;
}

TEST(BadPrefillInput, EveryBrokenBuildNamesItsFieldAndKeepsTheLastStep) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  PrefillCase good;
  latte_prefill_context context;
  const latte_prefill_problem problem = to_c(good.problem, context);
  const latte_limits limits = to_c(good.limits);
  auto builder = PrefillBuilder::create(backend, good.problem, good.limits).value();
  latte_prefill_builder* c_builder = nullptr;
  ASSERT_EQ(latte_prefill_builder_create(c_backend, &problem, &limits, nullptr, &c_builder, nullptr), LATTE_OK);
  const PrefillMetadata last = builder.build(0, good.lengths()).value();
  const std::vector<WorkRecord> records(last.plan().work_info_set.begin(), last.plan().work_info_set.end());

  for (const BuildCase& broken : build_cases()) {
    SCOPED_TRACE(broken.name);
    PrefillCase step;
    PrefillLengths lengths = step.lengths();
    std::int32_t slot = 0;
    broken.break_it(step, lengths, slot);
    expect_error(answer(builder.build(slot, lengths).status()), broken.code, broken.field);

    const latte_prefill_lengths c_lengths = to_c(lengths);
    latte_prefill_metadata metadata = LATTE_PREFILL_METADATA_INIT;
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code = latte_prefill_builder_build(c_builder, slot, &c_lengths, &metadata, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(metadata.slot, nullptr);
  }
  EXPECT_TRUE(prefill(last, good.args()).ok());
  EXPECT_EQ(records, std::vector<WorkRecord>(last.plan().work_info_set.begin(), last.plan().work_info_set.end()));
  latte_prefill_builder_destroy(c_builder, nullptr);
  latte_backend_close(c_backend, nullptr);
}

TEST(BadPrefillInput, ContextLengthsNeedAContext) {
  const Backend backend = Backend::open({.threads = 1}).value();
  PrefillCase step;
  step.problem.context.reset();
  auto builder = PrefillBuilder::create(backend, step.problem, step.limits).value();
  expect_error(answer(builder.build(0, step.lengths()).status()), invalid_argument, "context_lens");
}

// Tokens 1 .. 4 of one request and 1 of another, gathered into rows.
struct Gather {
  std::vector<float> cache = std::vector<float>(4 * 4 * 32, 0.5f);
  std::vector<float> rows = std::vector<float>(6 * 32, -1.0f);
  std::vector<std::int32_t> out_start{0, 4, 5}, block_table{3, 0, 2, -9}, page_indptr{0, 2, 3}, page_indices{3, 0, 2};

  Gather() {
    for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<float>(i / 32);
  }
  GatherKvArgs args() {
    GatherKvArgs args;
    args.kv_cache = dense(static_cast<const void*>(cache.data()), Dtype::f32, {4, 4, 32});
    args.kv_format = KvFormat::f32;
    args.pages.block_table = block_table.data();
    args.pages.block_table_stride = 2;
    args.pages.max_pages = 2;
    args.first_token = 1;
    args.out_start = out_start;
    args.tokens = 5;
    args.out = dense(rows.data(), Dtype::f32, {6, 32});
    return args;
  }
};

using G = GatherKvArgs;
using GatherCase = Case<Gather, G>;

const std::vector<GatherCase>& gather_cases() {
  static const std::vector<GatherCase> kCases = {
      {"no cache", missing_argument, "kv_cache", [](Gather&, G& a) { a.kv_cache = {}; }},
      {"cache of another dtype", invalid_argument, "kv_cache", [](Gather&, G& a) { a.kv_cache.dtype = Dtype::f16; }},
      {"cache of another width", invalid_argument, "kv_cache", [](Gather&, G& a) { a.kv_cache.shape[2] = 16; }},
      {"cache of empty pages", invalid_argument, "kv_cache", [](Gather&, G& a) { a.kv_cache.shape[1] = 0; }},
      {"kv_scale with an fp32 cache", invalid_argument, "kv_scale", [](Gather&, G& a) { a.kv_scale.value = 2; }},
      {"kv_scale behind a pointer", invalid_argument, "kv_scale", [](Gather&, G& a) { a.kv_scale.ptr = &kMinusOne; }},
      {"no out", missing_argument, "out", [](Gather&, G& a) { a.out = {}; }},
      {"out with too few rows", invalid_argument, "out", [](Gather&, G& a) { a.out.shape[0] = 4; }},
      {"out of fp8", invalid_argument, "out", [](Gather&, G& a) { a.out.dtype = Dtype::fp8_e4m3; }},
      {"out rows on one another", invalid_argument, "out", [](Gather&, G& a) { a.out.stride[0] = 31; }},
      {"out of an odd width", unsupported, "out", [](Gather&, G& a) { a.out.shape[1] = 31; }},
      {"fp8_ds_mla of another width", invalid_argument, "out",
       [](Gather&, G& a) { a.kv_format = KvFormat::fp8_ds_mla; }},
      {"negative first token", invalid_argument, "first_token", [](Gather&, G& a) { a.first_token = -1; }},
      {"a first token beyond all sense", invalid_argument, "first_token",
       [](Gather&, G& a) { a.first_token = kMaxInt; }},
      {"no out_start", missing_argument, "out_start", [](Gather&, G& a) { a.out_start = {}; }},
      {"out_start that falls", invalid_argument, "out_start[2]", [](Gather& g, G&) { g.out_start[2] = 3; }},
      {"tokens of another step", invalid_argument, "tokens", [](Gather&, G& a) { a.tokens = 4; }},
      {"negative tokens", invalid_argument, "tokens", [](Gather&, G& a) { a.tokens = -1; }},
      {"no pages", missing_argument, "pages", [](Gather&, G& a) { a.pages = {}; }},
      {"a needed page past the cache", invalid_argument, "pages.block_table",
       [](Gather& g, G&) { g.block_table[1] = 4; }},
      {"a table too narrow", invalid_argument, "pages.max_pages", [](Gather&, G& a) { a.pages.max_pages = 1; }},
      {"a stream on the cpu", invalid_argument, "stream", [](Gather& g, G& a) { a.stream = &g; }},
  };
  return kCases;
}

TEST(BadPrefillInput, EveryBrokenGatherNamesItsField) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  for (const GatherCase& broken : gather_cases()) {
    SCOPED_TRACE(broken.name);
    Gather step;
    GatherKvArgs args = step.args();
    broken.break_it(step, args);
    expect_error(answer(gather_kv(backend, args)), broken.code, broken.field);
    const latte_gather_kv_args c_args = to_c(args);
    latte_error error = LATTE_ERROR_INIT;
    expect_error(answer(latte_gather_kv(c_backend, &c_args, &error), error), broken.code, broken.field);
    EXPECT_EQ(step.rows, std::vector<float>(step.rows.size(), -1.0f));
  }
  Gather per_head;
  const float ones[] = {1, 1};
  GatherKvArgs scaled = per_head.args();
  scaled.kv_scale = {.ptr = ones, .per_head = true};  // C has no field for it
  expect_error(answer(gather_kv(backend, scaled)), invalid_argument, "kv_scale");
  EXPECT_EQ(per_head.rows, std::vector<float>(per_head.rows.size(), -1.0f));
  Gather good;
  // Slots: request 0 has pages 3 and 0, request 1 page 2; tokens from 1 on. The sixth row is nobody's.
  const std::vector<float> slots{13, 14, 15, 0, 9, -1};
  for (const bool lists : {false, true}) {
    GatherKvArgs args = good.args();
    if (lists) {
      args.pages = {};
      args.pages.page_indptr = good.page_indptr;
      args.pages.page_indices = good.page_indices;
    }
    const latte_gather_kv_args c_args = to_c(args);
    ASSERT_EQ(latte_gather_kv(c_backend, &c_args, nullptr), LATTE_OK);
    for (std::size_t row = 0; row < slots.size(); ++row)
      for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(good.rows[row * 32 + i], slots[row]);
    good.rows.assign(good.rows.size(), -1.0f);
  }
  latte_backend_close(c_backend, nullptr);
}

}  // namespace
}  // namespace latte::bad_input
