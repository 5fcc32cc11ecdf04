#include "cpu/workers.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

#include "cpu/cgroup.hpp"

namespace latte::cpu {
namespace {

// How often a worker looks for the next call before it sleeps: about the gap between two layers of a decode step. With
// more workers than processors, spinning only takes time from whoever has work.
constexpr int kSpins = 20000;
constexpr int kSpinsOversubscribed = 50;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// How many forks lie between the first process and this one, once they are counted. getpid() would be a system call.
std::atomic<std::uint32_t> forks{0};

void count_forks() {
  static const int error = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (error != 0) throw std::bad_alloc();
}

// Lets callers in a child of fork come one after the other. What a thread of another process held, when that was forked
// in turn, is nobody's here.
class TurnInChild {
 public:
  void lock() {
    const std::uint32_t here = forks.load(std::memory_order_relaxed);  // not 0 in a child
    for (std::uint32_t held = 0; !holder_.compare_exchange_weak(held, here, std::memory_order_acquire);)
      if (held == here) held = 0, sched_yield();
  }
  void unlock() { holder_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t> holder_{0};
};

// Looks so often whether it is done. Whoever is waited for may have no processor but this one, which somebody else's
// load can bring about at any time: so it is offered now and then. Alone on its processor a thread gets it right back.
template <class Done>
bool spin_until(int spins, const Done& done) {
  constexpr int kSpinsAYield = 64;
  for (int i = 0; i < spins; ++i) {
    if (done()) return true;
    if (i % kSpinsAYield == kSpinsAYield - 1)
      sched_yield();
    else
      relax();
  }
  return done();
}

}  // namespace

std::int32_t available_threads(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::int32_t threads = sched_getaffinity(0, sizeof(set), &set) == 0
                             ? CPU_COUNT(&set)
                             : static_cast<std::int32_t>(std::thread::hardware_concurrency());
  if (const std::int32_t quota = cgroup_threads(root); quota > 0) threads = std::min(threads, quota);
  return std::max(1, threads);
}

// A call is published by raising `epoch`; a worker that has done its part lowers `pending`. Whoever may sleep does so
// under the mutex, and whoever wakes it passes through the mutex first, so no wake-up is lost.
struct Workers::State {
  std::vector<std::thread> threads;
  std::mutex turn;  // one call at a time
  int spins = kSpins;

  Task task = nullptr;
  void* context = nullptr;
  std::int32_t active = 0;
  std::atomic<std::uint64_t> epoch{0};
  std::atomic<std::int32_t> pending{0};
  std::atomic<bool> stop{false};

  std::mutex sleep;
  std::condition_variable wake, all_done;

  // A child of fork has none of the threads, and whatever they and their callers held at that moment is held for good.
  const std::uint32_t home = forks.load(std::memory_order_relaxed);
  TurnInChild turn_elsewhere;
  bool elsewhere() const { return forks.load(std::memory_order_relaxed) != home; }

  void loop(std::int32_t worker) {
    std::fesetenv(FE_DFL_ENV);
    std::uint64_t seen = 0;
    for (;;) {
      const auto called = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!spin_until(spins, called)) {
        std::unique_lock lock(sleep);
        wake.wait(lock, called);
      }
      ++seen;
      if (stop.load(std::memory_order_relaxed)) return;
      if (worker < active) task(context, worker);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        { std::lock_guard lock(sleep); }
        all_done.notify_one();
      }
    }
  }

  void shutdown() {
    stop.store(true, std::memory_order_relaxed);
    publish();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void publish() {
    epoch.fetch_add(1, std::memory_order_release);
    { std::lock_guard lock(sleep); }
    wake.notify_all();
  }
};

Workers::Workers(std::int32_t count) : state_(std::make_unique<State>()) {
  count_forks();
  if (count > available_threads()) state_->spins = kSpinsOversubscribed;
  try {
    for (std::int32_t w = 1; w < count; ++w)
      state_->threads.emplace_back([state = state_.get(), w] { state->loop(w); });
  } catch (...) {  // no more threads to be had: send those home that there are
    state_->shutdown();
    throw;
  }
}

Workers::~Workers() {
  if (state_->elsewhere())
    static_cast<void>(state_.release());  // nobody can join threads of another process
  else
    state_->shutdown();
}

std::int32_t Workers::count() const { return static_cast<std::int32_t>(state_->threads.size()) + 1; }

void Workers::run(std::int32_t active, Task task, void* context) {
  State& s = *state_;
  if (active <= 0) return;
  if (s.elsewhere()) {  // one after the other: none waits for another
    std::lock_guard turn(s.turn_elsewhere);
    const DefaultFloatingPoint arithmetic;
    for (std::int32_t w = 0; w < active; ++w) task(context, w);
    return;
  }
  std::lock_guard turn(s.turn);
  if (active > 1) {
    s.task = task;
    s.context = context;
    s.active = active;
    s.pending.store(static_cast<std::int32_t>(s.threads.size()), std::memory_order_relaxed);
    s.publish();
  }
  {
    const DefaultFloatingPoint arithmetic;
    task(context, 0);
  }
  if (active <= 1) return;
  const auto all_done = [&] { return s.pending.load(std::memory_order_acquire) == 0; };
  if (spin_until(s.spins, all_done)) return;
  std::unique_lock lock(s.sleep);
  s.all_done.wait(lock, all_done);
}

}  // namespace latte::cpu
