// Broken decode() calls: each must name its field and leave the outputs alone, from C++ and from C.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "backend/validate/validate.hpp"
#include "tests/unit/bad_input.hpp"

namespace latte::bad_input {
namespace {

using DecodeCase = Case<Step, DecodeArgs>;
using enum Code;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

const std::vector<DecodeCase>& decode_cases() {
  static const std::vector<DecodeCase> kCases = {
      // queries
      {"no query", missing_argument, "q", [](Step&, DecodeArgs& a) { a.q = {}; }},
      {"q and the pair", invalid_argument, "q",
       [](Step& s, DecodeArgs& a) {
         const ConstTensorView q = a.q;
         s.use_pair(a);
         a.q = q;
       }},
      {"q_nope alone", missing_argument, "q_pe",
       [](Step& s, DecodeArgs& a) {
         s.use_pair(a);
         a.q_pe = {};
       }},
      {"q_pe alone", missing_argument, "q_nope",
       [](Step& s, DecodeArgs& a) {
         s.use_pair(a);
         a.q_nope = {};
       }},
      {"q_pe too wide", invalid_argument, "q_pe",
       [](Step& s, DecodeArgs& a) {
         s.use_pair(a);
         a.q_pe.shape[2] = Step::kRope + 1;
       }},
      {"q_nope of another dtype", invalid_argument, "q_nope",
       [](Step& s, DecodeArgs& a) {
         s.use_pair(a);
         a.q_nope.dtype = Dtype::bf16;
       }},
      {"q without address", missing_argument, "q", [](Step&, DecodeArgs& a) { a.q.data = nullptr; }},
      {"q without shape", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.rank = 0; }},
      {"q of rank 2", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.rank = 2; }},
      {"q of rank 99", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.rank = 99; }},
      {"q of rank -1", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.rank = -1; }},
      {"q of another dtype", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.dtype = Dtype::f16; }},
      {"q of no dtype", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.dtype = static_cast<Dtype>(77); }},
      {"q with too few rows", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.shape[0] = 2; }},
      {"q with negative rows", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.shape[0] = -4; }},
      {"q with other heads", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.shape[1] = 4; }},
      {"q of latent width only", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.shape[2] = Step::kLatent; }},
      {"q not dense", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.stride[2] = 2; }},
      {"q stride that overflows", invalid_argument, "q", [](Step&, DecodeArgs& a) { a.q.stride[0] = kHuge / 2; }},
      {"q stride of least int64", invalid_argument, "q",
       [](Step&, DecodeArgs& a) { a.q.stride[0] = std::numeric_limits<std::int64_t>::min(); }},
      {"q misaligned", invalid_argument, "q",
       [](Step&, DecodeArgs& a) { a.q.data = static_cast<const std::byte*>(a.q.data) + 1; }},
      // the cache
      {"no cache", missing_argument, "kv_cache", [](Step&, DecodeArgs& a) { a.kv_cache = {}; }},
      {"cache without address", missing_argument, "kv_cache", [](Step&, DecodeArgs& a) { a.kv_cache.data = nullptr; }},
      {"cache of rank 4", invalid_argument, "kv_cache", [](Step&, DecodeArgs& a) { a.kv_cache.rank = 4; }},
      {"cache of another dtype", invalid_argument, "kv_cache",
       [](Step&, DecodeArgs& a) { a.kv_cache.dtype = Dtype::bf16; }},
      {"cache of another page size", invalid_argument, "kv_cache",
       [](Step&, DecodeArgs& a) { a.kv_cache.shape[1] = 5; }},
      {"cache of another width", invalid_argument, "kv_cache", [](Step&, DecodeArgs& a) { a.kv_cache.shape[2] = 47; }},
      {"cache not dense", invalid_argument, "kv_cache", [](Step&, DecodeArgs& a) { a.kv_cache.stride[2] = -1; }},
      // outputs
      {"no out", missing_argument, "out", [](Step&, DecodeArgs& a) { a.out = {}; }},
      {"out without address", missing_argument, "out", [](Step&, DecodeArgs& a) { a.out.data = nullptr; }},
      {"out of another dtype", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.dtype = Dtype::bf16; }},
      {"out with too few rows", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.shape[0] = 2; }},
      {"out of another width", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.shape[2] = 48; }},
      {"out not dense", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.stride[2] = 3; }},
      {"out rows on one another", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.stride[0] = 0; }},
      {"out heads on one another", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.stride[1] = 0; }},
      {"out heads half on one another", invalid_argument, "out", [](Step&, DecodeArgs& a) { a.out.stride[1] = 16; }},
      {"out token on another token's head", invalid_argument, "out",
       [](Step&, DecodeArgs& a) { a.out.stride[0] = 2 * Step::kLatent; }},
      {"lse of another dtype", invalid_argument, "lse", [](Step&, DecodeArgs& a) { a.lse.dtype = Dtype::bf16; }},
      {"lse of rank 3", invalid_argument, "lse", [](Step&, DecodeArgs& a) { a.lse.rank = 3; }},
      {"lse with other heads", invalid_argument, "lse", [](Step&, DecodeArgs& a) { a.lse.shape[1] = 2; }},
      {"lse of one number", invalid_argument, "lse",
       [](Step&, DecodeArgs& a) {
         a.lse.stride = {0, 0};
       }},
      {"lse without address", missing_argument, "lse", [](Step&, DecodeArgs& a) { a.lse.data = nullptr; }},
      // pages
      {"no pages", missing_argument, "pages", [](Step&, DecodeArgs& a) { a.pages = {}; }},
      {"table and lists", invalid_argument, "pages",
       [](Step& s, DecodeArgs& a) {
         const PageTable table = a.pages;
         s.use_page_lists(a);
         a.pages.block_table = table.block_table;
         a.pages.max_pages = table.max_pages;
       }},
      {"table without address", missing_argument, "pages.block_table",
       [](Step&, DecodeArgs& a) { a.pages.block_table = nullptr; }},
      {"table too narrow", invalid_argument, "pages.max_pages", [](Step&, DecodeArgs& a) { a.pages.max_pages = 2; }},
      {"table of negative width", invalid_argument, "pages.max_pages",
       [](Step&, DecodeArgs& a) { a.pages.max_pages = -1; }},
      {"table stride that overflows", invalid_argument, "pages.block_table_stride",
       [](Step&, DecodeArgs& a) { a.pages.block_table_stride = kHuge / 2; }},
      {"a needed page id that is negative", invalid_argument, "pages.block_table",
       [](Step& s, DecodeArgs&) { s.block_table[1] = -1; }},
      {"a needed page id past the cache", invalid_argument, "pages.block_table",
       [](Step& s, DecodeArgs&) { s.block_table[5] = Step::kPages; }},
      {"lists without indptr", missing_argument, "pages.page_indptr",
       [](Step& s, DecodeArgs& a) {
         s.use_page_lists(a);
         a.pages.page_indptr = {};
       }},
      {"indptr of another batch", invalid_argument, "pages.page_indptr",
       [](Step& s, DecodeArgs& a) {
         s.use_page_lists(a);
         a.pages.page_indptr = a.pages.page_indptr.first(2);
       }},
      {"indptr that falls", invalid_argument, "pages.page_indptr",
       [](Step& s, DecodeArgs& a) {
         s.page_indptr = {0, 5, 3};
         s.use_page_lists(a);
       }},
      {"indptr that starts below zero", invalid_argument, "pages.page_indptr",
       [](Step& s, DecodeArgs& a) {
         s.page_indptr[0] = -1;
         s.use_page_lists(a);
       }},
      {"lists with too few pages", invalid_argument, "pages.page_indptr",
       [](Step& s, DecodeArgs& a) {
         s.page_indptr = {0, 1, 4};
         s.use_page_lists(a);
       }},
      {"lists shorter than indptr says", invalid_argument, "pages.page_indices",
       [](Step& s, DecodeArgs& a) {
         s.page_indices.pop_back();
         s.use_page_lists(a);
       }},
      {"indptr without lists", missing_argument, "pages.page_indices",
       [](Step& s, DecodeArgs& a) {
         s.use_page_lists(a);
         a.pages.page_indices = {};
       }},
      {"a listed page id past the cache", invalid_argument, "pages.page_indices",
       [](Step& s, DecodeArgs& a) {
         s.page_indices[4] = 1 << 30;
         s.use_page_lists(a);
       }},
      // numbers
      {"no scale", invalid_argument, "scale", [](Step&, DecodeArgs& a) { a.scale = 0; }},
      {"scale is NaN", invalid_argument, "scale", [](Step&, DecodeArgs& a) { a.scale = kNan; }},
      {"scale is infinite", invalid_argument, "scale", [](Step&, DecodeArgs& a) { a.scale = kInf; }},
      {"scale is negative", invalid_argument, "scale", [](Step&, DecodeArgs& a) { a.scale = -0.1f; }},
      {"scale that is infinite times log2(e)", invalid_argument, "scale",
       [](Step&, DecodeArgs& a) { a.scale = 2.5e38f; }},
      {"kv_scale is zero", invalid_argument, "kv_scale", [](Step&, DecodeArgs& a) { a.kv_scale.value = 0; }},
      {"kv_scale with an fp32 cache", invalid_argument, "kv_scale", [](Step&, DecodeArgs& a) { a.kv_scale.value = 2; }},
      {"kv_scale behind a pointer", invalid_argument, "kv_scale",
       [](Step& s, DecodeArgs& a) { a.kv_scale.ptr = &s.bad_scale; }},
      {"q_scale is NaN", invalid_argument, "q_scale", [](Step&, DecodeArgs& a) { a.q_scale.value = kNan; }},
      {"q_scale with fp32 q", invalid_argument, "q_scale", [](Step&, DecodeArgs& a) { a.q_scale.value = 0.5f; }},
      {"q_scale behind a pointer", invalid_argument, "q_scale",
       [](Step& s, DecodeArgs& a) { a.q_scale.ptr = &s.bad_scale; }},
      // workspace
      {"workspace too small", invalid_argument, "workspace",
       [](Step& s, DecodeArgs& a) { a.workspace = {s.workspace, 64}; }},
      {"workspace misaligned", invalid_argument, "workspace",
       [](Step& s, DecodeArgs& a) { a.workspace = {s.workspace + 8, std::size_t{1} << 40}; }},
      {"workspace without address", missing_argument, "workspace",
       [](Step&, DecodeArgs& a) { a.workspace = {static_cast<std::byte*>(nullptr), 64}; }},
  };
  return kCases;
}

class BadDecode : public testing::Test {
 protected:
  BadDecode() {
    const latte_problem problem = to_c(step_.problem);
    const latte_limits limits = to_c(step_.limits);
    EXPECT_EQ(latte_builder_create(c_backend_, &problem, &limits, nullptr, &c_builder_, nullptr), LATTE_OK);
    const latte_lengths lengths = to_c(step_.lengths());
    EXPECT_EQ(latte_builder_build(c_builder_, 0, &lengths, &c_metadata_, nullptr), LATTE_OK);
  }
  ~BadDecode() override {
    latte_builder_destroy(c_builder_, nullptr);
    latte_backend_close(c_backend_, nullptr);
  }

  Step step_;
  Backend backend_ = Backend::open({.threads = 1}).value();
  MetadataBuilder builder_ = MetadataBuilder::create(backend_, step_.problem, step_.limits).value();
  DecodeMetadata metadata_ = builder_.build(0, step_.lengths()).value();
  latte_backend* c_backend_ = open_c();
  latte_builder* c_builder_ = nullptr;
  latte_metadata c_metadata_ = LATTE_METADATA_INIT;
};

TEST_F(BadDecode, TheUnbrokenCallSucceedsAndWrites) {
  ASSERT_TRUE(decode(metadata_, step_.args()).ok());
  EXPECT_FALSE(step_.untouched());
  // One key like another: the output is the value they share.
  EXPECT_NEAR(step_.out[0], 0.5f, 1e-6f);
  const float score = 0.125f * (Step::kLatent + Step::kRope) * 0.25f * 0.5f;
  EXPECT_NEAR(step_.lse[0], score + std::log(5.0f), 1e-5f);
  step_.poison();
  DecodeArgs pair = step_.args();
  step_.use_pair(pair);
  step_.use_page_lists(pair);
  const latte_decode_args c_pair = to_c(pair);
  ASSERT_EQ(latte_decode(&c_metadata_, &c_pair, nullptr), LATTE_OK);
  EXPECT_NEAR(step_.out[0], 0.5f, 1e-6f);
}

TEST_F(BadDecode, EveryBrokenCallNamesItsFieldInCpp) {
  EXPECT_GE(decode_cases().size(), 40u);
  for (const DecodeCase& broken : decode_cases()) {
    SCOPED_TRACE(broken.name);
    Step step;
    DecodeArgs args = step.args();
    broken.break_it(step, args);
    expect_error(answer(decode(metadata_, args)), broken.code, broken.field);
    EXPECT_TRUE(step.untouched());
  }
}

TEST_F(BadDecode, EveryBrokenCallNamesItsFieldInC) {
  for (const DecodeCase& broken : decode_cases()) {
    SCOPED_TRACE(broken.name);
    Step step;
    DecodeArgs args = step.args();
    broken.break_it(step, args);
    const latte_decode_args c_args = to_c(args);
    latte_error error = LATTE_ERROR_INIT;
    const latte_code code = latte_decode(&c_metadata_, &c_args, &error);
    expect_error(answer(code, error), broken.code, broken.field);
    EXPECT_EQ(error.code, code);
    EXPECT_TRUE(step.untouched());
  }
}

// The values of such scales are fine: it is their number that nobody has a use for. C has no field for it.
TEST_F(BadDecode, ScalesForEachHeadAreRefused) {
  const std::vector<float> ones(static_cast<std::size_t>(step_.problem.heads), 1.0f);
  const Fp8Scale per_head{.ptr = ones.data(), .per_head = true};
  DecodeArgs query = step_.args(), cache = query;
  query.q_scale = per_head;
  expect_error(answer(decode(metadata_, query)), invalid_argument, "q_scale");
  cache.kv_scale = per_head;
  expect_error(answer(decode(metadata_, cache)), invalid_argument, "kv_scale");
  EXPECT_TRUE(step_.untouched());
  cache.kv_scale.per_head = false;
  EXPECT_TRUE(decode(metadata_, cache).ok());
}

// Validation sees addresses only, so a device's rules need no device.
TEST(BadDeviceCache, StridesThatACopyEngineCannotWalkNameTheCache) {
  alignas(16) std::byte memory[16] = {};
  const auto validate = [&](std::int64_t pages, std::int32_t page_size, std::int64_t page_stride,
                            std::int64_t token_stride, backend::Place place) {
    ConstTensorView cache = dense(static_cast<const void*>(memory), Dtype::bf16, {pages, page_size, 576});
    cache.stride[0] = page_stride;
    cache.stride[1] = token_stride;
    return backend::validate_cache({.heads = 16, .page_size = page_size}, cache, place);
  };
  constexpr std::int64_t kTerabyte = std::int64_t{1} << 39;  // in bf16 elements
  const struct {
    const char* name;
    bool ok;
    std::int64_t pages;
    std::int32_t page_size;
    std::int64_t page_stride, token_stride;
  } rows[] = {
      {"dense", true, 9, 64, 64 * 576, 576},
      {"pages as far apart as can be", true, 9, 64, kTerabyte - 8, 576},
      {"pages too far apart", false, 9, 64, kTerabyte, 576},
      {"tokens as far apart as can be", true, 9, 64, 576, kTerabyte / 64 - 8},
      {"tokens too far apart", false, 9, 64, 576, kTerabyte / 64},
      {"tokens of small pages too far apart", false, 9, 2, 576, kTerabyte / 8},
      {"tokens of one page too far apart", false, 1, 64, 0, kTerabyte / 64},
      {"backwards", false, 9, 64, -64 * 576, 576},
      {"one page, whose stride nobody uses", true, 1, 64, kTerabyte, 576},
      {"pages of one token", true, 9, 1, 576, kTerabyte},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    const Status status = validate(row.pages, row.page_size, row.page_stride, row.token_stride, backend::Place::device);
    if (row.ok)
      EXPECT_TRUE(status.ok()) << status.message();
    else
      expect_error(answer(status), invalid_argument, "kv_cache");
    EXPECT_TRUE(validate(row.pages, row.page_size, row.page_stride, row.token_stride, backend::Place::host).ok());
  }
}

TEST_F(BadDecode, MetadataThatWasNeverBuiltIsAnErrorValue) {
  expect_error(answer(decode(DecodeMetadata(), step_.args())), invalid_argument, "metadata");
  const latte_metadata never = LATTE_METADATA_INIT;
  const latte_decode_args args = to_c(step_.args());
  latte_error error = LATTE_ERROR_INIT;
  expect_error(answer(latte_decode(&never, &args, &error), error), invalid_argument, "metadata");
  expect_error(answer(latte_decode(nullptr, &args, &error), error), missing_argument, "metadata");
  expect_error(answer(latte_decode(&c_metadata_, nullptr, &error), error), missing_argument, "args");
  EXPECT_TRUE(step_.untouched());
}

TEST_F(BadDecode, StaleMetadataIsRefused) {
  ASSERT_TRUE(builder_.build(0, step_.lengths()).ok());
  expect_error(answer(decode(metadata_, step_.args())), stale_metadata, "metadata");
  const latte_metadata old = c_metadata_;
  const latte_lengths lengths = to_c(step_.lengths());
  ASSERT_EQ(latte_builder_build(c_builder_, 0, &lengths, &c_metadata_, nullptr), LATTE_OK);
  const latte_decode_args args = to_c(step_.args());
  latte_error error = LATTE_ERROR_INIT;
  expect_error(answer(latte_decode(&old, &args, &error), error), stale_metadata, "metadata");
  latte_plan plan = LATTE_PLAN_INIT;
  expect_error(answer(latte_metadata_plan(&old, &plan, &error), error), stale_metadata, "metadata");
  EXPECT_TRUE(step_.untouched());
}

TEST_F(BadDecode, ABuilderWithoutWorkspaceAsksForOne) {
  auto builder = MetadataBuilder::create(backend_, step_.problem, step_.limits, {.policy = {}, .own_workspace = false});
  ASSERT_TRUE(builder.ok()) << builder.status().message();
  const DecodeMetadata metadata = builder->build(0, step_.lengths()).value();
  expect_error(answer(decode(metadata, step_.args())), missing_argument, "workspace");
  EXPECT_TRUE(step_.untouched());
}

TEST_F(BadDecode, UnneededPageIdsMayBeWild) {
  // The third entry of request 0, which has two pages, is -7 in the unbroken step already.
  step_.seq_lens = {0, 9};
  const DecodeMetadata metadata = builder_.build(0, step_.lengths()).value();
  step_.block_table = {-1, 1 << 30, -7, 2, 3, 4};
  EXPECT_TRUE(decode(metadata, step_.args()).ok());
  EXPECT_EQ(step_.out[0], 0.0f);
  EXPECT_EQ(step_.lse[0], -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace latte::bad_input
