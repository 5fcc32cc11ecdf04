// One backend, many callers. These run under the thread sanitizer too, so the cases are small.
#include <thread>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "tests/kernel/support.hpp"

namespace latte::testkit {
namespace {

class Threads : public EachKernel {};

constexpr int kCallers = 4;
constexpr int kRepeats = 6;

DecodeCase caller_case(const DecodeCase& shape, int caller) {
  DecodeCase c = shape;
  c.heads = 2 + caller;
  c.requests = {{1, 90 + 50 * caller}, {2, 33}, {1, caller}};
  c.seed = run_seed() + static_cast<std::uint64_t>(caller);
  return c;
}

// Calls `step(caller)` kRepeats times from each of kCallers threads at once.
template <class Step>
void from_many_threads(const Step& step) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&step, caller] {
      for (int repeat = 0; repeat < kRepeats; ++repeat) step(caller);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST_P(Threads, DecodeOnOneBackendAtOnceWithBuildersOfTheirOwn) {
  for (const DecodeCase& shape : served_formats({.latent = 512, .page_size = 16})) {
    std::vector<PreparedCase> prepared;
    for (int caller = 0; caller < kCallers; ++caller) prepared.emplace_back(caller_case(shape, caller));
    std::vector<std::string> problems(kCallers);
    from_many_threads([&](int caller) {
      const auto report = run_case(backend, prepared[caller], {.policy = Policy::uniform(3)});
      if (!report)
        problems[caller] = report.status().message();
      else if (!report->ok())
        problems[caller] = report->message();
    });
    for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  }
}

TEST_P(Threads, DecodeFromSlotsOfOneBuilderAtOnce) {
  const Limits limits{.max_requests = 4, .max_query_tokens = 2, .max_kv_tokens = 512};
  for (const DecodeCase& shape : served_formats({.heads = 5, .page_size = 16})) {
    std::vector<DecodeBatch> batches;
    std::vector<DecodeMetadata> planned;
    std::vector<std::vector<std::byte>> expected;
    auto builder = MetadataBuilder::create(backend, shape.problem(), limits, {.slots = kCallers}).value();
    for (int caller = 0; caller < kCallers; ++caller) {
      DecodeCase c = caller_case(shape, caller);
      c.heads = shape.heads;
      batches.emplace_back(c);
      planned.push_back(builder.build(caller, batches[caller].lengths()).value());
      ASSERT_TRUE(decode(planned[caller], batches[caller].args()).ok());
      expected.push_back(batches[caller].result_bits());
    }
    std::vector<int> failures(kCallers);
    from_many_threads([&](int caller) {
      batches[caller].poison_outputs();
      const bool ok = decode(planned[caller], batches[caller].args()).ok();
      if (!ok || batches[caller].result_bits() != expected[caller]) ++failures[caller];
    });
    for (int caller = 0; caller < kCallers; ++caller) EXPECT_EQ(failures[caller], 0) << "caller " << caller;
  }
}

TEST_P(Threads, DecodeMergeAndWriteAtOnce) {
  const DecodeCase shape = served_formats({.heads = 3, .page_size = 16}).front();
  PreparedCase prepared(caller_case(shape, 1));
  std::vector<float> part(8 * 512, 1.0f), lse(8, 0.0f), merged(8 * 512), tokens(20 * 576, 2.0f), cache(20 * 576);
  std::vector<std::int64_t> slots(20);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(19 - i);
  const Partial half{dense(static_cast<const void*>(part.data()), Dtype::f32, {8, 1, 512}),
                     dense(static_cast<const void*>(lse.data()), Dtype::f32, {8, 1})};
  const Partial halves[] = {half, half};
  ConstTensorView latent = dense(static_cast<const void*>(tokens.data()), Dtype::f32, {20, 512});
  ConstTensorView rope = dense(static_cast<const void*>(tokens.data()), Dtype::f32, {20, 64});
  const WriteKvArgs write{.kv_c = latent,
                          .k_pe = rope,
                          .slot_mapping = slots,
                          .kv_cache = dense(static_cast<void*>(cache.data()), Dtype::f32, {20, 1, 576}),
                          .format = KvFormat::f32};
  std::vector<std::string> problems(kCallers);
  from_many_threads([&](int caller) {
    Status status;
    if (caller == 0) {
      const auto report = run_case(backend, prepared);
      if (!report)
        status = report.status();
      else if (!report->ok())
        problems[caller] = report->message();
    } else if (caller == 1) {
      status = merge(backend, halves, dense(static_cast<void*>(merged.data()), Dtype::f32, {8, 1, 512}), {});
    } else if (caller == 2) {
      status = write_kv(backend, write);
    }
    if (!status.ok()) problems[caller] = status.message();
  });
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  for (float value : merged) ASSERT_FLOAT_EQ(value, 1);
  for (float value : cache) ASSERT_EQ(value, 2);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Threads, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
