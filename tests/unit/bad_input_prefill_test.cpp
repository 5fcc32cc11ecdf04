// Broken prefill() calls: each must name its field and leave the outputs alone, from C++ and from C.
#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "backend/validate/validate.hpp"
#include "tests/unit/bad_prefill.hpp"

namespace latte::bad_input {
namespace {

using C = PrefillCase;
using A = PrefillArgs;
using BrokenCall = Case<PrefillCase, PrefillArgs>;
using enum Code;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();

const std::vector<BrokenCall>& prefill_cases() {
  static const std::vector<BrokenCall> kCases = {
      // inputs
      {"no q", missing_argument, "q", [](C&, A& a) { a.q = {}; }},
      {"q without address", missing_argument, "q", [](C&, A& a) { a.q.data = nullptr; }},
      {"q of rank 2", invalid_argument, "q", [](C&, A& a) { a.q.rank = 2; }},
      {"q of rank 99", invalid_argument, "q", [](C&, A& a) { a.q.rank = 99; }},
      {"q of another dtype", invalid_argument, "q", [](C&, A& a) { a.q.dtype = Dtype::bf16; }},
      {"q of no dtype", invalid_argument, "q", [](C&, A& a) { a.q.dtype = static_cast<Dtype>(77); }},
      {"q with too few rows", invalid_argument, "q", [](C&, A& a) { a.q.shape[0] = 2; }},
      {"q with other heads", invalid_argument, "q", [](C&, A& a) { a.q.shape[1] = 4; }},
      {"q of v's width", invalid_argument, "q", [](C&, A& a) { a.q.shape[2] = C::kV; }},
      {"q not dense", invalid_argument, "q", [](C&, A& a) { a.q.stride[2] = 2; }},
      {"q stride that overflows", invalid_argument, "q", [](C&, A& a) { a.q.stride[0] = kHuge / 2; }},
      {"q misaligned", invalid_argument, "q",
       [](C&, A& a) { a.q.data = static_cast<const std::byte*>(a.q.data) + 1; }},
      {"no k", missing_argument, "k", [](C&, A& a) { a.k = {}; }},
      {"k without address", missing_argument, "k", [](C&, A& a) { a.k.data = nullptr; }},
      {"k of another dtype", invalid_argument, "k", [](C&, A& a) { a.k.dtype = Dtype::f16; }},
      {"k with too few rows", invalid_argument, "k", [](C&, A& a) { a.k.shape[0] = 2; }},
      {"k with one head", invalid_argument, "k", [](C&, A& a) { a.k.shape[1] = 1; }},
      {"k of another width", invalid_argument, "k", [](C&, A& a) { a.k.shape[2] = C::kQk + 1; }},
      {"k not dense", invalid_argument, "k", [](C&, A& a) { a.k.stride[2] = -1; }},
      {"k stride that overflows", invalid_argument, "k", [](C&, A& a) { a.k.stride[1] = -kHuge / 2; }},
      {"k misaligned", invalid_argument, "k",
       [](C&, A& a) { a.k.data = static_cast<const std::byte*>(a.k.data) + 2; }},
      {"no v", missing_argument, "v", [](C&, A& a) { a.v = {}; }},
      {"v without address", missing_argument, "v", [](C&, A& a) { a.v.data = nullptr; }},
      {"v with too few rows", invalid_argument, "v", [](C&, A& a) { a.v.shape[0] = 0; }},
      {"v of k's width", invalid_argument, "v", [](C&, A& a) { a.v.shape[2] = C::kQk; }},
      {"v of rank 4", invalid_argument, "v", [](C&, A& a) { a.v.rank = 4; }},
      {"v of another dtype", invalid_argument, "v", [](C&, A& a) { a.v.dtype = Dtype::fp8_e4m3; }},
      {"v not dense", invalid_argument, "v", [](C&, A& a) { a.v.stride[2] = 0; }},
      {"v stride that overflows", invalid_argument, "v", [](C&, A& a) { a.v.stride[0] = kLowest; }},
      {"v misaligned", invalid_argument, "v",
       [](C&, A& a) { a.v.data = static_cast<const std::byte*>(a.v.data) + 3; }},
      // outputs
      {"no out", missing_argument, "out", [](C&, A& a) { a.out = {}; }},
      {"out without address", missing_argument, "out", [](C&, A& a) { a.out.data = nullptr; }},
      {"out of another dtype", invalid_argument, "out", [](C&, A& a) { a.out.dtype = Dtype::bf16; }},
      {"out with too few rows", invalid_argument, "out", [](C&, A& a) { a.out.shape[0] = 2; }},
      {"out of another width", invalid_argument, "out", [](C&, A& a) { a.out.shape[2] = 32; }},
      {"out not dense", invalid_argument, "out", [](C&, A& a) { a.out.stride[2] = 3; }},
      {"out rows on one another", invalid_argument, "out", [](C&, A& a) { a.out.stride[0] = 0; }},
      {"out heads half on one another", invalid_argument, "out", [](C&, A& a) { a.out.stride[1] = C::kV / 2; }},
      {"lse of another dtype", invalid_argument, "lse", [](C&, A& a) { a.lse.dtype = Dtype::bf16; }},
      {"lse of rank 3", invalid_argument, "lse", [](C&, A& a) { a.lse.rank = 3; }},
      {"lse with other heads", invalid_argument, "lse", [](C&, A& a) { a.lse.shape[1] = 2; }},
      {"lse of one number", invalid_argument, "lse",
       [](C&, A& a) {
         a.lse.stride = {0, 0};
       }},
      {"lse without address", missing_argument, "lse", [](C&, A& a) { a.lse.data = nullptr; }},
      // numbers
      {"no scale", invalid_argument, "scale", [](C&, A& a) { a.scale = 0; }},
      {"scale is NaN", invalid_argument, "scale", [](C&, A& a) { a.scale = kNan; }},
      {"scale is infinite", invalid_argument, "scale", [](C&, A& a) { a.scale = kInf; }},
      {"q_scale with fp32", invalid_argument, "q_scale", [](C&, A& a) { a.q_scale.value = 0.5f; }},
      {"k_scale is zero", invalid_argument, "k_scale", [](C&, A& a) { a.k_scale.value = 0; }},
      {"v_scale is NaN", invalid_argument, "v_scale", [](C&, A& a) { a.v_scale.value = kNan; }},
      {"v_scale behind a pointer with fp32", invalid_argument, "v_scale",
       [](C& c, A& a) { a.v_scale.ptr = &c.good_scale; }},
      {"k_scale a head without pointer", missing_argument, "k_scale", [](C&, A& a) { a.k_scale.per_head = true; }},
      {"kv_scale with an fp32 cache", invalid_argument, "kv_scale", [](C&, A& a) { a.kv_scale.value = 2; }},
      {"kv_scale is infinite", invalid_argument, "kv_scale", [](C&, A& a) { a.kv_scale.value = kInf; }},
      {"kv_scale behind a pointer", invalid_argument, "kv_scale", [](C&, A& a) { a.kv_scale.ptr = &kInf; }},
      // workspace and stream
      {"workspace too small", invalid_argument, "workspace", [](C& c, A& a) { a.workspace = {c.workspace, 64}; }},
      {"workspace misaligned", invalid_argument, "workspace",
       [](C& c, A& a) { a.workspace = {c.workspace + 32, std::size_t{1} << 40}; }},
      {"workspace without address", missing_argument, "workspace",
       [](C&, A& a) { a.workspace = {static_cast<std::byte*>(nullptr), 64}; }},
      {"a stream on the cpu", invalid_argument, "stream", [](C& c, A& a) { a.stream = &c; }},
      // context
      {"nobody to expand chunks", missing_argument, "expand", [](C&, A& a) { a.expand = nullptr; }},
      {"no cache", missing_argument, "kv_cache", [](C&, A& a) { a.kv_cache = {}; }},
      {"cache of another dtype", invalid_argument, "kv_cache", [](C&, A& a) { a.kv_cache.dtype = Dtype::bf16; }},
      {"cache of another page size", invalid_argument, "kv_cache", [](C&, A& a) { a.kv_cache.shape[1] = 5; }},
      {"cache of another width", invalid_argument, "kv_cache", [](C&, A& a) { a.kv_cache.shape[2] = 47; }},
      {"no pages", missing_argument, "pages", [](C&, A& a) { a.pages = {}; }},
      {"table and lists", invalid_argument, "pages",
       [](C& c, A& a) {
         a.pages.page_indptr = c.page_indptr;
         a.pages.page_indices = c.page_indices;
       }},
      {"table too narrow", invalid_argument, "pages.max_pages", [](C&, A& a) { a.pages.max_pages = 1; }},
      {"a needed page id past the cache", invalid_argument, "pages.block_table",
       [](C& c, A&) { c.block_table[1] = C::kPages; }},
      {"a needed page id below zero", invalid_argument, "pages.block_table",
       [](C& c, A&) { c.block_table[0] = -1; }},
      {"lists of another batch", invalid_argument, "pages.page_indptr",
       [](C& c, A& a) {
         c.use_page_lists(a);
         a.pages.page_indptr = a.pages.page_indptr.first(2);
       }},
      {"lists with too few pages", invalid_argument, "pages.page_indptr",
       [](C& c, A& a) {
         c.page_indptr = {0, 1, 1};
         c.use_page_lists(a);
       }},
      {"a listed page id past the cache", invalid_argument, "pages.page_indices",
       [](C& c, A& a) {
         c.page_indices[1] = 1 << 30;
         c.use_page_lists(a);
       }},
  };
  return kCases;
}

class BadPrefill : public testing::Test {
 protected:
  BadPrefill() {
    latte_prefill_context context;
    const latte_prefill_problem problem = to_c(case_.problem, context);
    const latte_limits limits = to_c(case_.limits);
    EXPECT_EQ(latte_prefill_builder_create(c_backend_, &problem, &limits, nullptr, &c_builder_, nullptr), LATTE_OK);
    const latte_prefill_lengths lengths = to_c(case_.lengths());
    EXPECT_EQ(latte_prefill_builder_build(c_builder_, 0, &lengths, &c_metadata_, nullptr), LATTE_OK);
  }
  ~BadPrefill() override {
    latte_prefill_builder_destroy(c_builder_, nullptr);
    latte_backend_close(c_backend_, nullptr);
  }

  PrefillCase case_;
  Backend backend_ = Backend::open({.threads = 1}).value();
  PrefillBuilder builder_ = PrefillBuilder::create(backend_, case_.problem, case_.limits).value();
  PrefillMetadata metadata_ = builder_.build(0, case_.lengths()).value();
  latte_backend* c_backend_ = open_c();
  latte_prefill_builder* c_builder_ = nullptr;
  latte_prefill_metadata c_metadata_ = LATTE_PREFILL_METADATA_INIT;
};

TEST_F(BadPrefill, TheUnbrokenCallSucceedsAndWrites) {
  const auto check = [&] {
    // One key like another: the output is the value they share, the LSE counts the keys.
    const float score = 0.125f * C::kQk * 0.25f * 0.5f;
    for (std::size_t i = 0; i < 3 * C::kHeads * C::kV; ++i) ASSERT_NEAR(case_.out[i], 0.75f, 1e-6f) << i;
    EXPECT_NEAR(case_.lse[0], score + std::log(6.0f), 1e-5f);
    EXPECT_NEAR(case_.lse[C::kHeads], score + std::log(7.0f), 1e-5f);
    EXPECT_NEAR(case_.lse[2 * C::kHeads], score, 1e-5f);
    // The row behind the step's last one is not touched.
    EXPECT_TRUE(case_.tail_untouched());
    EXPECT_EQ(case_.expanded, 1);
  };
  ASSERT_TRUE(prefill(metadata_, case_.args()).ok());
  check();
  case_.poison();
  case_.expanded = 0;
  PrefillArgs lists = case_.args();
  case_.use_page_lists(lists);
  const latte_prefill_args c_lists = case_.c_args(lists);
  ASSERT_EQ(c_metadata_.chunks, 1);
  ASSERT_EQ(latte_prefill(&c_metadata_, &c_lists, nullptr), LATTE_OK);
  check();
}

TEST_F(BadPrefill, EveryBrokenCallNamesItsFieldInCpp) {
  EXPECT_GE(prefill_cases().size(), 30u);
  for (const BrokenCall& broken : prefill_cases()) {
    SCOPED_TRACE(broken.name);
    PrefillCase step;
    PrefillArgs args = step.args();
    broken.break_it(step, args);
    expect_error(answer(prefill(metadata_, args)), broken.code, broken.field);
    EXPECT_TRUE(step.untouched());
    EXPECT_EQ(step.expanded, 0);
  }
}

TEST_F(BadPrefill, EveryBrokenCallNamesItsFieldInC) {
  for (const BrokenCall& broken : prefill_cases()) {
    SCOPED_TRACE(broken.name);
    PrefillCase step;
    PrefillArgs args = step.args();
    broken.break_it(step, args);
    const latte_prefill_args c_args = step.c_args(args);
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code = latte_prefill(&c_metadata_, &c_args, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(error.code, code);
    EXPECT_TRUE(step.untouched());
    EXPECT_EQ(step.expanded, 0);
  }
}

// Strides are free on the host; a device's copy engine walks forward, by rows that do not overlap and not too far. What
// is checked for a device does not need one.
TEST_F(BadPrefill, StridesThatNoCopyEngineWalksAreRefusedForADevice) {
  constexpr std::int64_t kFar = std::int64_t{1} << 38;
  const auto check = [&](backend::Place place, const PrefillArgs& args) {
    const backend::PlannedPrefill step{
        .problem = case_.problem, .query_start = case_.query_start, .kv_start = case_.kv_start, .place = place};
    return validate_prefill_args(step, args);
  };
  const std::tuple<const char*, ConstTensorView PrefillArgs::*, std::int64_t> inputs[] = {
      {"q", &PrefillArgs::q, C::kQk}, {"k", &PrefillArgs::k, C::kQk}, {"v", &PrefillArgs::v, C::kV}};
  for (const auto& [field, input, width] : inputs)
    for (const std::size_t axis : {0, 1}) {
      SCOPED_TRACE(testing::Message() << field << " axis " << axis);
      PrefillArgs args = case_.args();
      std::int64_t& stride = (args.*input).stride[axis];
      for (const std::int64_t wrong : {width - 4, std::int64_t{0}, -width, kFar}) {
        stride = wrong;
        const Answer refused = answer(check(backend::Place::device, args));
        expect_error(refused, invalid_argument, field);
        EXPECT_NE(refused.expected.find(std::to_string(width)), std::string::npos) << refused.expected;
        EXPECT_NE(refused.got.find(std::to_string(wrong)), std::string::npos) << refused.got;
        EXPECT_TRUE(check(backend::Place::host, args).ok()) << wrong;
      }
      for (const std::int64_t right : {width, kFar - 4}) {
        stride = right;
        EXPECT_TRUE(check(backend::Place::device, args).ok()) << right;
      }
      stride = width + 1;
      expect_error(answer(check(backend::Place::device, args)), invalid_argument, field);
    }
  // Nobody walks a dimension of one element, nor a tensor without any.
  case_.query_start = {0, 1, 1};
  case_.kv_start = {0, 0, 0};
  PrefillArgs args = case_.args();
  args.q.shape[0] = 1;
  args.k.shape[0] = args.v.shape[0] = 0;
  args.q.stride[0] = args.k.stride[0] = args.v.stride[1] = -4;
  const Status status = check(backend::Place::device, args);
  EXPECT_TRUE(status.ok()) << status.message();
}

// With `validate` or without: on the host every page of the context is looked at, also of requests without a query.
TEST_F(BadPrefill, WildPagesOfAContextAreToldWithRequestAndPosition) {
  case_.query_start = {0, 2, 2};
  case_.context_lens = {5, 7};
  case_.page_indptr = {0, 2, 4};
  for (bool validate : {false, true})
    for (std::int32_t wild : {-7, 1 << 30}) {
      case_.block_table = case_.page_indices = {0, 1, 2, wild};
      auto builder = PrefillBuilder::create(backend_, case_.problem, case_.limits, {.validate = validate}).value();
      const PrefillMetadata metadata = builder.build(0, case_.lengths()).value();
      const std::string got = std::to_string(wild) + " as page 1 of request 1";
      PrefillArgs args = case_.args();
      const Status table = prefill(metadata, args);
      expect_error(answer(table), invalid_argument, "pages.block_table");
      EXPECT_EQ(table.got(), got);
      case_.use_page_lists(args);
      const Status lists = prefill(metadata, args);
      expect_error(answer(lists), invalid_argument, "pages.page_indices");
      EXPECT_EQ(lists.got(), got);
      EXPECT_TRUE(case_.untouched());
      EXPECT_EQ(case_.expanded, 0);
      case_.page_indices[3] = 3;
      EXPECT_TRUE(prefill(metadata, args).ok());
      case_.poison();
      case_.expanded = 0;
    }
}

TEST_F(BadPrefill, WhatExpandSaysEndsTheCall) {
  case_.expand_fails = true;
  expect_error(answer(prefill(metadata_, case_.args())), internal, "weights");
  const latte_prefill_args args = case_.c_args(case_.args());
  latte_error error = LATTE_ERROR_INIT;
  expect_error(answer(latte_prefill(&c_metadata_, &args, &error), error), internal, "weights");
  EXPECT_EQ(case_.expanded, 2);
}

// As strncpy leaves texts that are too long. What is read past them only AddressSanitizer sees.
TEST_F(BadPrefill, TextsOfExpandThatHaveNoEndAreCut) {
  latte_prefill_args args = case_.c_args(case_.args());
  args.expand = [](void*, const latte_context_chunk*, latte_error* error) -> latte_code {
    std::memset(error->field, 'f', sizeof(error->field));
    std::memset(error->expected, 'e', sizeof(error->expected));
    std::memset(error->got, 'g', sizeof(error->got));
    return LATTE_INVALID_ARGUMENT;
  };
  latte_error error = LATTE_ERROR_INIT;
  EXPECT_EQ(latte_prefill(&c_metadata_, &args, &error), LATTE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(error.field), std::string(sizeof(error.field) - 1, 'f'));
  EXPECT_EQ(std::string(error.expected), std::string(sizeof(error.expected) - 1, 'e'));
  EXPECT_EQ(std::string(error.got), std::string(sizeof(error.got) - 1, 'g'));
}

TEST_F(BadPrefill, Fp8ScalesAreLookedAtWhereTheyAreUsed) {
  case_.problem.dtype = Dtype::fp8_e4m3;
  case_.problem.context.reset();
  case_.context_lens.clear();
  auto builder = PrefillBuilder::create(backend_, case_.problem, case_.limits).value();
  const PrefillMetadata metadata = builder.build(0, case_.lengths()).value();
  PrefillArgs good = case_.args();
  good.q.dtype = good.k.dtype = good.v.dtype = Dtype::fp8_e4m3;
  good.kv_cache = {};
  good.pages = {};
  good.expand = nullptr;
  float per_head[] = {1, -1, 2};
  PrefillArgs args = good;
  args.k_scale = {.ptr = per_head, .per_head = true};
  expect_error(answer(prefill(metadata, args)), invalid_argument, "k_scale");
  args = good;
  args.v_scale.ptr = &case_.bad_scale;
  expect_error(answer(prefill(metadata, args)), invalid_argument, "v_scale");
  args = good;
  args.q_scale.value = 1e30f;
  args.k_scale.value = 1e30f;
  expect_error(answer(prefill(metadata, args)), invalid_argument, "scale");
  const float tiny[] = {1, 1, 1e-30f};  // good numbers, whose product of the last head is 0
  args = good;
  args.q_scale = args.k_scale = {.ptr = tiny, .per_head = true};
  expect_error(answer(prefill(metadata, args)), invalid_argument, "scale");
  EXPECT_TRUE(case_.untouched());
  per_head[1] = 3;
  args = good;
  args.k_scale = {.ptr = per_head, .per_head = true};
  args.v_scale.ptr = &case_.good_scale;
  EXPECT_TRUE(prefill(metadata, args).ok());
}

TEST_F(BadPrefill, ACacheHasNoScalesForEachHead) {
  const float ones[] = {1, 1, 1};
  PrefillArgs args = case_.args();
  args.kv_scale = {.ptr = ones, .per_head = true};
  expect_error(answer(prefill(metadata_, args)), invalid_argument, "kv_scale");
  EXPECT_TRUE(case_.untouched());
  args.kv_scale.per_head = false;
  EXPECT_TRUE(prefill(metadata_, args).ok());
}

TEST_F(BadPrefill, ArgumentsOfAContextNeedOne) {
  case_.problem.context.reset();
  case_.context_lens.clear();
  auto builder = PrefillBuilder::create(backend_, case_.problem, case_.limits).value();
  const PrefillMetadata metadata = builder.build(0, case_.lengths()).value();
  PrefillArgs args = case_.args();
  expect_error(answer(prefill(metadata, args)), invalid_argument, "kv_cache");
  args.kv_cache = {};
  expect_error(answer(prefill(metadata, args)), invalid_argument, "pages");
  args.pages = {};
  EXPECT_TRUE(case_.untouched());
  // A function that nobody will call does no harm.
  EXPECT_TRUE(prefill(metadata, args).ok());
}

TEST_F(BadPrefill, MetadataThatWasNeverBuiltOrIsOldIsAnErrorValue) {
  const latte_prefill_args args = case_.c_args(case_.args());
  latte_error error = LATTE_ERROR_INIT;
  expect_error(answer(prefill(PrefillMetadata(), case_.args())), invalid_argument, "metadata");
  const latte_prefill_metadata never = LATTE_PREFILL_METADATA_INIT;
  expect_error(answer(latte_prefill(&never, &args, &error), error), invalid_argument, "metadata");
  expect_error(answer(latte_prefill(nullptr, &args, &error), error), missing_argument, "metadata");
  expect_error(answer(latte_prefill(&c_metadata_, nullptr, &error), error), missing_argument, "args");
  ASSERT_TRUE(builder_.build(0, case_.lengths()).ok());
  expect_error(answer(prefill(metadata_, case_.args())), stale_metadata, "metadata");
  const latte_prefill_metadata old = c_metadata_;
  const latte_prefill_lengths lengths = to_c(case_.lengths());
  ASSERT_EQ(latte_prefill_builder_build(c_builder_, 0, &lengths, &c_metadata_, nullptr), LATTE_OK);
  expect_error(answer(latte_prefill(&old, &args, &error), error), stale_metadata, "metadata");
  latte_plan plan = LATTE_PLAN_INIT;
  expect_error(answer(latte_prefill_metadata_plan(&old, -1, &plan, &error), error), stale_metadata, "metadata");
  expect_error(answer(latte_prefill_metadata_plan(&c_metadata_, 1, &plan, &error), error), invalid_argument, "chunk");
  EXPECT_EQ(latte_prefill_metadata_plan(&c_metadata_, 0, &plan, &error), LATTE_OK);
  EXPECT_TRUE(case_.untouched());
}

TEST_F(BadPrefill, ABuilderWithoutWorkspaceAsksForOne) {
  auto builder =
      PrefillBuilder::create(backend_, case_.problem, case_.limits, {.policy = {}, .own_workspace = false}).value();
  expect_error(answer(prefill(builder.build(0, case_.lengths()).value(), case_.args())), missing_argument, "workspace");
  EXPECT_TRUE(case_.untouched());
}

}  // namespace
}  // namespace latte::bad_input
