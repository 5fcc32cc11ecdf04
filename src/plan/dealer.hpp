// List scheduling: the next piece goes to the least loaded worker, ties to the lowest index.
//
// Workers meet in a tournament: a node keeps the loser of the match below it, the winner moves up. When the overall
// winner has got its piece, only its own path is played again: log2(workers) matches whose nodes are known beforehand.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include "plan/layout.hpp"

namespace latte::plan {

struct Contender {
  Ticks load;
  std::int32_t worker;
};

class Dealer {
 public:
  static std::int64_t nodes(std::int32_t workers) { return std::bit_ceil(static_cast<std::uint32_t>(workers)); }

  // `tree` is scratch of nodes(workers) entries; node i plays the winners of 2i and 2i + 1, and leaf w is worker w.
  // With all loads equal the leftmost leaf wins, so a node's loser is the leftmost leaf of its right half.
  Dealer(std::span<Contender> tree, std::int32_t workers)
      : tree_(tree), leaves_(static_cast<std::uint32_t>(tree.size())) {
    for (std::uint32_t node = 1; node < leaves_; ++node) {
      std::uint32_t leaf = 2 * node + 1;
      while (leaf < leaves_) leaf *= 2;
      const auto worker = static_cast<std::int32_t>(leaf - leaves_);
      tree_[node] = {.load = worker < workers ? 0 : std::numeric_limits<std::int64_t>::max(), .worker = worker};
    }
  }

  std::int32_t worker() const { return worker_; }  // whose turn it is

  // Gives that worker a piece; returns its load with it.
  std::int64_t add(std::int64_t ticks) {
    const std::int64_t loaded = load_ + ticks;
    std::int64_t load = loaded;
    std::int32_t worker = worker_;
    for (std::uint32_t node = (leaves_ + static_cast<std::uint32_t>(worker)) / 2; node > 0; node /= 2) {
      const std::int64_t other_load = tree_[node].load;
      const std::int32_t other = tree_[node].worker;
      // Arithmetic instead of a branch: who wins is a coin toss.
      const bool loses = (other_load < load) | ((other_load == load) & (other < worker));
      tree_[node] = {.load = loses ? load : other_load, .worker = loses ? worker : other};
      load = loses ? other_load : load;
      worker = loses ? other : worker;
    }
    load_ = load;
    worker_ = worker;
    return loaded;
  }

 private:
  std::span<Contender> tree_;
  std::uint32_t leaves_;
  std::int64_t load_ = 0;
  std::int32_t worker_ = 0;
};

}  // namespace latte::plan
