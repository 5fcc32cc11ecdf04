// The device's planner, run step by step on the host, against the host's: the same words, bit for bit.
#include <array>
#include <cstring>
#include <memory>
#include <numeric>

#include <gtest/gtest.h>

#include "cuda/plan/planner.hpp"
#include "plan/layout.hpp"
#include "plan_cases.hpp"

namespace latte {
namespace {

using namespace plan_test;
using cuda::planner::SharedScratch;
using cuda::planner::Task;

// A thread block whose threads run one after another, between barriers in any order: what is right here does not
// depend on the order in which real threads get their turn.
class HostBlock {
 public:
  explicit HostBlock(std::uint64_t seed) : engine_(seed) {}

  template <class Fn>
  void for_each(std::int32_t count, const Fn& fn) {
    for (std::int32_t i : shuffled(0, count)) fn(i);
  }
  // Results of max_between(), max_of() and sum_of() are there behind a barrier, and gone behind the next but one.
  void sync() { ++barriers_; }

  template <class Fn>
  void for_each_row(std::int32_t rows, const Fn& fn) {
    constexpr std::int32_t kEach = 3;
    for (std::int32_t i : shuffled(0, rows * kEach)) fn(i / kEach, i % kEach, kEach);
  }

  template <class Fn>
  bool all(std::int32_t count, const Fn& fn) {
    bool every = true;
    for (std::int32_t i : shuffled(0, count)) every &= fn(i);
    sync();
    return every;
  }

  template <class T, class Load, class Store>
  T scan(std::int32_t count, const Load& load, const Store& store) {
    T sum{};
    for (std::int32_t first = 0; first < count; first += kThreads) {
      const std::int32_t end = std::min(count, first + kThreads);
      std::array<T, kThreads> own, before;
      for (std::int32_t i : shuffled(first, end)) own[static_cast<std::size_t>(i - first)] = load(i);
      for (std::int32_t i = 0; i < end - first; ++i) {
        before[static_cast<std::size_t>(i)] = sum;
        sum = sum + own[static_cast<std::size_t>(i)];
      }
      for (std::int32_t i : shuffled(first, end)) {
        const auto k = static_cast<std::size_t>(i - first);
        store(i, own[k], before[k]);
      }
    }
    sync();
    return sum;
  }

  template <class Load, class Store>
  void scan_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    for (std::int32_t row : shuffled(0, rows)) {
      std::int32_t sum = 0;
      for (std::int32_t i = 0; i < count; ++i) {
        const std::int32_t own = load(row, i);
        store(row, i, sum);
        sum += own;
      }
      store(row, count, sum);
    }
    sync();
  }

  template <class Load, class Store>
  void sum_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    for (std::int32_t row : shuffled(0, rows)) {
      std::int32_t sum = 0;
      for (std::int32_t i : shuffled(0, count)) sum += load(row, i);
      store(row, sum);
    }
  }

  template <class Load, class Store>
  void fold_rows(std::int32_t rows, std::int32_t count, const Load& load, const Store& store) {
    for (std::int32_t row : shuffled(0, rows)) {
      plan::Even all;
      for (std::int32_t i : shuffled(0, count)) all = all + load(row, i);
      store(row, all);
    }
  }

  // As on the device, a result is gone two calls later.
  template <class Fn>
  auto max_rows(std::int32_t rows, std::int32_t count, const Fn& fn) {
    results_[next_ ^= 1] = std::vector<std::int64_t>(static_cast<std::size_t>(rows), 0);
    std::vector<std::int64_t>& results = results_[next_];
    for (std::int32_t row : shuffled(0, rows))
      for (std::int32_t i : shuffled(0, count))
        results[static_cast<std::size_t>(row)] = std::max(results[static_cast<std::size_t>(row)], fn(row, i));
    sync();
    return [&results](std::int32_t row) { return results.at(static_cast<std::size_t>(row)); };
  }

  template <std::int32_t K, class Make, class Fn>
  auto max_between(std::int32_t count, const Make& make, const Fn& fn, std::int32_t rows = K) {
    std::vector<decltype(make(0))> items(static_cast<std::size_t>(count) + 1);
    for (const std::int32_t again : {0, 1})
      for (std::int32_t i : shuffled(0, count + 1))
        if (again == 0 || i % 31 == 0) items[static_cast<std::size_t>(i)] = make(i);
    std::array<std::int64_t, K> results{};
    std::fill(results.begin() + rows, results.end(), -1);  // nobody may look at these
    for (std::size_t i = 0; i + 1 < items.size(); ++i)
      for (std::int32_t k = 0; k < rows; ++k) {
        std::int64_t& result = results[static_cast<std::size_t>(k)];
        result = std::max<std::int64_t>(result, fn(k, items[i], items[i + 1]));
      }
    return behind_barrier([results](std::int32_t k) { return results.at(static_cast<std::size_t>(k)); });
  }

  template <class Fn>
  auto max_of(std::int32_t count, const Fn& fn) {
    std::int64_t result = 0;
    for (std::int32_t i : shuffled(0, count)) result = std::max<std::int64_t>(result, fn(i));
    return behind_barrier([result] { return result; });
  }

  template <class Fn>
  auto sum_of(std::int32_t count, const Fn& fn) {
    std::int32_t sum = 0;
    for (std::int32_t i : shuffled(0, count)) sum += fn(i);
    return behind_barrier([sum] { return sum; });
  }

  template <class Fn>
  std::int32_t count_true(std::int32_t rows, const Fn& fn) {
    std::int32_t count = 0;
    for (std::int32_t row : shuffled(0, rows)) count += fn(row);
    return count;
  }

  struct Smallest {
    std::int32_t row;
    std::int64_t value;
  };
  template <class Fn>
  Smallest first_smallest(std::int32_t rows, const Fn& fn) {
    Smallest smallest{0, fn(0)};
    for (std::int32_t row = 1; row < rows; ++row)
      if (fn(row) < smallest.value) smallest = {row, fn(row)};
    return smallest;
  }

  void store(WorkRecord* where, const WorkRecord& record) { *where = record; }
  bool leader() const { return true; }

 private:
  static constexpr std::int32_t kThreads = 48;

  template <class Result>
  auto behind_barrier(const Result& result) {
    return [this, result, made = barriers_](auto... row) {
      EXPECT_EQ(barriers_, made + 1);
      return result(row...);
    };
  }

  std::vector<std::int32_t> shuffled(std::int32_t first, std::int32_t end) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(end - first));
    std::iota(order.begin(), order.end(), first);
    std::shuffle(order.begin(), order.end(), engine_);
    return order;
  }

  std::mt19937_64 engine_;
  std::array<std::vector<std::int64_t>, 2> results_;
  std::size_t next_ = 0;
  std::int32_t barriers_ = 0;
};

// Like GuardedPlan, made by the device's planner. `small`: shared memory that next to nothing fits into.
class DevicePlan {
 public:
  DevicePlan(const PlanCase& c, const PlanSizes& sizes, bool small, std::uint64_t seed, std::int32_t query_tokens) {
    // Words are 8-byte aligned on a device; scratch is not cleared.
    buffer_ = std::make_unique<std::int64_t[]>(static_cast<std::size_t>(sizes.words / 2 + 1 + 2 * kGuard));
    size_ = sizes.words;
    auto* all = reinterpret_cast<std::int32_t*>(buffer_.get());
    std::fill(all, all + 2 * (sizes.words / 2 + 1 + 2 * kGuard), kPoison);

    PlanConfig config = c.config;
    config.workers = plan::worker_count(c.config);
    config.limits = plan::resolve(c.config.limits);
    const Task task = cuda::planner::make_task(config, sizes, c.requests(), query_tokens,
                                               {.seq_lens = c.seq_lens.data(),
                                                .query_start = c.query_start.data(),
                                                .visible = c.visible.empty() ? nullptr : c.visible.data()},
                                               words());
    HostBlock block(seed);
    if (small)
      run<SharedScratch<3, 2, 5>>(block, task);
    else
      run<SharedScratch<>>(block, task);
  }

  std::int32_t* words() { return reinterpret_cast<std::int32_t*>(buffer_.get() + kGuard); }
  bool guards_intact() {
    const std::int32_t* begin = words();
    for (std::int64_t i = 0; i < 2 * kGuard; ++i)
      if (begin[-1 - i] != kPoison || begin[size_ + i] != kPoison) return false;
    return true;
  }

 private:
  template <class Shared>
  static void run(HostBlock& block, const Task& task) {
    auto shared = std::make_unique<Shared>();
    switch (task.config.policy.kind) {
      case PolicyKind::balanced: cuda::planner::make_plan<PolicyKind::balanced>(block, task, *shared); break;
      case PolicyKind::uniform: cuda::planner::make_plan<PolicyKind::uniform>(block, task, *shared); break;
      case PolicyKind::batch_invariant:
        cuda::planner::make_plan<PolicyKind::batch_invariant>(block, task, *shared);
        break;
    }
  }

  static constexpr std::int64_t kGuard = 32;
  static constexpr std::int32_t kPoison = 0x5eed5eed;
  std::unique_ptr<std::int64_t[]> buffer_;
  std::int64_t size_ = 0;
};

// Every word that make_plan defines: all that Plan's views cover.
Finding same_words(const Plan& plan, const std::int32_t* host, const std::int32_t* device) {
  const auto differs = [&](const char* name, const void* begin, std::size_t bytes) -> Finding {
    const auto first = static_cast<const std::int32_t*>(begin) - host;
    for (std::size_t i = 0; i < bytes / sizeof(std::int32_t); ++i) {
      const std::size_t at = static_cast<std::size_t>(first) + i;
      if (host[at] != device[at])
        return std::string(name) + " word " + std::to_string(i) + ": host " + std::to_string(host[at]) + ", device " +
               std::to_string(device[at]);
    }
    return std::nullopt;
  };
  if (auto found = differs("work_meta_data", plan.work_meta_data.data(), plan.work_meta_data.size_bytes()))
    return found;
  if (auto found = differs("work_indptr", plan.work_indptr.data(), plan.work_indptr.size_bytes())) return found;
  if (auto found = differs("work_info_set", plan.work_info_set.data(), plan.work_info_set.size_bytes())) return found;
  if (auto found = differs("reduce_indptr", plan.reduce_indptr.data(), plan.reduce_indptr.size_bytes())) return found;
  if (auto found = differs("reduce_final_map", plan.reduce_final_map.data(), plan.reduce_final_map.size_bytes()))
    return found;
  return differs("reduce_partial_map", plan.reduce_partial_map.data(), plan.reduce_partial_map.size_bytes());
}

// The device's plan for the lengths of `c` against the host's for those of `good`.
Finding same_plan(Rng& rng, const PlanCase& c, const PlanCase& good, std::int32_t query_tokens) {
  GuardedPlan host(good);
  if (!host.error().empty()) return host.error();
  for (const bool small : {false, true}) {
    DevicePlan device(c, host.sizes(), small, static_cast<std::uint64_t>(rng.in(0, INT32_MAX)), query_tokens);
    const std::string where = small ? " (in global memory)" : " (in shared memory)";
    if (Finding finding = same_words(host.plan(), host.words().data(), device.words())) return *finding + where;
    if (!device.guards_intact()) return "wrote outside plan_sizes().words" + where;
  }
  return std::nullopt;
}

void expect_same_plans(Sweep sweep) {
  sweep.options.op = Op::decode;
  for_each_case(sweep, [](Rng& rng, PlanCase& c) -> Finding {
    for (const Policy& policy : random_policies(rng, c)) {
      c.config.policy = policy;
      if (Finding finding = same_plan(rng, c, c, c.tokens() + rng.in(0, 3))) return finding;
    }
    return std::nullopt;
  });
}

TEST(DevicePlan, HasTheWordsOfTheHostsPlan) { expect_same_plans({.cases = 4000}); }

TEST(DevicePlan, HasTheWordsOfTheHostsPlanForFewWorkers) {
  expect_same_plans({.cases = 3000, .options = {.max_requests = 12, .max_workers = 6}});
}

TEST(DevicePlan, HasTheWordsOfTheHostsPlanForLargeSteps) {
  expect_same_plans({.cases = 60, .options = {.max_requests = 1500, .max_workers = 800, .max_tiles = 3000}});
}

// Few tiles, many workers: where other candidates than lines win, where shares are shorter than a block, and where
// chunks are one a worker.
TEST(DevicePlan, HasTheWordsOfTheHostsPlanWhenWorkersOutnumberBlocks) {
  std::int32_t uniform_won = 0, even_won = 0, even_won_with_nothing_shared = 0, one_chunk_each = 0;
  for_each_case({.cases = 3000, .options = {.op = Op::decode, .max_requests = 30, .max_workers = 400, .max_tiles = 40}},
                [&](Rng& rng, PlanCase& c) -> Finding {
                  if (rng.one_in(2)) c.config.cost.split_ticks = c.config.cost.piece_ticks = 0;
                  if (rng.one_in(2)) c.config.kv_block = rng.in(200, 1000);
                  c.config.policy = Policy::balanced();
                  const std::int32_t splits = GuardedPlan(c).plan().work_meta_data[kMetaSplits];
                  uniform_won += splits > 1;
                  even_won += splits < 0;
                  even_won_with_nothing_shared += splits < 0 && c.config.cost.alone_percent == 100;
                  if (Finding finding = same_plan(rng, c, c, c.tokens())) return finding;
                  c.config.policy = Policy::batch_invariant(rng.in(64, 4096));
                  const GuardedPlan chunks(c);
                  if (!chunks.error().empty()) return chunks.error();
                  const auto records = static_cast<std::int32_t>(chunks.plan().work_info_set.size());
                  one_chunk_each += records > 1 && records <= c.config.workers;
                  return same_plan(rng, c, c, c.tokens());
                });
  EXPECT_GT(uniform_won, 0);
  EXPECT_GT(one_chunk_each, 100);
  EXPECT_GT(even_won, 0);
  EXPECT_GT(even_won_with_nothing_shared, 0);
}

std::int32_t wild(Rng& rng) { return rng.pick({INT32_MIN, -1, 0, 7, 1 << 20, INT32_MAX}); }

// What clamping promises, one request after another.
PlanCase clamped(const PlanCase& c, std::int32_t query_tokens) {
  const Limits limits = plan::resolve(c.config.limits);
  PlanCase good = c;
  std::int64_t queries = 0, kv = 0;
  const std::int64_t most = std::min(limits.max_total_query_tokens, query_tokens);
  for (std::size_t b = 0; b < c.seq_lens.size(); ++b) {
    const std::int64_t own = std::int64_t{c.query_start[b + 1]} - c.query_start[b];
    queries = std::min(most, queries + std::clamp<std::int64_t>(own, 0, limits.max_query_tokens));
    good.query_start[b + 1] = static_cast<std::int32_t>(queries);
    const std::int64_t seq_len = std::clamp(c.seq_lens[b], 0, limits.max_kv_tokens);
    good.seq_lens[b] = static_cast<std::int32_t>(std::min(seq_len, limits.max_total_kv_tokens - kv));
    kv += good.seq_lens[b];
  }
  good.query_start[0] = 0;
  good.visible.clear();
  for (std::size_t b = 0; !c.visible.empty() && b < c.seq_lens.size(); ++b)
    for (std::int32_t t = good.query_start[b]; t < good.query_start[b + 1]; ++t)
      good.visible.push_back(std::clamp(c.visible[static_cast<std::size_t>(t)], 0, good.seq_lens[b]));
  return good;
}

TEST(DevicePlan, ClampsWrongLengthsAndStaysInItsBuffers) {
  for_each_case({.cases = 3000, .options = {.op = Op::decode}}, [](Rng& rng, PlanCase& c) -> Finding {
    const std::int32_t query_tokens = rng.one_in(3) ? c.tokens() / 2 : c.tokens() + rng.in(0, 3);
    const std::int32_t odds = rng.pick({1, 3, 20});
    for (std::int32_t& length : c.seq_lens)
      if (rng.one_in(odds)) length = wild(rng);
    for (std::int32_t& start : c.query_start)
      if (rng.one_in(odds)) start = wild(rng);
    if (!c.visible.empty()) {
      c.visible.resize(static_cast<std::size_t>(query_tokens));
      for (std::int32_t& tokens : c.visible)
        if (rng.one_in(odds)) tokens = wild(rng);
    }
    PlanCase good = clamped(c, query_tokens);
    if (!c.visible.empty() && good.visible.empty()) return std::nullopt;  // no query token left to see anything
    for (const Policy& policy : random_policies(rng, good)) {
      c.config.policy = good.config.policy = policy;
      if (Finding finding = same_plan(rng, c, good, query_tokens)) return finding;
    }
    return std::nullopt;
  });
}

TEST(DevicePlan, OfNothingIsThePlanOfNothing) {
  for (const std::int32_t max_query_tokens : {0, 1})
    for (const std::int32_t requests : {0, 3}) {
      PlanCase c;
      c.config.workers = 7;
      c.config.limits = {.max_requests = 3, .max_query_tokens = max_query_tokens, .max_kv_tokens = 100};
      c.seq_lens.assign(static_cast<std::size_t>(requests), 50);
      c.query_start.assign(static_cast<std::size_t>(requests) + 1, 0);
      Rng rng(1);
      for (const Policy& policy : {Policy::balanced(), Policy::uniform(3), Policy::batch_invariant(64)}) {
        c.config.policy = policy;
        const Finding finding = same_plan(rng, c, c, 0);
        EXPECT_FALSE(finding) << *finding << " | " << describe(c);
      }
    }
}

}  // namespace
}  // namespace latte
