// One backend, many callers. These run under the thread sanitizer too, so the cases are small.
#include <deque>
#include <thread>

#include <gtest/gtest.h>

#include "testkit/codec.hpp"
#include "testkit/context_expander.hpp"
#include "tests/kernel/prefill_support.hpp"

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
                          .kv_format = KvFormat::f32};
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
      status = merge(backend,
                     {.partials = halves, .out = dense(static_cast<void*>(merged.data()), Dtype::f32, {8, 1, 512})});
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

class PrefillThreads : public EachPrefillKernel {};

// One caller's tensors and hook. Neither moves, as the hook points to the batch.
struct PrefillCaller {
  PrefillCaller(const Backend& backend, const PrefillCase& c) : prepared(c), expander(backend, prepared.batch) {}

  // Plans its step into a slot and runs it. The truth is that of the first run, as a hook always makes the same keys.
  Status run(PrefillBuilder& builder, std::int32_t slot) {
    prepared.batch.poison_outputs();
    expander.reset();
    PrefillArgs args = prepared.batch.args();
    expander.attach(args);
    const auto metadata = builder.build(slot, prepared.batch.lengths());
    if (!metadata) return metadata.status();
    if (Status status = prefill(*metadata, args); !status) return status;
    if (Status status = expander.finished(); !status) return status;
    if (truth == nullptr) truth = &prepared.oracle(builder.math(), expander.expanded());
    const Tolerance tolerance = prepared.batch.description().tolerance(builder.math(), truth->max_abs_score);
    const Comparison result = compare(args.out, args.lse, *truth, tolerance);
    if (!result.ok) return {Code::internal, "out", "the oracle's", result.message};
    if (const auto damage = prepared.batch.guard_damage()) return {Code::internal, "out", "guard bands", *damage};
    return {};
  }

  PreparedPrefill prepared;
  ContextExpander expander;
  const OracleResult* truth = nullptr;
};

TEST_P(PrefillThreads, PrefillFromSlotsOfOneBuilderAtOnceWithContextInChunks) {
  PrefillCase largest;
  largest.heads = 2;
  largest.requests = {{14, 14, 390}, {15, 9, 0}, {1, 1, 30}};
  for (PrefillCase& shape : served_dtypes(largest)) {
    shape.context_workspace_bytes = workspace_for_chunks(backend, shape, 1).value();
    auto builder = PrefillBuilder::create(backend, shape.problem(), shape.limits(), {.slots = kCallers}).value();
    std::deque<PrefillCaller> callers;
    for (int caller = 0; caller < kCallers; ++caller) {
      PrefillCase c = shape;
      c.requests = {{14 - caller, 14, 390 - 30 * caller}, {5 * caller, 9, 0}, {1, 1, 10 * caller}};
      c.page_form = caller % 2 == 0 ? PageForm::block_table : PageForm::csr;
      c.seed = run_seed() + static_cast<std::uint64_t>(caller);
      const Status status = callers.emplace_back(backend, c).run(builder, caller);
      ASSERT_TRUE(status.ok()) << c.name() << ": " << status.message();
      ASSERT_GE(callers.back().expander.chunks(), 2);
    }
    std::vector<std::string> problems(kCallers);
    from_many_threads([&](int caller) {
      const Status status = callers[caller].run(builder, caller);
      if (!status.ok()) problems[caller] = status.message();
    });
    for (const std::string& problem : problems) EXPECT_EQ(problem, "") << dtype_name(shape.dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PrefillThreads, each_kernel(), kernel_test_name);

}  // namespace
}  // namespace latte::testkit
