// Plans from arbitrary configurations and lengths. Whatever the bytes say, make_plan gives an error value or a plan
// that check_plan accepts, inside its buffer.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "latte/plan.hpp"

namespace {

using namespace latte;

// Larger plans are only sized: the fuzzer should spend its time on many small ones.
constexpr std::int64_t kMostWords = 1 << 20;
constexpr std::int32_t kGuard = 0x5eed5eed;

// Reads values until the bytes run out, then zeros.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  template <class T>
  T raw() {
    T value = 0;
    const std::size_t size = std::min(sizeof(T), static_cast<std::size_t>(end_ - at_));
    if (size > 0) std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }
  // Mostly 0 .. most, so that plans get made; now and then anything at all.
  std::int32_t any_or_up_to(std::int32_t most) {
    const auto selector = raw<std::uint8_t>();
    if (selector == 0xff) return raw<std::int32_t>();
    if (selector >= 0xf0) return raw<std::uint16_t>() % (most + 1);
    return selector % (most + 1);
  }
  bool empty() const { return at_ == end_; }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

PlanConfig read_config(Bytes& in) {
  PlanConfig config;
  config.heads = in.any_or_up_to(130);
  config.row_tile = in.any_or_up_to(130);
  config.kv_block = in.any_or_up_to(130);
  config.workers = in.any_or_up_to(200);
  const auto mask_and_op = in.raw<std::uint8_t>();
  config.mask = mask_and_op % 2 == 0 ? Mask::causal : Mask::none;
  config.op = mask_and_op < 0x80 ? Op::decode : Op::prefill;
  // Enums come through casts too: now and then any byte.
  if (mask_and_op == 0xff) {
    config.mask = static_cast<Mask>(in.raw<std::uint8_t>());
    config.op = static_cast<Op>(in.raw<std::uint8_t>());
  }
  config.shared_cache_tokens = std::int64_t{1000} * (mask_and_op / 2 % 0x20);
  const auto kind = in.raw<std::uint8_t>();
  config.policy.kind = static_cast<PolicyKind>(kind == 0xff ? in.raw<std::uint8_t>() : kind % 3);
  config.policy.n = in.any_or_up_to(300);
  config.cost = {.piece_ticks = in.any_or_up_to(30000),
                 .split_ticks = in.any_or_up_to(30000),
                 .block_ticks = in.any_or_up_to(5000),
                 .granule_ticks = in.any_or_up_to(5000),
                 .row_granule = in.any_or_up_to(40),
                 .alone_percent = in.any_or_up_to(110)};
  config.limits = {.max_requests = in.any_or_up_to(40),
                   .max_query_tokens = in.any_or_up_to(config.op == Op::prefill ? 200 : 10),
                   .max_total_query_tokens = in.any_or_up_to(100),
                   .max_kv_tokens = in.any_or_up_to(60000),
                   .max_total_kv_tokens = in.raw<std::uint8_t>() >= 0xf0 ? in.raw<std::int64_t>() : 0,
                   .workers = in.any_or_up_to(200)};
  // Prompts would pass so small a total nearly always.
  if (config.op == Op::prefill && config.limits.max_total_query_tokens % 8 != 7)
    config.limits.max_total_query_tokens = 0;
  return config;
}

[[noreturn]] void report(const char* what, const std::string& detail) {
  std::fprintf(stderr, "plan_fuzz: %s: %s\n", what, detail.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  const PlanConfig config = read_config(in);
  std::vector<std::int32_t> seq_lens, query_start{0}, visible;
  const auto flags = in.raw<std::uint8_t>();
  if (flags == 0xff) query_start[0] = in.raw<std::int32_t>();
  while (!in.empty() && seq_lens.size() < 64) {
    seq_lens.push_back(in.any_or_up_to(60000));
    const std::int64_t next =
        static_cast<std::int64_t>(query_start.back()) + in.any_or_up_to(config.op == Op::prefill ? 90 : 9);
    query_start.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(next, INT32_MIN, INT32_MAX)));
  }
  if (flags == 0xfe) query_start.pop_back();
  if (flags % 4 == 3)
    for (std::size_t b = 0; b + 1 < query_start.size() && b < seq_lens.size(); ++b)
      for (std::int64_t t = query_start[b]; t < query_start[b + 1] && visible.size() < 600; ++t)
        visible.push_back(flags == 0xfb ? seq_lens[b] / -2
                                        : seq_lens[b] / static_cast<std::int32_t>(1 + visible.size() % 3));

  const Result<PlanSizes> sizes = plan_sizes(config);
  if (!sizes.ok()) {
    if (make_plan(config, {}, {}).ok()) report("planned what has no size", sizes.status().message());
    return 0;
  }
  if (sizes->tiles < 0 || sizes->records < 0 || sizes->partials < 0 || sizes->partial_rows < 0 || sizes->words < 0)
    report("negative sizes", std::to_string(sizes->words));
  if (sizes->words > kMostWords) return 0;

  const auto words = static_cast<std::size_t>(sizes->words);
  std::vector<std::int32_t> buffer(words + 1, kGuard);
  const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = visible};
  const Result<Plan> plan = make_plan(config, lengths, std::span(buffer).first(words));
  if (buffer[words] != kGuard) report("wrote behind its buffer", std::to_string(words));
  if (!plan.ok()) {
    if (plan.status().code() == Code::internal || plan.status().field().empty())
      report("an error that says nothing", plan.status().message());
    return 0;
  }
  if (const Status status = check_plan(config, lengths, *plan); !status.ok()) report("bad plan", status.message());
  if (plan->makespan_ticks() != makespan_ticks(config, *plan))
    report("estimate", std::to_string(plan->makespan_ticks()));
  return 0;
}
