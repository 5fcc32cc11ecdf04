// Resident workers: each index runs exactly once a call, whoever calls, however often.
#include "cpu/workers.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <memory>
#include <sched.h>
#include <set>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

namespace latte::cpu {
namespace {

constexpr std::int32_t kMost = 8;

// What the workers of one call leave behind.
struct Tally {
  std::array<std::atomic<std::int32_t>, kMost> runs{};
  std::array<std::thread::id, kMost> thread{};

  static void task(void* context, std::int32_t worker) {
    auto& tally = *static_cast<Tally*>(context);
    tally.runs[static_cast<std::size_t>(worker)].fetch_add(1, std::memory_order_relaxed);
    tally.thread[static_cast<std::size_t>(worker)] = std::this_thread::get_id();
  }

  void expect_each_once(std::int32_t active) const {
    for (std::int32_t w = 0; w < kMost; ++w)
      ASSERT_EQ(runs[static_cast<std::size_t>(w)].load(), w < active ? 1 : 0) << "worker " << w << " of " << active;
  }
};

TEST(WorkersThreads, EveryIndexRunsOnceForEveryCount) {
  for (std::int32_t count = 1; count <= kMost; ++count) {
    Workers workers(count);
    EXPECT_EQ(workers.count(), count);
    for (std::int32_t active = 1; active <= count; ++active) {
      Tally tally;
      workers.run(active, Tally::task, &tally);
      tally.expect_each_once(active);
    }
  }
}

TEST(WorkersThreads, NobodyRunsWhenNoneIsActive) {
  Workers workers(2);
  Tally tally;
  workers.run(0, Tally::task, &tally);
  tally.expect_each_once(0);
}

TEST(WorkersThreads, TheCallerIsWorkerZeroAndTheOthersAreNot) {
  Workers workers(4);
  Tally tally;
  workers.run(4, Tally::task, &tally);
  EXPECT_EQ(tally.thread[0], std::this_thread::get_id());
  EXPECT_EQ((std::set<std::thread::id>(tally.thread.begin(), tally.thread.begin() + 4).size()), 4u);
}

TEST(WorkersThreads, TheSameThreadsServeEveryCall) {
  Workers workers(4);
  Tally first;
  workers.run(4, Tally::task, &first);
  for (int call = 0; call < 100; ++call) {
    Tally tally;
    workers.run(4, Tally::task, &tally);
    ASSERT_EQ(tally.thread, first.thread);
  }
}

TEST(WorkersThreads, ThousandsOfCallsOfChangingWidth) {
  Workers workers(5);
  for (std::int32_t call = 0; call < 5000; ++call) {
    Tally tally;
    const std::int32_t active = 1 + call * 7 % 5;
    workers.run(active, Tally::task, &tally);
    tally.expect_each_once(active);
    if (HasFatalFailure()) return;
  }
}

TEST(WorkersThreads, WhatATaskWroteIsSeenAfterTheCall) {
  Workers workers(4);
  std::array<std::int64_t, 4> plain{};  // not atomic: run() itself must order the writes
  for (std::int64_t call = 1; call <= 2000; ++call) {
    workers.run(
        4,
        [](void* context, std::int32_t worker) {
          auto& sums = *static_cast<std::array<std::int64_t, 4>*>(context);
          sums[static_cast<std::size_t>(worker)] += worker + 1;
        },
        &plain);
    for (std::int64_t w = 0; w < 4; ++w) ASSERT_EQ(plain[static_cast<std::size_t>(w)], call * (w + 1));
  }
}

TEST(WorkersThreads, AWorkerMayBeMuchSlowerThanTheOthers) {
  Workers workers(4);
  for (std::int32_t slow = 0; slow < 4; ++slow) {
    struct Slow {
      Tally tally;
      std::int32_t worker;
    } context{.tally = {}, .worker = slow};
    workers.run(
        4,
        [](void* pointer, std::int32_t worker) {
          auto& slow_one = *static_cast<Slow*>(pointer);
          if (worker == slow_one.worker) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          Tally::task(&slow_one.tally, worker);
        },
        &context);
    context.tally.expect_each_once(4);
  }
}

TEST(WorkersThreads, WorkersThatSleptWakeAgain) {
  Workers workers(3);
  for (int call = 0; call < 10; ++call) {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    Tally tally;
    workers.run(3, Tally::task, &tally);
    tally.expect_each_once(3);
  }
}

// As where somebody else's load, or an affinity mask that came later, leaves them one processor together.
TEST(WorkersThreads, MayAllComeToShareOneProcessor) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  int processor = 0;
  while (!CPU_ISSET(processor, &before)) ++processor;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  std::thread([&] {
    Workers workers(std::min(available_threads(), kMost));  // not more than processors, so that they spin for long
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    struct Pin {
      const cpu_set_t& to;
      Tally tally = {};
      static void task(void* context, std::int32_t worker) {
        auto& pin = *static_cast<Pin*>(context);
        sched_setaffinity(0, sizeof(pin.to), &pin.to);
        Tally::task(&pin.tally, worker);
      }
    };
    for (int call = 0; call < 200; ++call) {
      Pin pin{one};
      workers.run(workers.count(), Pin::task, &pin);
      pin.tally.expect_each_once(workers.count());
    }
  }).join();
}

TEST(WorkersThreads, ConcurrentCallersTakeTurns) {
  Workers workers(3);
  std::atomic<std::int32_t> callers_inside{0}, wrong{0};
  struct Call {
    std::atomic<std::int32_t>& callers_inside;
    std::atomic<std::int32_t>& wrong;
    Tally tally = {};
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (std::int32_t i = 0; i < 500; ++i) {
        Call call{callers_inside, wrong};
        const std::int32_t active = 1 + i % 3;
        workers.run(
            active,
            [](void* context, std::int32_t worker) {
              auto& mine = *static_cast<Call*>(context);
              if (worker == 0 && mine.callers_inside.fetch_add(1) != 0) ++mine.wrong;
              Tally::task(&mine.tally, worker);
              if (worker == 0) mine.callers_inside.fetch_sub(1);
            },
            &call);
        for (std::int32_t w = 0; w < kMost; ++w)
          if (call.tally.runs[static_cast<std::size_t>(w)] != (w < active ? 1 : 0)) ++wrong;
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(WorkersThreads, ManyPoolsComeAndGo) {
  for (int round = 0; round < 50; ++round) {
    Workers idle(4);  // destroyed without a call
    Workers used(1 + round % kMost);
    Tally tally;
    used.run(used.count(), Tally::task, &tally);
    tally.expect_each_once(used.count());
  }
}

// Without a folder of control groups, so that the mask alone decides.
TEST(WorkersThreads, RoundToNearestWhoeverMadeThemAndCalls) {
  struct Modes {
    std::array<std::atomic<int>, 4> of{};
    static void task(void* context, std::int32_t worker) {
      static_cast<Modes*>(context)->of[static_cast<std::size_t>(worker)] = std::fegetround();
    }
  };
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  Workers workers(4);
  Modes modes;
  workers.run(4, Modes::task, &modes);
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  for (const auto& mode : modes.of) EXPECT_EQ(mode.load(), FE_TONEAREST);
  EXPECT_EQ(after, FE_UPWARD) << "the caller's mode was changed";
}

// Threads do not come along. (Named so that it is not among what ThreadSanitizer runs, which knows no such children.)
TEST(Fork, AChildDoesTheWorkByItselfAndEnds) {
  auto workers = std::make_unique<Workers>(4);
  Tally before;
  workers->run(4, Tally::task, &before);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Tally tally;
    workers->run(3, Tally::task, &tally);
    bool right = true;
    for (std::size_t w = 0; w < kMost; ++w) {
      right = right && tally.runs[w] == (w < 3 ? 1 : 0);
      if (w < 3) right = right && tally.thread[w] == std::this_thread::get_id();
    }
    workers.reset();
    { Workers own(2); }
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  Tally after;
  workers->run(4, Tally::task, &after);
  after.expect_each_once(4);
}

// What is not there any more may have been at work in the child when that was forked in turn. (Its name, too, keeps it
// out of what ThreadSanitizer runs.)
TEST(Fork, AGrandchildDoesTheWorkByItselfToo) {
  struct Gate {
    std::atomic<bool> entered{false}, open{false};
    static void task(void* context, std::int32_t) {
      auto& gate = *static_cast<Gate*>(context);
      gate.entered = true;
      while (!gate.open) std::this_thread::yield();
    }
  };
  Workers workers(2);
  Tally before;  // with this the other thread has begun, and holds nothing of AddressSanitizer's any more
  workers.run(2, Tally::task, &before);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Gate gate;
    std::thread busy([&] { workers.run(1, Gate::task, &gate); });
    while (!gate.entered) std::this_thread::yield();
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      alarm(20);
      Tally tally;
      workers.run(2, Tally::task, &tally);
      _exit(tally.runs[0] == 1 && tally.runs[1] == 1 ? 0 : 1);
    }
    int status = -1;
    const bool right = waitpid(grandchild, &status, 0) == grandchild && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    gate.open = true;
    busy.join();
    Tally tally;
    workers.run(2, Tally::task, &tally);
    _exit(right && tally.runs[0] == 1 && tally.runs[1] == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(WorkersThreads, AsManyAreAvailableAsTheAffinityMaskHasProcessors) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(available_threads("/nonexistent"), CPU_COUNT(&before));
  std::thread([&] {
    cpu_set_t narrow;
    CPU_ZERO(&narrow);
    for (int processor = 0, wanted = 1; processor < CPU_SETSIZE && wanted <= 3; ++processor) {
      if (!CPU_ISSET(processor, &before)) continue;
      CPU_SET(processor, &narrow);
      ASSERT_EQ(sched_setaffinity(0, sizeof(narrow), &narrow), 0);
      EXPECT_EQ(available_threads("/nonexistent"), wanted);
      EXPECT_LE(available_threads(), wanted);
      ++wanted;
    }
  }).join();
}

TEST(WorkersThreads, AtLeastOneThreadIsAvailable) {
  EXPECT_GE(available_threads(), 1);
  EXPECT_LE(available_threads(), static_cast<std::int32_t>(std::max(1u, std::thread::hardware_concurrency())));
}

}  // namespace
}  // namespace latte::cpu
