// What the C interface takes, made of what the testkit has: written out field by field, as a binding does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "latte/latte.h"
#include "tests/gpu/prefill_support.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {

// Handles that give themselves back.
template <auto destroy>
struct GiveBack {
  template <class Handle>
  void operator()(Handle* handle) const {
    EXPECT_EQ(destroy(handle, nullptr), LATTE_OK);
  }
};
using CBackend = std::unique_ptr<latte_backend, GiveBack<latte_backend_close>>;
using CBuilder = std::unique_ptr<latte_builder, GiveBack<latte_builder_destroy>>;
using CPrefillBuilder = std::unique_ptr<latte_prefill_builder, GiveBack<latte_prefill_builder_destroy>>;
using CWorkspace = std::unique_ptr<latte_workspace, GiveBack<latte_workspace_destroy>>;

std::int32_t c_dtype(Dtype dtype);
std::int32_t c_kv_format(KvFormat format);
latte_tensor c_tensor(const ConstTensorView& view);
latte_problem c_problem(const DecodeProblem& problem);
latte_limits c_limits(const Limits& limits);
latte_lengths c_lengths(const StepLengths& lengths, void* stream);
latte_device_lengths c_lengths(const DeviceLengths& lengths, void* stream);
latte_decode_args c_args(const DecodeArgs& args);

latte_prefill_context c_context(const PrefillContext& context);
// Without a context.
latte_prefill_problem c_problem(const PrefillProblem& problem);
latte_prefill_lengths c_lengths(const PrefillLengths& lengths, void* stream);
// Without a hook.
latte_prefill_args c_args(const PrefillArgs& args);

// The testkit's hook behind that of the C interface.
struct CHook {
  ExpandChunk expand = nullptr;
  void* user = nullptr;
  Stream stream = nullptr;  // that every chunk must name

  static latte_code call(void* user, const latte_context_chunk* chunk, latte_error* error);
};

// The cuda backend opened a second time, from C.
class GpuCAbi : public OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
    options.name = "cuda";
    latte_backend* opened = nullptr;
    ASSERT_TRUE(ok(latte_backend_open(&options, &opened, &error)));
    c_backend_.reset(opened);
  }
  const latte_backend* c_backend() const { return c_backend_.get(); }

  // Success, or what `error` says.
  ::testing::AssertionResult ok(latte_code code) const {
    if (code == LATTE_OK) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << latte_code_name(code) << ": " << error.field << ": expected "
                                         << error.expected << ", got " << error.got;
  }

  // What a body of C calls queues in the stream, recorded. A call that goes to another stream is not in the graph: it
  // has run by the time the outputs are poisoned, and the replay leaves them so.
  template <class Body>
  Result<Graph> captured(Body body) const {
    return Graph::capture(backend(), stream(), [&] {
      body();
      return Status();
    });
  }
  // Poisons the outputs, replays, and brings the outputs back.
  template <class Step, class Batch>
  void replay(const Graph& graph, Step& step, Batch& batch) {
    batch.poison_outputs();
    ASSERT_TRUE(succeeded(step.device.upload_outputs(batch)));
    ASSERT_TRUE(succeeded(graph.launch(stream())));
    ASSERT_TRUE(ok(latte_backend_synchronize(c_backend(), stream(), &error)));
    ASSERT_TRUE(succeeded(step.device.download_outputs(batch)));
  }

  CBuilder make_builder(const DecodeCase& c, const latte_builder_options* options = nullptr) {
    const latte_problem problem = c_problem(c.problem());
    const latte_limits limits = c_limits(c.limits());
    latte_builder* builder = nullptr;
    EXPECT_TRUE(ok(latte_builder_create(c_backend(), &problem, &limits, options, &builder, &error)));
    return CBuilder(builder);
  }
  static void expect_agreement(const DecodeBatch& batch) {
    const DecodeCase& c = batch.description();
    const DecodeArgs args = batch.args();
    const OracleResult oracle = decode_oracle(c.problem(), batch.lengths(), args);
    const Comparison result = compare(args.out, args.lse, oracle, c.tolerance(oracle.max_abs_score));
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    EXPECT_FALSE(batch.guard_damage()) << *batch.guard_damage();
  }

  template <class T>
  std::vector<T> download(const DeviceMemory& memory) const {
    std::vector<T> values(memory.size() / sizeof(T));
    EXPECT_TRUE(succeeded(copy_to_host(backend(), values.data(), memory.data(), memory.size())));
    return values;
  }

  latte_error error = LATTE_ERROR_INIT;

 private:
  CBackend c_backend_;
};

}  // namespace latte::testkit
