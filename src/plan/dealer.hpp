// List scheduling: the next piece goes to the least loaded worker, ties to the lowest index.
//
// Workers meet in a tournament: a node keeps the loser of the match below it, the winner moves up. When the overall
// winner has got its piece, only its own path is played again: log2(workers) matches whose nodes are known beforehand.
// A worker is one number, load * leaves + index, so that a match is a minimum and a maximum, without a branch that
// would be guessed wrong half the time. plan_sizes() sees to it that the numbers fit (costs_fit).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include "plan/layout.hpp"

namespace latte::plan {

class Dealer {
 public:
  // Leaves, and nodes, of the tournament.
  static constexpr std::int64_t leaves(std::int32_t workers) {
    return std::bit_ceil(static_cast<std::uint32_t>(workers));
  }

  // `nodes` is scratch of leaves(workers) entries; node i plays the winners of 2i and 2i + 1, and worker w comes in at
  // leaves + w. With all loads equal the leftmost leaf wins, so a node's loser is the leftmost leaf of its right half.
  Dealer(std::span<Ticks> nodes, std::int32_t workers)
      : nodes_(nodes), leaves_(static_cast<std::uint32_t>(nodes.size())) {
    for (std::uint32_t node = 1; node < leaves_; ++node) {
      std::uint32_t leaf = 2 * node + 1;
      while (leaf < leaves_) leaf *= 2;
      const std::int64_t worker = leaf - leaves_;
      nodes_[node] = worker < workers ? worker : std::numeric_limits<std::int64_t>::max();
    }
  }

  // Whose turn it is.
  std::int32_t worker() const { return static_cast<std::int32_t>(winner_ & (leaves_ - 1)); }

  // Gives that worker a piece; returns its load with it.
  std::int64_t add(std::int64_t ticks) {
    const int shift = std::countr_zero(leaves_);
    const std::int64_t loaded = winner_ + (ticks << shift);
    std::int64_t best = loaded;
    for (std::uint32_t node = (leaves_ + static_cast<std::uint32_t>(worker())) / 2; node > 0; node /= 2) {
      const std::int64_t rival = nodes_[node];
      nodes_[node] = std::max(best, rival);
      best = std::min(best, rival);
    }
    winner_ = best;
    return loaded >> shift;
  }

 private:
  std::span<Ticks> nodes_;
  std::uint32_t leaves_;
  std::int64_t winner_ = 0;
};

}  // namespace latte::plan
