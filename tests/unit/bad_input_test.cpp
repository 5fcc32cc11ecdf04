// Broken calls around decode: open, create and build, from C++ and from C.
#include "tests/unit/bad_input.hpp"

#include <limits>

#include <gtest/gtest.h>

namespace latte::bad_input {
namespace {

using enum Code;

constexpr std::int32_t kMaxInt = std::numeric_limits<std::int32_t>::max();

struct OpenCase {
  const char* name;
  Code code;
  const char* field;
  const char* backend_name;
  std::int32_t threads;
  const char* kernel;
};

TEST(BadInput, EveryBrokenOpenNamesItsField) {
  const OpenCase cases[] = {
      {"a backend nobody has", unsupported, "name", "tpu", 1, "auto"},
      {"cuda with threads", invalid_argument, "threads", "cuda", 1, "auto"},
      {"cuda with a kernel of the cpu's", unsupported, "kernel", "cuda", 0, "avx2"},
      {"an empty name", unsupported, "name", "", 1, "auto"},
      {"negative threads", invalid_argument, "threads", "cpu", -1, "auto"},
      {"a million threads", invalid_argument, "threads", "cpu", 1000000, "auto"},
      {"a kernel nobody has", invalid_argument, "kernel", "cpu", 1, "quantum"},
      {"an empty kernel", invalid_argument, "kernel", "cpu", 1, ""},
  };
  for (const OpenCase& broken : cases) {
    SCOPED_TRACE(broken.name);
    const auto opened =
        Backend::open({.name = broken.backend_name, .threads = broken.threads, .kernel = broken.kernel});
    expect_error(answer(opened.status()), broken.code, broken.field);

    latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
    options.name = broken.backend_name;
    options.threads = broken.threads;
    options.kernel = broken.kernel;
    latte_backend* backend = nullptr;
    latte_error error = LATTE_ERROR_INIT;
    expect_error(answer(latte_backend_open(&options, &backend, &error), error), broken.code, broken.field);
    EXPECT_EQ(backend, nullptr);
  }
}

TEST(BadInput, AKernelThisMachineCannotRunSaysWhy) {
  const Backend backend = Backend::open({.threads = 1}).value();
  for (const KernelInfo& kernel : backend.info().kernels) {
    SCOPED_TRACE(kernel.name);
    const auto opened = Backend::open({.threads = 1, .kernel = kernel.name});
    EXPECT_EQ(opened.ok(), kernel.usable);
    if (kernel.usable) continue;
    expect_error(answer(opened.status()), unsupported, "kernel");
    EXPECT_NE(opened.status().got().find(kernel.reason), std::string::npos);
    EXPECT_FALSE(kernel.reason.empty());
    expect_error(answer(backend.measure_ceilings(kernel.name).status()), unsupported, "kernel");
  }
  expect_error(answer(backend.measure_ceilings("quantum").status()), invalid_argument, "kernel");
}

using CreateCase = Case<DecodeProblem, Limits, BuilderOptions>;

const std::vector<CreateCase>& create_cases() {
  using P = DecodeProblem;
  using L = Limits;
  using O = BuilderOptions;
  static const std::vector<CreateCase> kCases = {
      {"no heads", invalid_argument, "heads", [](P& p, L&, O&) { p.heads = 0; }},
      {"negative heads", invalid_argument, "heads", [](P& p, L&, O&) { p.heads = -3; }},
      {"heads beyond all sense", unsupported, "heads", [](P& p, L&, O&) { p.heads = kMaxInt; }},
      {"no latent", invalid_argument, "latent", [](P& p, L&, O&) { p.latent = 0; }},
      {"latent not a multiple of 16", unsupported, "latent", [](P& p, L&, O&) { p.latent = 500; }},
      {"latent beyond all sense", unsupported, "latent", [](P& p, L&, O&) { p.latent = 1 << 30; }},
      {"rope not a multiple of 16", unsupported, "rope", [](P& p, L&, O&) { p.rope = 63; }},
      {"negative rope", invalid_argument, "rope", [](P& p, L&, O&) { p.rope = -16; }},
      {"no page size", invalid_argument, "page_size", [](P& p, L&, O&) { p.page_size = 0; }},
      {"q of bytes", unsupported, "q_dtype", [](P& p, L&, O&) { p.q_dtype = Dtype::u8; }},
      {"fp8 q with an fp32 cache", unsupported, "q_dtype", [](P& p, L&, O&) { p.q_dtype = Dtype::fp8_e4m3; }},
      {"fp8 q with an fp8_ds_mla cache", unsupported, "q_dtype",
       [](P& p, L&, O&) {
         p.kv_format = KvFormat::fp8_ds_mla;
         p.latent = 512;
         p.rope = 64;
         p.q_dtype = Dtype::fp8_e4m3;
       }},
      {"q of no dtype", invalid_argument, "q_dtype", [](P& p, L&, O&) { p.q_dtype = static_cast<Dtype>(9); }},
      {"fp8 out", unsupported, "out_dtype", [](P& p, L&, O&) { p.out_dtype = Dtype::fp8_e4m3; }},
      {"out of no dtype", invalid_argument, "out_dtype", [](P& p, L&, O&) { p.out_dtype = static_cast<Dtype>(200); }},
      {"no such format", invalid_argument, "kv_format", [](P& p, L&, O&) { p.kv_format = static_cast<KvFormat>(5); }},
      {"no such mask", invalid_argument, "mask", [](P& p, L&, O&) { p.mask = static_cast<Mask>(2); }},
      {"fp8_ds_mla with latent 256", unsupported, "latent",
       [](P& p, L&, O&) {
         p.kv_format = KvFormat::fp8_ds_mla;
         p.latent = 256;
         p.rope = 64;
       }},
      {"fp8_ds_mla with rope 32", unsupported, "rope",
       [](P& p, L&, O&) {
         p.kv_format = KvFormat::fp8_ds_mla;
         p.latent = 512;
         p.rope = 32;
       }},
      {"no requests", invalid_argument, "limits.max_requests", [](P&, L& l, O&) { l.max_requests = 0; }},
      {"negative requests", invalid_argument, "limits.max_requests", [](P&, L& l, O&) { l.max_requests = -1; }},
      {"negative query tokens", invalid_argument, "limits.max_query_tokens",
       [](P&, L& l, O&) { l.max_query_tokens = -1; }},
      {"negative query tokens in all", invalid_argument, "limits.max_total_query_tokens",
       [](P&, L& l, O&) { l.max_total_query_tokens = -1; }},
      {"negative KV tokens", invalid_argument, "limits.max_kv_tokens", [](P&, L& l, O&) { l.max_kv_tokens = -1; }},
      {"more KV tokens than kernels count", unsupported, "limits.max_kv_tokens",
       [](P&, L& l, O&) { l.max_kv_tokens = std::numeric_limits<std::int32_t>::max(); }},
      {"negative KV tokens in all", invalid_argument, "limits.max_total_kv_tokens",
       [](P&, L& l, O&) { l.max_total_kv_tokens = -1; }},
      {"rows that 32 bits cannot number", out_of_limits, "limits.max_total_query_tokens",
       [](P&, L& l, O&) {
         l.max_requests = kMaxInt;
         l.max_query_tokens = kMaxInt;
       }},
      {"negative workers", invalid_argument, "limits.workers", [](P&, L& l, O&) { l.workers = -1; }},
      {"more workers than threads", unsupported, "limits.workers", [](P&, L& l, O&) { l.workers = 2; }},
      {"no slots", invalid_argument, "options.slots", [](P&, L&, O& o) { o.slots = 0; }},
      {"a million slots", invalid_argument, "options.slots", [](P&, L&, O& o) { o.slots = 1000000; }},
      {"plan memory too small", invalid_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = plan_memory; }},
      {"plan memory misaligned", invalid_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = kMisaligned; }},
      {"plan memory without address", missing_argument, "options.plan_memory",
       [](P&, L&, O& o) { o.plan_memory = kNowhere; }},
      {"uniform(0)", invalid_argument, "policy.n", [](P&, L&, O& o) { o.policy = Policy::uniform(0); }},
      {"batch_invariant(-1)", invalid_argument, "policy.n",
       [](P&, L&, O& o) { o.policy = Policy::batch_invariant(-1); }},
      {"no such policy", invalid_argument, "policy.kind",
       [](P&, L&, O& o) { o.policy.kind = static_cast<PolicyKind>(3); }},
  };
  return kCases;
}

TEST(BadInput, EveryBrokenCreateNamesItsField) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  for (const CreateCase& broken : create_cases()) {
    SCOPED_TRACE(broken.name);
    const Step step;
    DecodeProblem problem = step.problem;
    Limits limits = step.limits;
    BuilderOptions options;
    broken.break_it(problem, limits, options);
    expect_error(answer(MetadataBuilder::create(backend, problem, limits, options).status()), broken.code,
                 broken.field);

    const latte_problem c_problem = to_c(problem);
    const latte_limits c_limits = to_c(limits);
    const latte_builder_options c_options = to_c(options);
    latte_builder* builder = nullptr;
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code = latte_builder_create(c_backend, &c_problem, &c_limits, &c_options, &builder, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(builder, nullptr);
  }
  latte_backend_close(c_backend, nullptr);
}

TEST(BadInput, SupportsGivesTheReasonThatCreateGives) {
  const Backend backend = Backend::open({.threads = 1}).value();
  for (const CreateCase& broken : create_cases()) {
    SCOPED_TRACE(broken.name);
    const Step step;
    DecodeProblem problem = step.problem;
    Limits limits = step.limits;
    BuilderOptions options;
    broken.break_it(problem, limits, options);
    const bool about_problem = std::string(broken.field).find('.') == std::string::npos;
    const Support support = backend.supports(problem);
    EXPECT_EQ(support.ok, !about_problem) << support.reason;
    EXPECT_EQ(support.kernel.empty(), about_problem);
    EXPECT_EQ(support.reason.find(broken.field) != std::string::npos, about_problem) << support.reason;
  }
}

using BuildCase = Case<Step, StepLengths, std::int32_t>;

const std::vector<BuildCase>& build_cases() {
  using S = StepLengths;
  using I = std::int32_t;
  static const std::vector<BuildCase> kCases = {
      {"slot -1", invalid_argument, "slot", [](Step&, S&, I& slot) { slot = -1; }},
      {"slot 1 of 1", invalid_argument, "slot", [](Step&, S&, I& slot) { slot = 1; }},
      {"too many requests", out_of_limits, "seq_lens",
       [](Step& s, S& l, I&) {
         s.seq_lens = {1, 1, 1};
         s.query_start = {0, 1, 2, 3};
         l = s.lengths();
       }},
      {"no query_start", invalid_argument, "query_start", [](Step&, S& l, I&) { l.query_start = {}; }},
      {"query_start of another batch", invalid_argument, "query_start",
       [](Step&, S& l, I&) { l.query_start = l.query_start.first(2); }},
      {"query_start not from zero", invalid_argument, "query_start[0]", [](Step& s, S&, I&) { s.query_start[0] = 1; }},
      {"query_start that falls", invalid_argument, "query_start[2]", [](Step& s, S&, I&) { s.query_start[2] = 0; }},
      {"too many query tokens", out_of_limits, "query_start[2]", [](Step& s, S&, I&) { s.query_start[2] = 4; }},
      {"a negative length", invalid_argument, "seq_lens[1]", [](Step& s, S&, I&) { s.seq_lens[1] = -1; }},
      {"a length above the limit", out_of_limits, "seq_lens[0]", [](Step& s, S&, I&) { s.seq_lens[0] = 17; }},
      {"visible of another batch", invalid_argument, "visible",
       [](Step& s, S& l, I&) {
         s.visible = {1, 2};
         l = s.lengths();
       }},
      {"visible past the end", invalid_argument, "visible[2]",
       [](Step& s, S& l, I&) {
         s.visible = {1, 2, 10};
         l = s.lengths();
       }},
      {"visible below zero", invalid_argument, "visible[0]",
       [](Step& s, S& l, I&) {
         s.visible = {-1, 2, 3};
         l = s.lengths();
       }},
      {"seq_lens without address", missing_argument, "seq_lens",
       [](Step&, S& l, I&) {
         l.seq_lens = {static_cast<const std::int32_t*>(nullptr), 2};
       }},
      {"query_start without address", missing_argument, "query_start",
       [](Step&, S& l, I&) {
         l.query_start = {static_cast<const std::int32_t*>(nullptr), 3};
       }},
      {"visible without address", missing_argument, "visible",
       [](Step&, S& l, I&) {
         l.visible = {static_cast<const std::int32_t*>(nullptr), 3};
       }},
  };
  return kCases;
}

TEST(BadInput, EveryBrokenBuildNamesItsFieldAndKeepsTheLastStep) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  Step good;
  const latte_problem problem = to_c(good.problem);
  const latte_limits limits = to_c(good.limits);
  auto builder = MetadataBuilder::create(backend, good.problem, good.limits).value();
  latte_builder* c_builder = nullptr;
  ASSERT_EQ(latte_builder_create(c_backend, &problem, &limits, nullptr, &c_builder, nullptr), LATTE_OK);
  const DecodeMetadata last = builder.build(0, good.lengths()).value();
  const std::vector<WorkRecord> records(last.plan().work_info_set.begin(), last.plan().work_info_set.end());

  for (const BuildCase& broken : build_cases()) {
    SCOPED_TRACE(broken.name);
    Step step;
    StepLengths lengths = step.lengths();
    std::int32_t slot = 0;
    broken.break_it(step, lengths, slot);
    expect_error(answer(builder.build(slot, lengths).status()), broken.code, broken.field);

    const latte_lengths c_lengths = to_c(lengths);
    latte_metadata metadata = LATTE_METADATA_INIT;
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code = latte_builder_build(c_builder, slot, &c_lengths, &metadata, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(metadata.slot, nullptr);
  }
  EXPECT_TRUE(decode(last, good.args()).ok());
  EXPECT_EQ(records, std::vector<WorkRecord>(last.plan().work_info_set.begin(), last.plan().work_info_set.end()));
  latte_builder_destroy(c_builder, nullptr);
  latte_backend_close(c_backend, nullptr);
}

}  // namespace
}  // namespace latte::bad_input
