// The planner on the device against the one on the host, word for word.
#include <gtest/gtest.h>

#include "testkit/rng.hpp"
#include "tests/gpu/support.hpp"

namespace latte::testkit {
namespace {

class GpuPlan : public OnGpu {
 protected:
  // Arrays in device memory that hold the largest step.
  struct DeviceArrays {
    DeviceMemory seq_lens, query_start, visible;
  };
  DeviceArrays upload(const Lengths& lengths) const {
    const auto copy = [&](const std::vector<std::int32_t>& values) {
      auto memory = DeviceMemory::allocate(backend(), values.size() * sizeof(std::int32_t)).value();
      EXPECT_TRUE(succeeded(copy_to_device(backend(), memory.data(), values.data(), memory.size())));
      return memory;
    };
    return {copy(lengths.seq_lens), copy(lengths.query_start), copy(lengths.visible)};
  }
  static DeviceLengths view(const DeviceArrays& arrays, const Lengths& lengths, std::int32_t query_tokens) {
    const auto ints = [](const DeviceMemory& memory) { return reinterpret_cast<const std::int32_t*>(memory.data()); };
    return {.requests = static_cast<std::int32_t>(lengths.seq_lens.size()),
            .seq_lens = ints(arrays.seq_lens),
            .query_start = ints(arrays.query_start),
            .visible = lengths.visible.empty() ? nullptr : ints(arrays.visible),
            .query_tokens = query_tokens};
  }
};

void expect_equal_plans(const Plan& got, const Plan& want, const std::string& what) {
  const auto equal = [](const auto& a, const auto& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  EXPECT_TRUE(equal(got.work_meta_data, want.work_meta_data)) << "work_meta_data " << what;
  EXPECT_TRUE(equal(got.work_indptr, want.work_indptr)) << "work_indptr " << what;
  EXPECT_TRUE(equal(got.work_info_set, want.work_info_set)) << "work_info_set " << what;
  EXPECT_TRUE(equal(got.reduce_indptr, want.reduce_indptr)) << "reduce_indptr " << what;
  EXPECT_TRUE(equal(got.reduce_final_map, want.reduce_final_map)) << "reduce_final_map " << what;
  EXPECT_TRUE(equal(got.reduce_partial_map, want.reduce_partial_map)) << "reduce_partial_map " << what;
}

std::vector<RequestLengths> random_requests(Rng& rng, const Limits& limits) {
  std::vector<RequestLengths> requests(static_cast<std::size_t>(rng.between(0, limits.max_requests)));
  const bool skewed = rng.chance(3);
  for (RequestLengths& request : requests) {
    request.query_tokens = rng.chance(6) ? 0 : rng.between(1, limits.max_query_tokens);
    const std::int32_t longest = skewed && !rng.chance(8) ? 200 : limits.max_kv_tokens;
    request.kv_tokens = rng.chance(6) ? 0 : rng.between(0, longest);
  }
  return requests;
}

TEST_F(GpuPlan, OfTheDeviceIsThatOfTheHostWordForWord) {
  Rng rng(20);
  for (int round = 0; round < 40; ++round) {
    const bool many = rng.chance(4);
    const Limits limits{.max_requests = many ? rng.between(200, 1500) : rng.between(1, 70),
                        .max_query_tokens = rng.between(1, 9),
                        .max_kv_tokens = many            ? 2000
                                         : rng.chance(3) ? 60'000
                                                         : 5000,
                        .workers = rng.chance(2) ? 0 : rng.between(2, 132)};
    const Policy policy = rng.chance(2)   ? Policy::balanced()
                          : rng.chance(2) ? Policy::uniform(rng.between(1, 12))
                                          : Policy::batch_invariant(64 * rng.between(1, 32));
    const DecodeProblem problem{.heads = rng.chance(2) ? 16 : rng.between(1, 128),
                                .mask = rng.chance(3) ? Mask::none : Mask::causal};
    auto builder = MetadataBuilder::create(backend(), problem, limits, {.policy = policy, .own_workspace = false});
    ASSERT_TRUE(succeeded(builder.status()));
    for (int batch = 0; batch < 8; ++batch) {
      Lengths lengths(random_requests(rng, limits));
      if (rng.chance(4))
        for (std::size_t b = 0; b < lengths.seq_lens.size(); ++b)
          for (std::int32_t t = lengths.query_start[b]; t < lengths.query_start[b + 1]; ++t)
            lengths.visible.push_back(rng.between(0, lengths.seq_lens[b]));
      const std::string what = "round " + std::to_string(round) + " batch " + std::to_string(batch);
      const PlanConfig& config = builder->plan_config();
      const auto want = OwnedPlan::make(config, lengths.view());
      ASSERT_TRUE(succeeded(want.status()));

      const DeviceArrays arrays = upload(lengths);
      const auto made = builder->build_on_device(0, view(arrays, lengths, lengths.query_start.back()), stream());
      ASSERT_TRUE(succeeded(made.status())) << what;
      EXPECT_TRUE(made->on_device());
      EXPECT_TRUE(made->plan().work_info_set.empty());
      const auto got = builder->copy_plan(*made, stream());
      ASSERT_TRUE(succeeded(got.status())) << what;
      expect_equal_plans(got->plan(), want->plan(), "device, " + what);

      const auto uploaded = builder->build(0, lengths.view(), stream());
      ASSERT_TRUE(succeeded(uploaded.status())) << what;
      EXPECT_FALSE(uploaded->on_device());
      const auto copied = builder->copy_plan(*uploaded, stream());
      ASSERT_TRUE(succeeded(copied.status())) << what;
      expect_equal_plans(copied->plan(), want->plan(), "upload, " + what);
    }
  }
}

// Lengths that break every promise: clamped, and the plan is that of the clamped ones or at least whole.
TEST_F(GpuPlan, WildLengthsGiveAPlanWithinTheLimits) {
  const Limits limits{.max_requests = 8, .max_query_tokens = 3, .max_kv_tokens = 1000};
  auto builder = MetadataBuilder::create(backend(), {.heads = 16}, limits).value();
  Lengths lengths({{1, 10}, {1, 20}, {1, 30}});
  lengths.seq_lens = {-5, 2'000'000'000, 30};
  lengths.query_start = {-3, 100, 7, 2'000'000'000};
  const DeviceArrays arrays = upload(lengths);
  const auto made = builder.build_on_device(0, view(arrays, lengths, 3), stream());
  ASSERT_TRUE(succeeded(made.status()));
  const auto plan = builder.copy_plan(*made, stream());
  ASSERT_TRUE(succeeded(plan.status()));
  for (const WorkRecord& record : plan->plan().work_info_set) {
    EXPECT_GE(record.row_begin, 0);
    EXPECT_LE(record.row_end, 3 * 16);
    EXPECT_GE(record.kv_begin, 0);
    EXPECT_LE(record.kv_end, limits.max_kv_tokens);
  }
}

TEST_F(GpuPlan, ResultsOfAPlanMadeOnTheDeviceHaveTheSameBits) {
  for (std::int32_t heads : {16, 128})
    for (const Policy& policy : {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(128)}) {
      auto step = DeviceStep::make(backend(), gpu_case({{1, 900}, {3, 65}, {2, 0}, {0, 10}, {5, 300}}, heads),
                                   {.policy = policy});
      ASSERT_TRUE(succeeded(step->run(backend(), stream())));
      const auto expected = step->batch.result_bits();
      step->batch.poison_outputs();
      ASSERT_TRUE(succeeded(step->device.upload_outputs(step->batch)));
      const auto metadata = step->builder.build_on_device(0, step->device.lengths(), stream());
      ASSERT_TRUE(succeeded(metadata.status()));
      ASSERT_TRUE(succeeded(decode(*metadata, step->args(stream()))));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch)));
      EXPECT_EQ(step->batch.result_bits(), expected) << "heads " << heads << " " << policy_name(policy.kind);
    }
}

}  // namespace
}  // namespace latte::testkit
