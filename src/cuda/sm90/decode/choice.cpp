#include "cuda/sm90/decode/choice.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "core/checked.hpp"
#include "plan/layout.hpp"

namespace latte::cuda {
namespace {

// The kernels find their slices of a tile by 32-bit products of pieces and parts of rows, 4096 of these at most.
constexpr std::int64_t kMostPieces = 32768;
constexpr std::int64_t kLeastChunk = 128, kMostChunk = 4096;

struct Body {
  std::int32_t rows, tokens;  // most rows of a thread block; KV tokens of a block
  const char* name;
  // Nanoseconds of one block when all multiprocessors work: what memory needs for one thread block, or for a pair,
  // which shares the read, the tensor cores. From clock traces and from which plans turned out faster on an H200,
  // rounded; only their ratios matter.
  std::int32_t block_ns, pair_block_ns;
  // Loading the queries and storing the result; on top for a split: its partial written, waited for and joined.
  std::int32_t piece_ns, split_ns;
  // What of block_ns is left where few thread blocks are at work, and memory is no limit. Such that equal pieces on
  // some of the multiprocessors and equal shares on all of them are estimated alike where they took the same time (set
  // before all splits of a line counted in that). A pair's limit is not memory.
  std::int32_t alone_percent;
};

// Swapped operands cost as many columns as there are rows; at 64 the plain form is faster, and as pairs it always is.
constexpr std::array<Body, 4> kBodies = {{
    {16, 64, "sm90_swapped16", 2200, 0, 6000, 4000, 62},
    {32, 64, "sm90_swapped32", 2250, 0, 6500, 5000, 74},
    {48, 64, "sm90_swapped48", 2300, 0, 7000, 8000, 88},
    {64, 48, "sm90_plain64", 1725, 1575, 8000, 12000, 76},
}};
constexpr const Body& kPlain = kBodies.back();
constexpr const char* kPairName = "sm90_plain64_pair";

const Body& body_of(std::int32_t rows) {
  return *std::find_if(kBodies.begin(), kBodies.end() - 1, [&](const Body& body) { return body.rows >= rows; });
}

Status refuse(std::string field, std::string expected, std::string got) {
  return {Code::unsupported, std::move(field), std::move(expected), std::move(got)};
}

// Chunk of the batch-invariant policy where the caller names none: an equal share of the largest step, whose requests
// have so many tiles. The number of workers of this machine must not enter, or a request's bits would depend on it.
std::int32_t default_chunk(const Limits& limits, std::int64_t tiles, bool pair) {
  const std::int64_t workers = pair ? kHopperMultiprocessors / 2 : kHopperMultiprocessors;
  // No more than matters below, so that nothing overflows.
  const std::int64_t tokens = std::min(limits.max_total_kv_tokens, kMostChunk * workers);
  const std::int64_t share = ceil_div(tokens * std::min(tiles, workers), workers);
  const auto power =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(share, 1))));
  return static_cast<std::int32_t>(std::clamp(power, kLeastChunk, kMostChunk));
}

Status check(const DecodeProblem& problem) {
  if (problem.kv_format == KvFormat::fp8_e4m3 || problem.kv_format == KvFormat::fp8_ds_mla)
    return refuse("kv_format", "bf16 or f16; fp8 caches come later on cuda", kv_format_name(problem.kv_format));
  if (problem.kv_format == KvFormat::f32) return refuse("kv_format", "bf16 or f16 on cuda", "f32");
  if (problem.q_dtype != kv_element_dtype(problem.kv_format))
    return refuse("q_dtype", std::string("the cache's, ") + kv_format_name(problem.kv_format),
                  dtype_name(problem.q_dtype));
  if (problem.rope != 64 || (problem.latent != 512 && problem.latent != 256))
    return refuse("latent", "512 + 64 or 256 + 64 on cuda",
                  std::to_string(problem.latent) + " + " + std::to_string(problem.rope));
  return {};
}

}  // namespace

const char* kernel_name(const DecodeKernel& kernel) {
  return kernel.blocks_a_worker > 1 ? kPairName : body_of(kernel.rows).name;
}

std::array<const char*, 5> decode_kernel_names() {
  static_assert(kBodies.size() == 4);
  return {kBodies[0].name, kBodies[1].name, kBodies[2].name, kBodies[3].name, kPairName};
}

Result<DecodeKernelChoice> choose_decode(const DecodeProblem& problem, const Limits& given, const Policy& policy,
                                         std::int32_t multiprocessors) {
  if (Status status = check(problem); !status.ok()) return status;
  const Limits limits = plan::resolve(given);
  const std::int64_t request_rows = std::max<std::int64_t>(1, std::int64_t{problem.heads} * limits.max_query_tokens);
  // More rows than a thread block takes: pairs share a tile of up to twice as many; longer requests get equal tiles.
  const bool whole_slabs = problem.page_size % 8 == 0;
  const bool pair = request_rows > kPlain.rows;
  const std::int64_t most = pair ? 2 * kPlain.rows : kPlain.rows;
  const auto tile_rows = static_cast<std::int32_t>(ceil_div(request_rows, ceil_div(request_rows, most)));
  const Body& body = pair ? kPlain : body_of(tile_rows);
  const std::int32_t available = given.workers > 0 ? std::min(given.workers, multiprocessors) : multiprocessors;
  if (pair && available < 2)
    return refuse("limits.workers", ">= 2: tiles of more rows than a thread block takes run on pairs", "1");

  DecodeKernelChoice choice;
  choice.kernel = {.rows = body.rows,
                   .blocks_a_worker = pair ? 2 : 1,
                   .dtype = problem.q_dtype,
                   .latent = problem.latent,
                   .rope = problem.rope,
                   .whole_slabs = whole_slabs};
  // Behind a launch like itself one that neither fills the device nor leaves half of it free would get the places that
  // are left, and some multiprocessors share what they may fetch; pairs were not slower for it
  // (docs/kernels/sm90_swapped.md, Fewer workers).
  choice.kernel.dependent_launch = pair || available == multiprocessors || 2 * available <= multiprocessors;
  PlanConfig& config = choice.config;
  config.heads = problem.heads;
  config.row_tile = tile_rows;
  config.kv_block = body.tokens;
  config.workers = pair ? available / 2 : available;
  config.mask = problem.mask;
  config.policy = policy;
  if (policy.kind == PolicyKind::batch_invariant && policy.n == 0)
    config.policy.n = default_chunk(limits, ceil_div(request_rows, tile_rows), pair);
  config.limits = given;
  config.limits.workers = config.workers;
  const std::int32_t width = problem.latent + problem.rope;
  // With fewer workers than there are multiprocessors blocks take less time, and there is less to win by resting.
  const std::int32_t alone = pair ? 100 : body.alone_percent;
  const std::int32_t busy = std::clamp(100 * available / kHopperMultiprocessors, alone, 100);
  config.cost = {.piece_ticks = body.piece_ns,
                 .split_ticks = body.split_ns,
                 .block_ticks = (pair ? body.pair_block_ns : body.block_ns) * busy / 100 * width / 576,
                 .granule_ticks = 0,
                 .row_granule = 1,
                 .alone_percent = 100 * alone / busy};

  if (config.policy.kind == PolicyKind::batch_invariant &&
      ceil_div(limits.max_kv_tokens, config.policy.n) > kMostPieces)
    return refuse("policy", "a chunk of at least max_kv_tokens / " + std::to_string(kMostPieces) + " tokens",
                  std::to_string(config.policy.n));
  // Partials go through L2 as well, and are read right after they are written. Limits that give no plan are the
  // builder's to report.
  const Result<PlanSizes> sizes = plan_sizes(config);
  choice.kernel.kv_fits_l2 =
      sizes.ok() && limits.max_total_kv_tokens <= kHopperL2Bytes &&
      limits.max_total_kv_tokens * width * 2 + sizes->partial_rows * DecodeWorkspace::row_bytes(problem.latent) <=
          kHopperL2Bytes;
  choice.reason = std::to_string(request_rows) + " rows a request (" + std::to_string(problem.heads) + " heads x " +
                  std::to_string(limits.max_query_tokens) + " query tokens) in tiles of " + std::to_string(tile_rows) +
                  (pair ? ": pairs of thread blocks, " : ": one thread block, ") +
                  (&body == &kPlain ? "64 rows each on the wide side of the matrix instruction"
                                    : "up to " + std::to_string(body.rows) + " rows each, operands swapped");
  return choice;
}

}  // namespace latte::cuda
