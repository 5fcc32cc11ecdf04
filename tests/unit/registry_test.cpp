// Which kernel runs on machines that are not this one.
#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

// A processor with everything, whose system may keep the AMX tile state to itself.
Features sapphire_rapids(bool amx_permitted) {
  return {.avx2 = true,
          .avx512 = true,
          .avx512_bf16 = true,
          .amx_bf16 = true,
          .amx_permitted = amx_permitted,
          .name = "a Xeon"};
}

const KernelListing* find(const std::vector<KernelListing>& list, std::string_view name) {
  const auto found = std::find_if(list.begin(), list.end(), [&](const KernelListing& k) { return k.name == name; });
  return found == list.end() ? nullptr : &*found;
}

std::string chosen(const Features& machine, Dtype q, KvFormat kv, std::string_view name = "auto") {
  std::string reason;
  const Kernel* kernel = choose_kernel(list_kernels(machine), q, kv, name, reason);
  return kernel != nullptr ? std::string(kernel->name) : reason;
}

class Registry : public testing::Test {
 protected:
  void SetUp() override {
    if (bf16_kernels().empty()) GTEST_SKIP() << "this build has no AMX kernel";
  }
};

TEST_F(Registry, AmxIsTheBestWhereTheSystemPermitsIt) {
  const auto list = list_kernels(sapphire_rapids(true));
  EXPECT_EQ(list.front().name, "amx");
  EXPECT_TRUE(list.front().usable);
  EXPECT_EQ(list.front().reason, "");
  EXPECT_EQ(chosen(sapphire_rapids(true), Dtype::bf16, KvFormat::bf16), "amx");
}

TEST_F(Registry, AmxThatIsNotPermittedSaysSoAndLeavesItToTheNext) {
  const Features machine = sapphire_rapids(false);
  const auto list = list_kernels(machine);
  const KernelListing* amx = find(list, "amx");
  ASSERT_NE(amx, nullptr);
  EXPECT_FALSE(amx->usable);
  EXPECT_EQ(amx->reason, "the operating system did not permit the AMX tile state");
  EXPECT_NE(to_string(machine).find("amx_bf16(not permitted)"), std::string::npos) << to_string(machine);
  for (const KvFormat kv : {KvFormat::bf16, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla})
    EXPECT_EQ(chosen(machine, Dtype::bf16, kv), "avx512_bf16") << kv_format_name(kv);
  EXPECT_EQ(chosen(machine, Dtype::f32, KvFormat::f32), "avx512");
  EXPECT_EQ(chosen(machine, Dtype::bf16, KvFormat::bf16, "amx"), "kernel amx: " + amx->reason)
      << "asked for by name it is no silent matter";
}

TEST_F(Registry, AProcessorWithoutAmxIsNotBlamedOnTheSystem) {
  Features machine = sapphire_rapids(false);
  machine.amx_bf16 = false;
  EXPECT_EQ(find(list_kernels(machine), "amx")->reason, "the processor has no AMX-BF16");
  EXPECT_EQ(chosen(machine, Dtype::bf16, KvFormat::bf16), "avx512_bf16");
  machine.avx512_bf16 = machine.avx512 = false;
  EXPECT_EQ(chosen(machine, Dtype::bf16, KvFormat::bf16), "avx2");
  EXPECT_EQ(chosen({}, Dtype::bf16, KvFormat::bf16), "scalar");
}

TEST(RegistryTiles, RowsBeyondATileMakeEvenOnes) {
  const Kernel& kernel = scalar_kernel();
  const auto tile = [&](std::int32_t heads) {
    return plan_config(kernel, DecodeProblem{.heads = heads}, {.max_requests = 1, .max_kv_tokens = 1},
                       Policy::balanced(), 1)
        .row_tile;
  };
  const std::int32_t most = kernel.max_row_tile, granule = kernel.speed.granule;
  EXPECT_EQ(tile(most), most);
  EXPECT_EQ(tile(most + 1), (most / 2 + granule) / granule * granule) << "two of half as many, in whole groups of rows";
  EXPECT_LT(tile(most + 1), most);
  EXPECT_EQ(tile(2 * most), most);
}

}  // namespace
}  // namespace latte::cpu
