// The policies of prefill: in which order tiles are dealt, and in how many pieces.
//
// balanced deals whole tiles to the least loaded worker, heads that share the cache together, heavy tiles before light
// ones. Any list scheduling ends at most one tile behind the ideal share I:
//     makespan <= I + largest tile.
// Where that is not good enough (few tiles for each worker), tiles are dealt whole only while they fit below I, and the
// rest is poured into what is left of the shares, cut where a share is full (prefill_pour.cpp):
//     makespan <= ceil(I) + block + piece + split,
// as for decode, with at most workers - 1 cuts. That costs partials and is taken only when it wins by more than
// 1 / kSplitMargin. The plain grid, uniform(1), is tried too, so that balanced never loses to it; and where tiles are
// so few that it has no more cuts than that either, uniform(2) to uniform(kMostSplits).
#include <algorithm>

#include "plan/prefill.hpp"

namespace latte::plan {
namespace {

constexpr std::int64_t kSplitMargin = 50;
constexpr std::int32_t kMostSplits = 16;

enum class Order { cached, grid };

// Calls fn(unit, head_begin, head_end) for runs of tiles, in the order in which they are dealt.
//   grid:    by tile number: a plain launch over (request, query tile, head).
//   cached:  requests with the longest KV first; their heads in groups whose keys and values fit into the shared cache
//            together, so that workers busy at the same time read the same ones; in a group the last query tokens
//            first: under a causal mask they have the most work, and the light tiles fill the gaps at the end.
template <class Fn>
void for_each_run(const PrefillStep& step, Order order, const Fn& fn) {
  const PrefillScratch& scratch = step.scratch;
  const std::int32_t heads = step.config.heads;
  if (order == Order::grid) {
    for (std::int32_t u = 0; u < step.units; ++u) fn(u, std::int32_t{0}, heads);
    return;
  }
  for (std::int32_t i = 0; i < step.requests; ++i) {
    const auto b = static_cast<std::size_t>(scratch.order[static_cast<std::size_t>(i)]);
    const std::int64_t kv_tokens = std::max(step.lengths.seq_lens[b], std::int32_t{1});
    const std::int64_t cached = step.config.shared_cache_tokens;
    const std::int64_t together = cached == 0 ? heads : std::clamp<std::int64_t>(cached / kv_tokens, 1, heads);
    const std::int64_t groups = (heads + together - 1) / together;
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int32_t u = scratch.unit_begin[b + 1]; u-- > scratch.unit_begin[b];)
        fn(u, static_cast<std::int32_t>(heads * g / groups), static_cast<std::int32_t>(heads * (g + 1) / groups));
  }
}

struct UniformCuts {
  std::int32_t splits;

  std::int32_t pieces(std::int32_t blocks) const { return uniform_pieces(blocks, splits); }
  std::int32_t cut(std::int32_t blocks, std::int32_t pieces, std::int32_t i) const {
    return uniform_cut(blocks, pieces, i);
  }
};

struct ChunkCuts {
  std::int32_t chunk;  // blocks

  std::int32_t pieces(std::int32_t blocks) const { return chunk_pieces(blocks, chunk); }
  std::int32_t cut(std::int32_t blocks, std::int32_t, std::int32_t i) const {
    return static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{chunk} * i, blocks));
  }
};

struct Dealt {
  std::int64_t pieces = 0;
  std::int64_t makespan = 0;
  std::int64_t fitting = 0;  // pieces before the first that made a worker's load larger than total / workers
};

// List scheduling. kKeep: pieces go to scratch; else only the estimate is made.
template <bool kKeep, class Cuts>
Dealt deal(const PrefillStep& step, Order order, const Cuts& cuts) {
  const std::int64_t share = step.total_ticks / step.config.workers;
  Dealer dealer(step.scratch.nodes, step.config.workers);
  Dealt dealt;
  for_each_run(step, order, [&](std::int32_t u, std::int32_t head_begin, std::int32_t head_end) {
    const Unit& unit = step.unit(u);
    const std::int64_t block = step.config.cost.block(unit.rows);
    const std::int32_t pieces = cuts.pieces(unit.blocks);
    for (std::int32_t head = head_begin; head < head_end; ++head)
      for (std::int32_t i = 0; i < pieces; ++i) {
        const std::int32_t begin = cuts.cut(unit.blocks, pieces, i), end = cuts.cut(unit.blocks, pieces, i + 1);
        if constexpr (kKeep)
          step.scratch.pieces[static_cast<std::size_t>(dealt.pieces)] = {
              .unit = u, .head = head, .block_begin = begin, .block_end = end, .worker = dealer.worker()};
        const std::int64_t ticks = step.fixed.piece + (end - begin) * block + (i > 0 ? step.fixed.split : 0);
        dealt.makespan = std::max(dealt.makespan, dealer.add(ticks));
        ++dealt.pieces;
        dealt.fitting = dealt.makespan <= share ? dealt.pieces : dealt.fitting;
      }
  });
  return dealt;
}

// The first uniform(n), n > 1, of those shorter than `bound` that no other is shorter than, among those with less than
// a piece a worker more than there are tiles; that is what a plan has room for. 0 if there is none.
std::int32_t shortest_uniform(const PrefillStep& step, std::int64_t bound) {
  std::int32_t best = 0;
  std::int64_t pieces_before = step.tiles();
  for (std::int32_t n = 2; n <= kMostSplits; ++n) {
    std::int64_t pieces = 0;
    for (std::int32_t u = 0; u < step.units; ++u)
      pieces += std::int64_t{uniform_pieces(step.unit(u).blocks, n)} * step.config.heads;
    // The same pieces again, or too many; with more of them there is only more to do.
    const std::int64_t extra = pieces - step.tiles();
    const std::int64_t ticks = step.total_ticks + extra * (step.fixed.piece + step.fixed.split);
    if (pieces == pieces_before || extra >= step.config.workers || ticks / step.config.workers >= bound) break;
    pieces_before = pieces;
    const std::int64_t makespan = deal<false>(step, Order::grid, UniformCuts{n}).makespan;
    if (makespan < bound) bound = makespan, best = n;
  }
  return best;
}

Outcome deal_balanced(const PrefillStep& step) {
  const UniformCuts whole{1};
  const Dealt cached = deal<true>(step, Order::cached, whole);
  std::int64_t best = cached.makespan;
  bool grid = false;
  if (best > std::max(step.ideal_ticks(), step.largest_ticks)) {
    const std::int64_t makespan = deal<false>(step, Order::grid, whole).makespan;
    if (makespan < best) best = makespan, grid = true;
  }

  // No plan is shorter than the ideal share, so often it is known beforehand that cuts do not pay.
  const std::int64_t worth_a_split = best - best / kSplitMargin;
  if (worth_a_split > step.ideal_ticks()) {
    const std::int64_t poured = cut_rest(step, cached.fitting);
    if (const std::int32_t splits = shortest_uniform(step, std::min(poured, worth_a_split)); splits > 1) {
      const Dealt dealt = deal<true>(step, Order::grid, UniformCuts{splits});
      return {.records = dealt.pieces, .makespan = dealt.makespan, .splits = splits};
    }
    if (poured < worth_a_split) return {.records = pour_rest(step, cached.fitting), .makespan = poured, .splits = 0};
  }
  if (grid) deal<true>(step, Order::grid, whole);
  return {.records = cached.pieces, .makespan = best, .splits = 1};
}

}  // namespace

Outcome deal_prefill(const PrefillStep& step) {
  const Policy& policy = step.config.policy;
  switch (policy.kind) {
    case PolicyKind::balanced: break;
    // A plain grid is dealt by the hardware: its next block goes to whoever is free.
    case PolicyKind::uniform: {
      const Dealt dealt = deal<true>(step, Order::grid, UniformCuts{policy.n});
      return {.records = dealt.pieces, .makespan = dealt.makespan, .splits = policy.n};
    }
    case PolicyKind::batch_invariant: {
      const Dealt dealt = policy.n == 0 ? deal<true>(step, Order::cached, UniformCuts{1})
                                        : deal<true>(step, Order::cached, ChunkCuts{chunk_blocks(step.config)});
      return {.records = dealt.pieces, .makespan = dealt.makespan, .splits = 0};
    }
  }
  return deal_balanced(step);
}

}  // namespace latte::plan
