// The plan: who computes which query rows over which KV range, and how partials are joined. Plain data, made by pure
// integer functions, the same on every machine. docs/plan.md explains the algorithm with a worked example.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte {

// Rows are query tokens x heads, tokens counted over the whole step T = query_start[B]:
//   decode:   row = token * heads + head  (heads share their keys, so a tile mixes tokens and heads)
//   prefill:  row = head * T + token      (a head has its own keys, so a tile is some tokens of one head)
struct WorkRecord {
  std::int32_t request;
  std::int32_t partial_row;  // first row in the partial buffers, or -1: not split, writes the final output
  std::int32_t row_begin;    // query rows [row_begin, row_end)
  std::int32_t row_end;
  std::int32_t kv_begin;  // token positions [kv_begin, kv_end) within the request
  std::int32_t kv_end;
  std::int32_t kv_after;  // tokens of the request behind kv_end
  std::int32_t tile;      // index into reduce_indptr / reduce_final_map
  bool operator==(const WorkRecord&) const = default;
};
static_assert(sizeof(WorkRecord) == 8 * sizeof(std::int32_t));

struct RowRange {
  std::int32_t begin;
  std::int32_t end;
  bool operator==(const RowRange&) const = default;
};

enum class PolicyKind : std::uint8_t { balanced, uniform, batch_invariant };

struct Policy {
  PolicyKind kind = PolicyKind::balanced;
  // uniform: splits of every tile. batch_invariant: KV tokens a chunk, rounded up to whole kv_blocks; 0 = the kernel's
  // choice in decode, and tiles that are never cut in prefill.
  std::int32_t n = 0;

  static Policy balanced() { return {PolicyKind::balanced, 0}; }
  static Policy uniform(std::int32_t splits) { return {PolicyKind::uniform, splits}; }
  static Policy batch_invariant(std::int32_t chunk_tokens = 0) { return {PolicyKind::batch_invariant, chunk_tokens}; }
};

const char* policy_name(PolicyKind kind);

// What a piece of work is estimated to cost, in ticks (1 tick = 1 ns on the machine the constants were measured on).
// A piece over b blocks of a tile with r rows costs  piece + b * (block + ceil(r / row_granule) * granule)  and, if it
// is not the tile's first piece, split on top (a partial written, read again and joined). These are costs with all
// workers at work. Where they share a memory that fewer of them can use up, blocks take less time while some rest:
// `alone_percent` of it at least, in proportion to the workers down to there.
struct CostModel {
  std::int32_t piece_ticks = 0;
  std::int32_t split_ticks = 0;
  std::int32_t block_ticks = 1;
  std::int32_t granule_ticks = 0;
  std::int32_t row_granule = 1;
  std::int32_t alone_percent = 100;  // 1 .. 100; 100: a block takes as long whoever else works

  constexpr std::int64_t block(std::int32_t rows) const {
    const auto granule = static_cast<std::uint32_t>(row_granule);
    return block_ticks + (static_cast<std::uint32_t>(rows) + granule - 1) / granule * std::int64_t{granule_ticks};
  }
};

enum class Op : std::uint8_t { decode, prefill };

const char* op_name(Op op);

// Everything but the lengths: the kernel's tile sizes, the machine as seen by the planner, and the limits.
struct PlanConfig {
  Op op = Op::decode;
  std::int32_t heads = 1;
  std::int32_t row_tile = 16;  // most rows a tile holds
  std::int32_t kv_block = 64;  // KV ranges are multiples of this, except at the end
  std::int32_t workers = 1;
  Mask mask = Mask::causal;
  Policy policy{};
  CostModel cost{};
  Limits limits{};
  // prefill: KV tokens, summed over heads, that the workers' shared cache holds; tiles that read the same ones are
  // dealt close together. 0 = all there are.
  std::int64_t shared_cache_tokens = 0;
};

// Upper bounds from the limits alone; src/plan/sizes.cpp has the proof.
struct PlanSizes {
  std::int64_t tiles = 0;
  std::int64_t records = 0;
  std::int64_t partials = 0;
  std::int64_t partial_rows = 0;
  std::int64_t words = 0;  // int32 words of the buffer that holds all six arrays
};

// Fields of work_meta_data: counts and offsets (in int32 words from the buffer's start), never addresses.
enum MetaField : std::int32_t {
  kMetaVersion,
  kMetaWorkers,
  kMetaRequests,
  kMetaRecords,
  kMetaTiles,
  kMetaSplitTiles,
  kMetaPartials,
  kMetaPartialRows,
  kMetaHeads,
  kMetaRowTile,
  kMetaKvBlock,
  kMetaSplits,  // what balanced chose: 0 = the cut line, n = uniform(n), -n = equal pieces of at most n blocks
  kMetaMakespanLow,
  kMetaMakespanHigh,
  kMetaOffsetIndptr,
  kMetaOffsetRecords,
  kMetaOffsetReduceIndptr,
  kMetaOffsetReduceFinal,
  kMetaOffsetReducePartial,
  kMetaFields,
};
inline constexpr std::int32_t kPlanVersion = 1;

// A view over one buffer of int32 words; the six arrays keep the names users of persistent MLA know.
struct Plan {
  std::span<const std::int32_t> work_meta_data;      // [kMetaFields]
  std::span<const std::int32_t> work_indptr;         // [workers + 1]: records [w] .. [w+1]-1 are worker w's
  std::span<const WorkRecord> work_info_set;         // [records]
  std::span<const std::int32_t> reduce_indptr;       // [tiles + 1]: CSR into reduce_partial_map; zero step = not split
  std::span<const RowRange> reduce_final_map;        // [tiles]: output rows of the tile
  std::span<const std::int32_t> reduce_partial_map;  // [partials]: first partial row of each partial, in merge order

  std::int32_t workers() const { return work_meta_data[kMetaWorkers]; }
  std::int32_t partial_rows() const { return work_meta_data[kMetaPartialRows]; }
  std::int64_t makespan_ticks() const {
    return (static_cast<std::int64_t>(work_meta_data[kMetaMakespanHigh]) << 32) |
           static_cast<std::uint32_t>(work_meta_data[kMetaMakespanLow]);
  }
};

Result<PlanSizes> plan_sizes(const PlanConfig& config);

// Fills `words` (at least plan_sizes().words) and returns views into it. Allocates nothing unless it fails.
Result<Plan> make_plan(const PlanConfig& config, const StepLengths& lengths, std::span<std::int32_t> words);

// The arrays in a buffer that another planner filled, or that was copied from a device. An error when its counts and
// offsets do not fit the buffer; check_plan looks at the rest.
Result<Plan> view_plan(std::span<const std::int32_t> words);

// Estimated costs, under the configuration that the plan was made with.
// Of one record, with all workers at work.
std::int64_t record_ticks(const PlanConfig& config, const WorkRecord& record);
// Of one record of this plan, which may leave some workers without work on purpose: blocks then take less time.
std::int64_t record_ticks(const PlanConfig& config, const Plan& plan, const WorkRecord& record);
// Of a whole plan: the largest sum over a worker's records.
std::int64_t makespan_ticks(const PlanConfig& config, const Plan& plan);
// Sum over tiles of the cost of the unsplit tile: what a perfect split would share out. Errors are make_plan's.
Result<std::int64_t> unsplit_ticks(const PlanConfig& config, const StepLengths& lengths);

// Checks a plan against its batch in full: exact cover, dense partials, bounds. For tests and for plans of others.
Status check_plan(const PlanConfig& config, const StepLengths& lengths, const Plan& plan);

// A plan with its own buffer, for programs that look at plans rather than run them.
class OwnedPlan {
 public:
  static Result<OwnedPlan> make(const PlanConfig& config, const StepLengths& lengths);
  static Result<OwnedPlan> take(std::vector<std::int32_t> words);
  OwnedPlan(OwnedPlan&&) = default;
  OwnedPlan& operator=(OwnedPlan&&) = default;
  const Plan& plan() const { return plan_; }

 private:
  OwnedPlan() = default;
  std::vector<std::int32_t> words_;
  Plan plan_;
};

}  // namespace latte
