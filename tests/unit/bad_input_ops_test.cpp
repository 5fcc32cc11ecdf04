// Broken merge() and write_kv() calls, from C++ and from C.
#include <limits>
#include <utility>

#include <gtest/gtest.h>

#include "backend/validate/validate.hpp"
#include "tests/unit/bad_input.hpp"

namespace latte::bad_input {
namespace {

using enum Code;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Two partials of 2 tokens, 3 heads, 16 values.
struct MergeCall {
  std::vector<float> values = std::vector<float>(2 * 3 * 16, 1.0f), lses = std::vector<float>(6, 0.0f);
  std::vector<float> out = std::vector<float>(2 * 3 * 16), lse = std::vector<float>(6);
  Partial part{dense(static_cast<const void*>(values.data()), Dtype::f32, {2, 3, 16}),
               dense(static_cast<const void*>(lses.data()), Dtype::f32, {2, 3})};
  std::vector<Partial> parts{part, part};
  TensorView out_view = dense(out.data(), Dtype::f32, {2, 3, 16}), lse_view = dense(lse.data(), Dtype::f32, {2, 3});

  MergeCall() {
    std::memset(out.data(), Step::kPoison, out.size() * sizeof(float));
    std::memset(lse.data(), Step::kPoison, lse.size() * sizeof(float));
  }
  MergeArgs args() const { return {.partials = parts, .out = out_view, .lse = lse_view}; }
  bool untouched() const { return Step::all_poison(out) && Step::all_poison(lse); }
};

const std::vector<Case<MergeCall>>& merge_cases() {
  using M = MergeCall;
  static const std::vector<Case<MergeCall>> kCases = {
      {"no partials", missing_argument, "partials", [](M& m) { m.parts.clear(); }},
      {"no out", missing_argument, "out", [](M& m) { m.out_view = {}; }},
      {"out without address", missing_argument, "out", [](M& m) { m.out_view.data = nullptr; }},
      {"out of rank 2", invalid_argument, "out", [](M& m) { m.out_view.rank = 2; }},
      {"out of fp8", invalid_argument, "out", [](M& m) { m.out_view.dtype = Dtype::fp8_e4m3; }},
      {"out without heads", invalid_argument, "out", [](M& m) { m.out_view.shape[1] = 0; }},
      {"out rows on one another", invalid_argument, "out", [](M& m) { m.out_view.stride[1] = 0; }},
      {"a partial without lse", missing_argument, "partials[1].lse", [](M& m) { m.parts[1].lse = {}; }},
      {"a partial without out", missing_argument, "partials[0].out", [](M& m) { m.parts[0].out = {}; }},
      {"a partial of another width", invalid_argument, "partials[1].out", [](M& m) { m.parts[1].out.shape[2] = 8; }},
      {"a partial with more rows", invalid_argument, "partials[0].out", [](M& m) { m.parts[0].out.shape[0] = 3; }},
      {"a partial not dense", invalid_argument, "partials[0].out", [](M& m) { m.parts[0].out.stride[2] = 2; }},
      {"a partial's lse in bf16", invalid_argument, "partials[0].lse",
       [](M& m) { m.parts[0].lse.dtype = Dtype::bf16; }},
      {"a partial's lse of another shape", invalid_argument, "partials[0].lse",
       [](M& m) { m.parts[0].lse.shape[1] = 2; }},
      {"lse of another shape", invalid_argument, "lse", [](M& m) { m.lse_view.shape[0] = 1; }},
      {"lse of one number", invalid_argument, "lse",
       [](M& m) {
         m.lse_view.stride = {0, 0};
       }},
      {"in place with other strides", invalid_argument, "out",
       [](M& m) {
         m.parts[0].out = m.out_view;
         std::swap(m.parts[0].out.stride[0], m.parts[0].out.stride[1]);
       }},
  };
  return kCases;
}

TEST(BadInput, EveryBrokenMergeNamesItsField) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  for (const Case<MergeCall>& broken : merge_cases()) {
    SCOPED_TRACE(broken.name);
    MergeCall call;
    broken.break_it(call);
    expect_error(answer(merge(backend, call.args())), broken.code, broken.field);

    std::vector<latte_partial> parts;
    for (const Partial& part : call.parts) parts.push_back({to_c(part.out), to_c(part.lse)});
    latte_merge_args args = latte_merge_args_init();
    args.partials = parts.data();
    args.partial_count = static_cast<int32_t>(parts.size());
    args.out = to_c(call.out_view);
    args.lse = to_c(call.lse_view);
    latte_error error = LATTE_ERROR_INIT;
    expect_error(answer(latte_merge(c_backend, &args, &error), error), broken.code, broken.field);
    EXPECT_TRUE(call.untouched());
  }
  MergeCall good;
  EXPECT_TRUE(merge(backend, good.args()).ok());
  EXPECT_FALSE(good.untouched());
  latte_backend_close(c_backend, nullptr);
}

// Validation sees addresses only, so a device's rules need no device.
TEST(BadInput, ADeviceMergesNoMorePartialsThanALaunchCarries) {
  MergeCall call;
  const auto validate = [&](std::size_t count, backend::Place place) {
    const std::vector<Partial> parts(count, call.part);
    return backend::validate_merge_args({.partials = parts, .out = call.out_view, .lse = call.lse_view}, place);
  };
  EXPECT_TRUE(validate(64, backend::Place::device).ok()) << validate(64, backend::Place::device).message();
  expect_error(answer(validate(65, backend::Place::device)), unsupported, "partials");
  EXPECT_TRUE(validate(65, backend::Place::host).ok());
}

// Three tokens of 32 + 16 fp32 values into two pages of four.
struct WriteCall {
  std::vector<float> kv_c = std::vector<float>(3 * 32, 1.0f), k_pe = std::vector<float>(3 * 16, 2.0f);
  std::vector<float> cache = std::vector<float>(2 * 4 * 48);
  std::vector<std::int64_t> slots{0, -1, 7};
  WriteKvArgs args;

  WriteCall() {
    std::memset(cache.data(), Step::kPoison, cache.size() * sizeof(float));
    args.kv_c = dense(static_cast<const void*>(kv_c.data()), Dtype::f32, {3, 32});
    args.k_pe = dense(static_cast<const void*>(k_pe.data()), Dtype::f32, {3, 16});
    args.kv_cache = dense(cache.data(), Dtype::f32, {2, 4, 48});
    args.slot_mapping = slots;
    args.kv_format = KvFormat::f32;
  }
};

const std::vector<Case<WriteCall>>& write_cases() {
  using W = WriteCall;
  static const std::vector<Case<WriteCall>> kCases = {
      {"no kv_c", missing_argument, "kv_c", [](W& w) { w.args.kv_c = {}; }},
      {"kv_c of rank 3", invalid_argument, "kv_c", [](W& w) { w.args.kv_c.rank = 3; }},
      {"kv_c of fp8", invalid_argument, "kv_c", [](W& w) { w.args.kv_c.dtype = Dtype::fp8_e4m3; }},
      {"kv_c not dense", invalid_argument, "kv_c", [](W& w) { w.args.kv_c.stride[1] = 2; }},
      {"no k_pe", missing_argument, "k_pe", [](W& w) { w.args.k_pe = {}; }},
      {"k_pe of another dtype", invalid_argument, "k_pe", [](W& w) { w.args.k_pe.dtype = Dtype::bf16; }},
      {"k_pe with fewer tokens", invalid_argument, "k_pe", [](W& w) { w.args.k_pe.shape[0] = 2; }},
      {"a latent of 17", unsupported, "latent", [](W& w) { w.args.kv_c.shape[1] = 17; }},
      {"no cache", missing_argument, "kv_cache", [](W& w) { w.args.kv_cache = {}; }},
      {"cache without address", missing_argument, "kv_cache", [](W& w) { w.args.kv_cache.data = nullptr; }},
      {"cache of another width", invalid_argument, "kv_cache", [](W& w) { w.args.kv_cache.shape[2] = 47; }},
      {"cache of another dtype", invalid_argument, "kv_cache", [](W& w) { w.args.kv_cache.dtype = Dtype::bf16; }},
      {"cache with pages of no tokens", invalid_argument, "kv_cache", [](W& w) { w.args.kv_cache.shape[1] = 0; }},
      {"cache pages on one another", invalid_argument, "kv_cache", [](W& w) { w.args.kv_cache.stride[0] = 0; }},
      {"no such format", invalid_argument, "kv_format", [](W& w) { w.args.kv_format = static_cast<KvFormat>(17); }},
      {"fp8_ds_mla of 32 + 16", unsupported, "latent", [](W& w) { w.args.kv_format = KvFormat::fp8_ds_mla; }},
      {"a slot past the cache", invalid_argument, "slot_mapping", [](W& w) { w.slots[2] = 8; }},
      {"too few slots", invalid_argument, "slot_mapping",
       [](W& w) { w.args.slot_mapping = w.args.slot_mapping.first(2); }},
      {"slots without address", missing_argument, "slot_mapping",
       [](W& w) {
         w.args.slot_mapping = {static_cast<const std::int64_t*>(nullptr), 3};
       }},
      {"kv_scale is NaN", invalid_argument, "kv_scale", [](W& w) { w.args.kv_scale.value = kNan; }},
      {"kv_scale with an fp32 cache", invalid_argument, "kv_scale", [](W& w) { w.args.kv_scale.value = 2; }},
      {"kv_scale behind a pointer", invalid_argument, "kv_scale", [](W& w) { w.args.kv_scale.ptr = &kNan; }},
  };
  return kCases;
}

TEST(BadInput, EveryBrokenWriteNamesItsField) {
  const Backend backend = Backend::open({.threads = 1}).value();
  latte_backend* c_backend = open_c();
  for (const Case<WriteCall>& broken : write_cases()) {
    SCOPED_TRACE(broken.name);
    WriteCall call;
    broken.break_it(call);
    expect_error(answer(write_kv(backend, call.args)), broken.code, broken.field);
    const latte_write_kv_args args = to_c(call.args);
    latte_error error = LATTE_ERROR_INIT;
    expect_error(answer(latte_write_kv(c_backend, &args, &error), error), broken.code, broken.field);
    EXPECT_TRUE(Step::all_poison(call.cache));
  }
  WriteCall per_head;
  const float ones[] = {1, 1};
  per_head.args.kv_scale = {.ptr = ones, .per_head = true};  // C has no field for it
  expect_error(answer(write_kv(backend, per_head.args)), invalid_argument, "kv_scale");
  EXPECT_TRUE(Step::all_poison(per_head.cache));
  WriteCall good;
  EXPECT_TRUE(write_kv(backend, good.args).ok());
  EXPECT_EQ(good.cache[0], 1.0f);
  EXPECT_EQ(good.cache[7 * 48 + 47], 2.0f);
  latte_backend_close(c_backend, nullptr);
}

// "At least one" would be no help to somebody who has 2^31.
TEST(BadInput, ExtentsThatAreTooLargeAreToldTheLargest) {
  constexpr std::int64_t kTooLarge = std::int64_t{1} << 31;
  const auto expect_bound = [](const Status& status, const char* field) {
    expect_error(answer(status), invalid_argument, field);
    EXPECT_NE(status.expected().find("1 .. 2147483647"), std::string::npos) << status.message();
    EXPECT_NE(status.got().find("2147483648"), std::string::npos) << status.message();
  };
  const auto host = backend::Place::host;
  MergeCall heads, values;
  heads.out_view.shape[1] = kTooLarge;
  values.out_view.shape[2] = kTooLarge;
  for (const MergeCall* call : {&heads, &values}) expect_bound(backend::validate_merge_args(call->args(), host), "out");

  WriteCall write;
  write.args.kv_cache.shape[1] = kTooLarge;
  expect_bound(backend::validate_write_kv_args(write.args, host), "kv_cache");

  const std::vector<std::int32_t> out_start{0, 1};
  std::vector<float> row(48);
  const GatherKvArgs gather{.kv_cache = write.args.kv_cache,
                            .kv_format = KvFormat::f32,
                            .out_start = out_start,
                            .tokens = 1,
                            .out = dense(row.data(), Dtype::f32, {1, 48})};
  expect_bound(backend::validate_gather_kv_args(gather, host), "kv_cache");
}

}  // namespace
}  // namespace latte::bad_input
