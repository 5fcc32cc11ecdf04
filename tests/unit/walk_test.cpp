// Who runs which record of a plan: every one is run once, by its own worker or by one that has nothing left to do.
#include "cpu/walk.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/workers.hpp"

namespace latte::cpu {
namespace {

constexpr std::int32_t kMostRecords = 64;

// What a kernel that only looks at its records has seen.
struct Seen {
  std::array<std::atomic<std::int32_t>, kMostRecords> runs{};
  std::atomic<std::int32_t> done = 0;
  std::atomic<bool> shared_scratch = false;
  bool first_waits = false;  // the first record, until all others are done
  std::int32_t records = 0;
  bool waited_in_vain = false;
};
Seen* seen = nullptr;

void look(const Piece& piece) {
  // The place of a worker's scratch, which no other may use at the same time.
  std::atomic_ref busy(*reinterpret_cast<std::int32_t*>(piece.scratch));
  if (busy.exchange(1) != 0) seen->shared_scratch = true;
  const auto record = static_cast<std::size_t>(piece.record.tile);
  seen->runs[record].fetch_add(1);
  if (record == 0 && seen->first_waits) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (seen->done < seen->records - 1 && !seen->waited_in_vain) {
      std::this_thread::yield();
      seen->waited_in_vain = std::chrono::steady_clock::now() > give_up;
    }
  }
  busy = 0;
  seen->done.fetch_add(1);
}

const Kernel kLook{
    .run = look, .scratch_bytes = [](const Shape&) -> std::size_t { return 64; }, .enter = [] {}, .leave = [] {}};

// A plan whose workers have so many records each, none of them split.
struct Shares {
  explicit Shares(const std::vector<std::int32_t>& counts) {
    meta[kMetaWorkers] = static_cast<std::int32_t>(counts.size());
    indptr = {0};
    for (std::int32_t count : counts) indptr.push_back(indptr.back() + count);
    for (std::int32_t i = 0; i < indptr.back(); ++i) {
      records.push_back({.request = 0, .partial_row = -1, .row_begin = i, .row_end = i + 1, .tile = i});
      rows.push_back({i, i + 1});
    }
    reduce.assign(records.size() + 1, 0);
  }
  Plan plan() const { return {meta, indptr, records, reduce, rows, {}}; }

  std::array<std::int32_t, kMetaFields> meta{};
  std::vector<std::int32_t> indptr, reduce;
  std::vector<WorkRecord> records;
  std::vector<RowRange> rows;
};

struct LookOp {
  struct Call {
    const Kernel* kernel;
    const Plan* plan;
    OutputView out;
    std::byte* workspace;
    QueryView q;
    HeadsView tokens;
  };
  const Call& call;
  RowMap map{.inner = 1, .head_major = false};
  Shape shape{.row_tile = 1, .width = 32, .v_width = 32, .format = KvFormat::f32, .values_in_keys = false};

  Piece piece(const WorkRecord& record) const {
    const TokenReader tokens(call.tokens, 0, 0);
    return {.record = record,
            .map = map,
            .shape = shape,
            .q = call.q,
            .keys = tokens,
            .values = tokens,
            .score_scale = 1,
            .value_scale = 1,
            .bounds = nullptr,
            .mask = Mask::none,
            .kv_tokens = 0,
            .query_end = 0,
            .out = call.out};
  }
};

void walk(const Shares& shares, Seen& into) {
  const Plan plan = shares.plan();
  Carver carver;
  CallMemory(carver, static_cast<std::int64_t>(shares.rows.size()), 0, 32, plan.workers(), 64);
  std::vector<std::int64_t> workspace(carver.used() / sizeof(std::int64_t) + 8);
  into.records = static_cast<std::int32_t>(shares.records.size());
  seen = &into;
  Workers workers(plan.workers());
  const LookOp::Call call{.kernel = &kLook, .plan = &plan, .workspace = reinterpret_cast<std::byte*>(workspace.data())};
  Walk(LookOp{call}).run(workers);
}

TEST(WalkThreads, WhatASlowWorkerHasNotBegunIsDoneByOthers) {
  Seen all;
  all.first_waits = true;
  walk(Shares({5, 0}), all);
  EXPECT_FALSE(all.waited_in_vain) << "the worker waited for records that nobody else took";
  EXPECT_EQ(all.done, 5);
}

TEST(WalkThreads, EveryRecordIsRunOnceWhoeverHasIt) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int32_t> counts(1 + random() % 6);
    for (std::int32_t& count : counts) count = static_cast<std::int32_t>(random() % 11);
    Seen all;
    walk(Shares(counts), all);
    for (std::int32_t i = 0; i < kMostRecords; ++i)
      ASSERT_EQ(all.runs[static_cast<std::size_t>(i)], i < all.records ? 1 : 0) << "record " << i;
    ASSERT_FALSE(all.shared_scratch);
  }
}

}  // namespace
}  // namespace latte::cpu
