// How long planning a step takes, on one thread, by policy and number of requests, for the 132 workers of an H200.
// Every benchmark is repeated and its median printed. The aim for 256 requests of decode is 20 us; for prefill 40 us a
// thousand tiles.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "latte/plan.hpp"

namespace {

using namespace latte;

constexpr std::int32_t kWorkers = 132;
constexpr std::int32_t kMaxKvTokens = 1 << 17;
constexpr int kRepetitions = 9;

// Decode steps of mixed lengths: mostly short, some long, a very long one; some with speculative tokens.
struct Batch {
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start{0};

  explicit Batch(std::int64_t requests) {
    std::uint32_t state = 12345;
    const auto next = [&state](std::uint32_t below) {
      state = state * 1664525u + 1013904223u;
      return static_cast<std::int32_t>((state >> 8) % below);
    };
    for (std::int64_t b = 0; b < requests; ++b) {
      std::int32_t kv = 1 + next(4096);
      if (b % 16 == 7) kv = 8192 + next(32768);
      if (b == requests / 2) kv = kMaxKvTokens;
      seq_lens.push_back(kv);
      query_start.push_back(query_start.back() + 1 + (b % 8 == 3 ? next(4) : 0));
    }
  }
  StepLengths lengths() const { return {.seq_lens = seq_lens, .query_start = query_start, .visible = {}}; }
};

PlanConfig config_for(std::int32_t requests, const Policy& policy) {
  return {
      .heads = 16,
      .row_tile = 64,
      .kv_block = 64,
      .workers = kWorkers,
      .mask = Mask::causal,
      .policy = policy,
      .cost = {.piece_ticks = 1500, .split_ticks = 2500, .block_ticks = 400, .granule_ticks = 20, .row_granule = 16},
      .limits = {.max_requests = requests, .max_query_tokens = 4, .max_kv_tokens = kMaxKvTokens}};
}

void plan_all(benchmark::State& state, const PlanConfig& config, const StepLengths& lengths) {
  const Result<PlanSizes> sizes = plan_sizes(config);
  if (!sizes.ok()) return state.SkipWithError(sizes.status().message().c_str());
  std::vector<std::int32_t> words(static_cast<std::size_t>(sizes->words));
  std::int64_t records = 0;
  for (auto _ : state) {
    Result<Plan> plan = make_plan(config, lengths, words);
    if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
    records = static_cast<std::int64_t>(plan->work_info_set.size());
    benchmark::DoNotOptimize(words.data());
    benchmark::ClobberMemory();
  }
  state.counters["records"] = static_cast<double>(records);
}

void plan_step(benchmark::State& state, const Policy& policy) {
  const auto requests = static_cast<std::int32_t>(state.range(0));
  const Batch batch(requests);
  plan_all(state, config_for(requests, policy), batch.lengths());
}

// Causal prompts; the first may be longer than the others.
struct Prompts {
  const char* name;
  std::int32_t heads, requests, tokens, first_tokens;
};

void plan_prompts(benchmark::State& state, const Prompts& prompts, const Policy& policy) {
  std::vector<std::int32_t> seq_lens(static_cast<std::size_t>(prompts.requests), prompts.tokens), query_start{0};
  seq_lens[0] = prompts.first_tokens;
  for (std::int32_t tokens : seq_lens) query_start.push_back(query_start.back() + tokens);
  PlanConfig config = config_for(prompts.requests, policy);
  config.op = Op::prefill;
  config.heads = prompts.heads;
  config.row_tile = config.kv_block = 128;
  config.limits.max_query_tokens = config.limits.max_kv_tokens = prompts.first_tokens;
  config.shared_cache_tokens = 60'000;
  plan_all(state, config, {.seq_lens = seq_lens, .query_start = query_start});
}

void add_prompts(const Prompts& prompts) {
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(1), Policy::batch_invariant(0)})
    benchmark::RegisterBenchmark((std::string("prefill/") + policy_name(policy.kind) + "/" + prompts.name).c_str(),
                                 [=](benchmark::State& state) { plan_prompts(state, prompts, policy); })
        ->Unit(benchmark::kMicrosecond)
        ->Repetitions(kRepetitions)
        ->MinTime(0.05)
        ->DisplayAggregatesOnly(true);
}

void configure(benchmark::internal::Benchmark* bench) {
  bench->ArgName("requests")->Arg(1)->Arg(16)->Arg(256)->Arg(1024);
  bench->Unit(benchmark::kMicrosecond)->Repetitions(kRepetitions)->MinTime(0.05)->DisplayAggregatesOnly(true);
}

BENCHMARK_CAPTURE(plan_step, balanced, Policy::balanced())->Apply(configure);
BENCHMARK_CAPTURE(plan_step, uniform_1, Policy::uniform(1))->Apply(configure);
BENCHMARK_CAPTURE(plan_step, uniform_16, Policy::uniform(16))->Apply(configure);
BENCHMARK_CAPTURE(plan_step, batch_invariant_2048, Policy::batch_invariant(2048))->Apply(configure);

}  // namespace

int main(int argc, char** argv) {
  for (const Prompts& prompts :
       {Prompts{"1x8192_128_heads", 128, 1, 8192, 8192}, Prompts{"1x8192_16_heads", 16, 1, 8192, 8192},
        Prompts{"1x8192_1_head", 1, 1, 8192, 8192}, Prompts{"4x4096_16_heads", 16, 4, 4096, 4096},
        Prompts{"32x256_16_heads", 16, 32, 256, 256}, Prompts{"16384_and_15x512_16_heads", 16, 16, 512, 16384}})
    add_prompts(prompts);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
