#include <algorithm>
#include <string>

#include "plan/layout.hpp"

namespace latte::plan {
namespace {

Status bad(Code code, std::string field, std::string expected, std::int64_t got) {
  return {code, std::move(field), std::move(expected), std::to_string(got)};
}

std::string at(const char* name, std::size_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

// The largest number of tokens any row of the tile sees. Causal bounds grow with the token, so the last one decides.
std::int32_t tile_extent(const StepLengths& lengths, Mask mask, std::int32_t request, std::int32_t first_token,
                         std::int32_t last_token) {
  if (lengths.visible.empty()) return visible_tokens(lengths, mask, request, last_token);
  std::int32_t extent = 0;
  for (std::int32_t token = first_token; token <= last_token; ++token)
    extent = std::max(extent, visible_tokens(lengths, mask, request, token));
  return extent;
}

// prefill: requests by index, query tokens ascending, heads ascending.
template <class Fn>
void for_each_prefill_tile(const PlanConfig& config, const StepLengths& lengths, const Fn& fn) {
  const std::int32_t step_tokens = lengths.query_start.back();
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(lengths.seq_lens.size()); ++b) {
    const std::int32_t query_end = lengths.query_start[static_cast<std::size_t>(b) + 1];
    for (std::int32_t token = lengths.query_start[static_cast<std::size_t>(b)]; token < query_end;) {
      const std::int32_t rows = std::min(config.row_tile, query_end - token);
      Tile tile{.request = b};
      tile.kv_extent = tile_extent(lengths, config.mask, b, token, token + rows - 1);
      tile.blocks = blocks_for(tile.kv_extent, config.kv_block);
      for (std::int32_t head = 0; head < config.heads; ++head) {
        tile.row_begin = head * step_tokens + token, tile.row_end = tile.row_begin + rows;
        fn(tile);
      }
      token += rows;
    }
  }
}

// Calls fn(tile) for every tile, in order: requests by index, rows by index.
template <class Fn>
void for_each_tile(const PlanConfig& config, const StepLengths& lengths, const Fn& fn) {
  if (config.op == Op::prefill) return for_each_prefill_tile(config, lengths, fn);
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(lengths.seq_lens.size()); ++b) {
    const std::int32_t row_end = lengths.query_start[static_cast<std::size_t>(b) + 1] * config.heads;
    for (std::int32_t row = lengths.query_start[static_cast<std::size_t>(b)] * config.heads; row < row_end;) {
      const std::int32_t rows = std::min(config.row_tile, row_end - row);
      Tile tile{.request = b, .row_begin = row, .row_end = row + rows};
      tile.kv_extent = tile_extent(lengths, config.mask, b, row / config.heads, (row + rows - 1) / config.heads);
      tile.blocks = blocks_for(tile.kv_extent, config.kv_block);
      fn(tile);
      row += rows;
    }
  }
}

}  // namespace

Status check_lengths(const Limits& given, std::int32_t heads, const StepLengths& lengths) {
  const Limits limits = resolve(given);
  const std::size_t requests = lengths.seq_lens.size();
  if (requests > static_cast<std::size_t>(limits.max_requests))
    return bad(Code::out_of_limits, "seq_lens", "at most " + std::to_string(limits.max_requests) + " requests",
               static_cast<std::int64_t>(requests));
  if (lengths.query_start.size() != requests + 1)
    return bad(Code::invalid_argument, "query_start", std::to_string(requests + 1) + " entries",
               static_cast<std::int64_t>(lengths.query_start.size()));
  if (lengths.query_start[0] != 0) return bad(Code::invalid_argument, "query_start[0]", "0", lengths.query_start[0]);

  std::int64_t total_kv = 0;
  for (std::size_t b = 0; b < requests; ++b) {
    const std::int32_t seq_len = lengths.seq_lens[b];
    const std::int64_t queries = static_cast<std::int64_t>(lengths.query_start[b + 1]) - lengths.query_start[b];
    if (seq_len < 0) return bad(Code::invalid_argument, at("seq_lens", b), ">= 0", seq_len);
    if (seq_len > limits.max_kv_tokens)
      return bad(Code::out_of_limits, at("seq_lens", b), "at most " + std::to_string(limits.max_kv_tokens), seq_len);
    if (queries < 0)
      return bad(Code::invalid_argument, at("query_start", b + 1), ">= " + std::to_string(lengths.query_start[b]),
                 lengths.query_start[b + 1]);
    if (queries > limits.max_query_tokens)
      return bad(Code::out_of_limits, at("query_start", b + 1),
                 "at most " + std::to_string(limits.max_query_tokens) + " query tokens a request", queries);
    total_kv += seq_len;
  }
  const std::int32_t total_query = lengths.query_start[requests];
  if (total_query > limits.max_total_query_tokens)
    return bad(Code::out_of_limits, "query_start",
               "at most " + std::to_string(limits.max_total_query_tokens) + " query tokens in all", total_query);
  if (total_kv > limits.max_total_kv_tokens)
    return bad(Code::out_of_limits, "seq_lens",
               "at most " + std::to_string(limits.max_total_kv_tokens) + " KV tokens in all", total_kv);
  if (static_cast<std::int64_t>(total_query) * heads > INT32_MAX)
    return bad(Code::out_of_limits, "query_start", "tokens * heads below 2^31", total_query);

  if (lengths.visible.empty()) return {};
  if (lengths.visible.size() != static_cast<std::size_t>(total_query))
    return bad(Code::invalid_argument, "visible", std::to_string(total_query) + " entries",
               static_cast<std::int64_t>(lengths.visible.size()));
  for (std::size_t b = 0; b < requests; ++b)
    for (std::int32_t token = lengths.query_start[b]; token < lengths.query_start[b + 1]; ++token) {
      const auto t = static_cast<std::size_t>(token);
      if (lengths.visible[t] < 0 || lengths.visible[t] > lengths.seq_lens[b])
        return bad(Code::invalid_argument, at("visible", t), "0 .. " + std::to_string(lengths.seq_lens[b]),
                   lengths.visible[t]);
    }
  return {};
}

Status check_lengths(const PlanConfig& config, const StepLengths& lengths) {
  if (config.op == Op::prefill && !lengths.visible.empty())
    return bad(Code::invalid_argument, "visible", "none in prefill", static_cast<std::int64_t>(lengths.visible.size()));
  return check_lengths(config.limits, config.heads, lengths);
}

std::int32_t make_tiles(const PlanConfig& config, const StepLengths& lengths, std::span<Tile> tiles,
                        std::int64_t& line_ticks) {
  std::int32_t count = 0;
  line_ticks = 0;
  for_each_tile(config, lengths, [&](Tile tile) {
    tile.line_begin = line_ticks;
    line_ticks += config.cost.piece_ticks + tile.blocks * config.cost.block(tile.rows());
    tiles[static_cast<std::size_t>(count++)] = tile;
  });
  return count;
}

}  // namespace latte::plan

namespace latte {

Result<std::int64_t> unsplit_ticks(const PlanConfig& config, const StepLengths& lengths) {
  // A tile of no rows would never reach a request's last one.
  if (const Result<PlanSizes> sizes = plan_sizes(config); !sizes.ok()) return sizes.status();
  if (Status status = plan::check_lengths(config, lengths); !status.ok()) return status;
  std::int64_t total = 0;
  plan::for_each_tile(config, lengths, [&](const plan::Tile& tile) {
    total += config.cost.piece_ticks + tile.blocks * config.cost.block(tile.rows());
  });
  return total;
}

}  // namespace latte
