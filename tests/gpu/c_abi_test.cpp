// The C interface on a device: every function that queues work is asked through latte.h alone, and what it leaves in
// memory is held against the oracle. Layouts have gaps or are transposed, so that a field in the wrong place shows.
#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/c_abi_support.hpp"

namespace latte::testkit {
namespace {

std::vector<DecodeCase> decode_cases() {
  DecodeCase joined = gpu_case({{1, 300}, {2, 70}, {3, 0}, {1, 16}, {4, 1500}}, 5, 16);
  joined.cache_layout = joined.out_layout = Layout::gapped;
  joined.lse_layout = Layout::transposed;
  DecodeCase split = gpu_case({{1, 300}, {2, 70}, {3, 40}, {2, 900}}, 40, 7);
  split.query_form = QueryForm::split;
  split.page_form = PageForm::csr;
  split.bounds = Bounds::random;
  split.kv_format = KvFormat::f16;
  split.q_dtype = Dtype::f16;
  split.out_dtype = Dtype::f32;
  split.latent = 256;
  split.out_layout = Layout::transposed;
  split.lse_layout = Layout::gapped;
  split.scale = 0.11f;
  DecodeCase unmasked = gpu_case({{3, 200}, {1, 65}}, 16);
  unmasked.mask = Mask::none;
  unmasked.with_lse = false;
  return {joined, split, unmasked};
}

TEST_F(GpuCAbi, SaysThatTheBackendIsADevice) {
  latte_machine_info info = LATTE_MACHINE_INFO_INIT;
  ASSERT_TRUE(ok(latte_backend_info(c_backend(), &info, &error)));
  EXPECT_EQ(info.on_device, 1);
  EXPECT_STREQ(info.backend, "cuda");
  EXPECT_STRNE(info.device, "");
  EXPECT_STRNE(info.driver, "");
  EXPECT_EQ(info.threads, backend().workers());
}

TEST_F(GpuCAbi, DecodesByAPlanMadeOnTheDevice) {
  for (const DecodeCase& c : decode_cases()) {
    const auto step = DeviceStep::make(backend(), c);
    const CBuilder builder = make_builder(c);
    ASSERT_NE(builder, nullptr);
    const auto graph = captured([&] {
      const latte_device_lengths lengths = c_lengths(step->device.lengths(), stream());
      latte_metadata metadata = LATTE_METADATA_INIT;
      ASSERT_TRUE(ok(latte_builder_build_on_device(builder.get(), 0, &lengths, &metadata, &error)));
      const latte_decode_args args = c_args(step->args(stream()));
      ASSERT_TRUE(ok(latte_decode(&metadata, &args, &error)));
    });
    ASSERT_TRUE(succeeded(graph.status()));
    replay(*graph, *step, step->batch);
    expect_agreement(step->batch);
  }
}

TEST_F(GpuCAbi, DecodesByAPlanMadeOnTheHost) {
  for (const DecodeCase& c : decode_cases()) {
    const auto step = DeviceStep::make(backend(), c);
    const CBuilder builder = make_builder(c);
    ASSERT_NE(builder, nullptr);
    const latte_lengths lengths = c_lengths(step->batch.lengths(), stream());
    latte_metadata metadata = LATTE_METADATA_INIT;
    // Refused where the stream is captured: so it is this stream that the upload goes to.
    latte_code refused = LATTE_OK;
    const auto nothing =
        captured([&] { refused = latte_builder_build(builder.get(), 0, &lengths, &metadata, nullptr); });
    EXPECT_EQ(refused, LATTE_UNSUPPORTED);
    ASSERT_TRUE(ok(latte_builder_build(builder.get(), 0, &lengths, &metadata, &error)));
    const auto graph = captured([&] {
      const latte_decode_args args = c_args(step->args(stream()));
      ASSERT_TRUE(ok(latte_decode(&metadata, &args, &error)));
    });
    ASSERT_TRUE(succeeded(graph.status()));
    replay(*graph, *step, step->batch);
    expect_agreement(step->batch);
  }
}

// One workspace for the plans of both builders and, by turns, for their partials; all of it garbage at first.
TEST_F(GpuCAbi, PlansAndPartialsLieInAWorkspace) {
  const DecodeCase decode_case = gpu_case({{1, 6000}, {2, 90}}, 16);
  PrefillCase prefill_case = gpu_prefill({{130, 6000}, {5, 300}}, 2);
  prefill_case.dtype = Dtype::fp8_e4m3;
  const auto decode_step = DeviceStep::make(backend(), decode_case);
  const auto prefill_step = DevicePrefillStep::make(backend(), prefill_case);
  const latte_problem decode_problem = c_problem(decode_case.problem());
  const latte_prefill_problem prefill_problem = c_problem(prefill_case.problem());
  const latte_limits decode_limits = c_limits(decode_case.limits()), prefill_limits = c_limits(prefill_case.limits());
  latte_builder_options options = LATTE_BUILDER_OPTIONS_INIT;
  options.own_workspace = 0;
  options.policy = LATTE_POLICY_UNIFORM;
  options.policy_n = 7;
  latte_workspace_need needs[4];
  ASSERT_TRUE(
      ok(latte_builder_needs(c_backend(), &decode_problem, &decode_limits, &options, &needs[0], &needs[1], &error)));
  ASSERT_TRUE(ok(latte_prefill_builder_needs(c_backend(), &prefill_problem, &prefill_limits, &options, &needs[2],
                                             &needs[3], &error)));
  needs[1].phases = 1;
  needs[3].phases = 2;
  latte_workspace* made = nullptr;
  ASSERT_TRUE(ok(latte_workspace_create(c_backend(), needs, 4, LATTE_CHECKS_ON, &made, &error)));
  const CWorkspace workspace(made);
  const auto take = [&](std::int32_t need) {
    latte_workspace_slice slice = LATTE_WORKSPACE_SLICE_INIT;
    EXPECT_TRUE(ok(latte_workspace_take(workspace.get(), need, &slice, &error)));
    const std::vector<std::byte> garbage(slice.bytes, std::byte{0xee});
    EXPECT_TRUE(succeeded(copy_to_device(backend(), slice.data, garbage.data(), garbage.size())));
    return slice;
  };

  const latte_workspace_slice decode_plan = take(0), decode_scratch = take(1), prefill_plan = take(2);
  latte_workspace_slice prefill_scratch = LATTE_WORKSPACE_SLICE_INIT;
  EXPECT_EQ(latte_workspace_take(workspace.get(), 3, &prefill_scratch, nullptr), LATTE_INVALID_ARGUMENT)
      << "decode's partials lie there";
  options.plan_memory = decode_plan.data;
  options.plan_memory_bytes = decode_plan.bytes;
  const CBuilder decoder = make_builder(decode_case, &options);
  ASSERT_NE(decoder, nullptr);
  const latte_lengths decode_lengths = c_lengths(decode_step->batch.lengths(), stream());
  latte_metadata decode_metadata = LATTE_METADATA_INIT;
  ASSERT_TRUE(ok(latte_builder_build(decoder.get(), 0, &decode_lengths, &decode_metadata, &error)));
  const auto decode_graph = captured([&] {
    ASSERT_TRUE(
        ok(latte_builder_init_workspace(decoder.get(), decode_scratch.data, decode_scratch.bytes, stream(), &error)));
    latte_decode_args args = c_args(decode_step->args(stream()));
    EXPECT_NE(latte_decode(&decode_metadata, &args, nullptr), LATTE_OK) << "there is no workspace of its own";
    args.workspace = decode_scratch.data;
    args.workspace_bytes = decode_scratch.bytes;
    ASSERT_TRUE(ok(latte_decode(&decode_metadata, &args, &error)));
  });
  ASSERT_TRUE(succeeded(decode_graph.status()));
  replay(*decode_graph, *decode_step, decode_step->batch);
  expect_agreement(decode_step->batch);
  ASSERT_TRUE(ok(latte_workspace_give_back(workspace.get(), &decode_scratch, &error)));

  prefill_scratch = take(3);
  options.plan_memory = prefill_plan.data;
  options.plan_memory_bytes = prefill_plan.bytes;
  latte_prefill_builder* created = nullptr;
  ASSERT_TRUE(
      ok(latte_prefill_builder_create(c_backend(), &prefill_problem, &prefill_limits, &options, &created, &error)));
  const CPrefillBuilder prefiller(created);
  const latte_prefill_lengths prefill_lengths = c_lengths(prefill_step->batch().lengths(), stream());
  latte_prefill_metadata prefill_metadata = LATTE_PREFILL_METADATA_INIT;
  ASSERT_TRUE(ok(latte_prefill_builder_build(prefiller.get(), 0, &prefill_lengths, &prefill_metadata, &error)));
  const auto prefill_graph = captured([&] {
    ASSERT_TRUE(ok(latte_prefill_builder_init_workspace(prefiller.get(), prefill_scratch.data, prefill_scratch.bytes,
                                                        stream(), &error)));
    latte_prefill_args args = c_args(prefill_step->args(stream()));
    args.workspace = prefill_scratch.data;
    args.workspace_bytes = prefill_scratch.bytes;
    ASSERT_TRUE(ok(latte_prefill(&prefill_metadata, &args, &error)));
  });
  ASSERT_TRUE(succeeded(prefill_graph.status()));
  replay(*prefill_graph, *prefill_step, prefill_step->batch());
  const Comparison result = compare_prefill(prefill_step->prepared, PrefillMath::fp8);
  EXPECT_TRUE(result.ok) << prefill_case.name() << ": " << result.message;
  ASSERT_TRUE(ok(latte_workspace_give_back(workspace.get(), &prefill_scratch, &error)));
  EXPECT_TRUE(ok(latte_workspace_check(workspace.get(), &error)));
}

TEST_F(GpuCAbi, Prefills) {
  PrefillCase half = gpu_prefill({{70, 200}, {1, 64}, {20, 0}, {130, 130}}, 3);
  half.q_layout = half.out_layout = Layout::gapped;
  half.k_layout = half.lse_layout = Layout::transposed;
  half.dtype = half.out_dtype = Dtype::f16;
  half.scale = 0.11f;
  PrefillCase fp8 = half;
  fp8.dtype = Dtype::fp8_e4m3;
  fp8.out_dtype = Dtype::f32;
  fp8.scale_form = ScaleForm::per_head;
  fp8.mask = Mask::none;
  fp8.v_layout = Layout::gapped;
  PrefillCase quantised = gpu_prefill({{70, 200}, {33, 33}}, 2);
  quantised.math = PrefillMath::fp8;
  for (const PrefillCase& c : {half, fp8, quantised}) {
    const auto step = DevicePrefillStep::make(backend(), c);
    const latte_prefill_problem problem = c_problem(c.problem());
    const latte_limits limits = c_limits(c.limits());
    latte_prefill_builder* created = nullptr;
    ASSERT_TRUE(ok(latte_prefill_builder_create(c_backend(), &problem, &limits, nullptr, &created, &error)));
    const CPrefillBuilder builder(created);
    const latte_prefill_lengths lengths = c_lengths(step->batch().lengths(), stream());
    latte_prefill_metadata metadata = LATTE_PREFILL_METADATA_INIT;
    latte_code refused = LATTE_OK;
    const auto nothing =
        captured([&] { refused = latte_prefill_builder_build(builder.get(), 0, &lengths, &metadata, nullptr); });
    EXPECT_EQ(refused, LATTE_UNSUPPORTED) << "while the stream is captured";
    ASSERT_TRUE(ok(latte_prefill_builder_build(builder.get(), 0, &lengths, &metadata, &error)));
    const auto graph = captured([&] {
      const latte_prefill_args args = c_args(step->args(stream()));
      ASSERT_TRUE(ok(latte_prefill(&metadata, &args, &error)));
    });
    ASSERT_TRUE(succeeded(graph.status()));
    replay(*graph, *step, step->batch());
    const Comparison result = compare_prefill(step->prepared, step->builder.math());
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

// Several chunks, whose every field the testkit's hook looks at; the cache's scale by value and by address.
TEST_F(GpuCAbi, PrefillsWithContext) {
  for (bool by_address : {false, true}) {
    PrefillCase c = gpu_prefill({{40, 40, 350}, {33, 20, 0}, {1, 1, 701}}, 3);
    c.latent = 512;
    c.page_size = 7;
    c.rope = 64;
    c.kv_format = KvFormat::fp8_e4m3;
    c.page_form = by_address ? PageForm::csr : PageForm::block_table;
    c.seed = by_address ? 1 : 2;  // decides it in the testkit
    c.context_workspace_bytes = workspace_for_chunks(backend(), c, 1).value();
    const auto step = DevicePrefillStep::make(backend(), c);
    const latte_prefill_context context = c_context(*c.problem().context);
    latte_prefill_problem problem = c_problem(c.problem());
    problem.context = &context;
    const latte_limits limits = c_limits(c.limits());
    latte_prefill_builder* created = nullptr;
    ASSERT_TRUE(ok(latte_prefill_builder_create(c_backend(), &problem, &limits, nullptr, &created, &error)));
    const CPrefillBuilder builder(created);
    const latte_prefill_lengths lengths = c_lengths(step->batch().lengths(), stream());
    latte_prefill_metadata metadata = LATTE_PREFILL_METADATA_INIT;
    ASSERT_TRUE(ok(latte_prefill_builder_build(builder.get(), 0, &lengths, &metadata, &error)));
    EXPECT_GT(metadata.chunks, 1);

    ContextExpander expander(backend(), step->batch());
    PrefillArgs hooked;
    expander.attach(hooked);
    CHook hook{.expand = hooked.expand, .user = hooked.user, .stream = stream()};
    latte_prefill_args args = c_args(step->args(stream()));
    args.expand = CHook::call;
    args.user = &hook;
    EXPECT_EQ(args.kv_scale_ptr != nullptr, by_address);
    ASSERT_TRUE(succeeded(step->poison()));
    ASSERT_TRUE(ok(latte_prefill(&metadata, &args, &error)));
    ASSERT_TRUE(ok(latte_backend_synchronize(c_backend(), stream(), &error)));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
    ASSERT_TRUE(succeeded(expander.finished()));
    EXPECT_EQ(expander.chunks(), metadata.chunks);
    const Comparison result = compare_prefill(step->prepared, step->builder.math(), expander.expanded());
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
  }
}

// A page that the cache does not have: found on the device, and told where the stream is waited for.
TEST_F(GpuCAbi, TellsWhatTheValidationKernelFound) {
  const DecodeCase c = gpu_case({{1, 200}, {1, 100}}, 16);
  const auto step = DeviceStep::make(backend(), c);
  latte_builder_options options = LATTE_BUILDER_OPTIONS_INIT;
  options.validate = 1;
  const CBuilder builder = make_builder(c, &options);
  ASSERT_NE(builder, nullptr);
  const latte_lengths lengths = c_lengths(step->batch.lengths(), stream());
  latte_metadata metadata = LATTE_METADATA_INIT;
  ASSERT_TRUE(ok(latte_builder_build(builder.get(), 0, &lengths, &metadata, &error)));
  latte_decode_args args = c_args(step->args(stream()));
  ASSERT_TRUE(ok(latte_decode(&metadata, &args, &error)));
  ASSERT_TRUE(ok(latte_backend_synchronize(c_backend(), stream(), &error))) << "a sound step";
  const DeviceMemory wild = upload(std::vector<std::int32_t>(static_cast<std::size_t>(2 * args.max_pages), 1'000'000));
  args.block_table = reinterpret_cast<const std::int32_t*>(wild.data());
  args.block_table_stride = args.max_pages;
  ASSERT_TRUE(ok(latte_decode(&metadata, &args, &error)));
  EXPECT_EQ(latte_backend_synchronize(c_backend(), stream(), &error), LATTE_INVALID_ARGUMENT);
  EXPECT_STREQ(error.field, "pages");
  EXPECT_TRUE(ok(latte_backend_synchronize(c_backend(), stream(), &error))) << "told once";
}

}  // namespace
}  // namespace latte::testkit
