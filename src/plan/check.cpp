// A plan against its batch, in full and without trust: for tests, for fuzzing and for plans made elsewhere.
#include <algorithm>
#include <string>
#include <vector>

#include "core/checked.hpp"
#include "core/within_memory.hpp"
#include "plan/layout.hpp"

namespace latte {
namespace {

Status corrupt(std::string field, std::string expected, std::int64_t got) {
  return {Code::corrupt_plan, std::move(field), std::move(expected), std::to_string(got)};
}

std::string at(const char* name, std::size_t index, const char* member = "") {
  return std::string(name) + "[" + std::to_string(index) + "]" + member;
}

// Counts in work_meta_data against the arrays, and both CSR pointers: from 0, never falling, to the end.
Status check_shape(const PlanConfig& config, const StepLengths& lengths, const Plan& plan, std::size_t tiles) {
  if (plan.work_meta_data.size() != kMetaFields)
    return corrupt("work_meta_data", std::to_string(kMetaFields) + " fields",
                   static_cast<std::int64_t>(plan.work_meta_data.size()));
  const std::pair<MetaField, std::int64_t> fields[] = {
      {kMetaVersion, kPlanVersion},
      {kMetaWorkers, plan::worker_count(config)},
      {kMetaRequests, static_cast<std::int64_t>(lengths.seq_lens.size())},
      {kMetaRecords, static_cast<std::int64_t>(plan.work_info_set.size())},
      {kMetaTiles, static_cast<std::int64_t>(tiles)},
      {kMetaPartials, static_cast<std::int64_t>(plan.reduce_partial_map.size())},
      {kMetaHeads, config.heads},
      {kMetaRowTile, config.row_tile},
      {kMetaKvBlock, config.kv_block},
  };
  for (const auto& [field, expected] : fields)
    if (plan.work_meta_data[field] != expected)
      return corrupt(at("work_meta_data", field), std::to_string(expected), plan.work_meta_data[field]);
  if (plan.reduce_final_map.size() != tiles)
    return corrupt("reduce_final_map", std::to_string(tiles), static_cast<std::int64_t>(plan.reduce_final_map.size()));

  const auto check_csr = [](const char* name, std::span<const std::int32_t> csr, std::size_t rows, std::size_t last) {
    if (csr.size() != rows + 1)
      return corrupt(name, std::to_string(rows + 1) + " entries", static_cast<std::int64_t>(csr.size()));
    if (csr.front() != 0) return corrupt(at(name, 0), "0", csr.front());
    for (std::size_t i = 0; i < rows; ++i)
      if (csr[i + 1] < csr[i]) return corrupt(at(name, i + 1), ">= " + std::to_string(csr[i]), csr[i + 1]);
    if (csr.back() != static_cast<std::int64_t>(last)) return corrupt(at(name, rows), std::to_string(last), csr.back());
    return Status{};
  };
  if (Status status = check_csr("work_indptr", plan.work_indptr, static_cast<std::size_t>(plan::worker_count(config)),
                                plan.work_info_set.size());
      !status.ok())
    return status;
  return check_csr("reduce_indptr", plan.reduce_indptr, tiles, plan.reduce_partial_map.size());
}

// Pieces of one tile in KV order: they must tile [0, extent) exactly, on block borders, and own the tile's partials.
Status check_tile(const PlanConfig& config, const StepLengths& lengths, const Plan& plan, const plan::Tile& tile,
                  std::size_t index, std::span<const WorkRecord*> pieces, std::int64_t& next_partial_row) {
  if (plan.reduce_final_map[index] != RowRange{tile.row_begin, tile.row_end})
    return corrupt(at("reduce_final_map", index), "rows from " + std::to_string(tile.row_begin),
                   plan.reduce_final_map[index].begin);
  const std::int32_t first_partial = plan.reduce_indptr[index];
  const std::int32_t partials = plan.reduce_indptr[index + 1] - first_partial;
  const bool split = pieces.size() > 1;
  if (pieces.empty()) return corrupt(at("tile", index), "at least one record", 0);
  if (partials != (split ? static_cast<std::int64_t>(pieces.size()) : 0))
    return corrupt(at("reduce_indptr", index + 1), "a step of " + std::to_string(split ? pieces.size() : 0), partials);

  std::sort(pieces.begin(), pieces.end(),
            [](const WorkRecord* a, const WorkRecord* b) { return a->kv_begin < b->kv_begin; });
  std::int32_t covered = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const WorkRecord& r = *pieces[i];
    const auto record = static_cast<std::size_t>(pieces[i] - plan.work_info_set.data());
    if (r.request != tile.request)
      return corrupt(at("work_info_set", record, ".request"), std::to_string(tile.request), r.request);
    if (r.row_begin != tile.row_begin)
      return corrupt(at("work_info_set", record, ".row_begin"), std::to_string(tile.row_begin), r.row_begin);
    if (r.row_end != tile.row_end)
      return corrupt(at("work_info_set", record, ".row_end"), std::to_string(tile.row_end), r.row_end);
    if (r.kv_begin != covered)
      return corrupt(at("work_info_set", record, ".kv_begin"), std::to_string(covered), r.kv_begin);
    if (r.kv_end < r.kv_begin || r.kv_end > tile.kv_extent || (split && r.kv_end == r.kv_begin))
      return corrupt(at("work_info_set", record, ".kv_end"), "up to " + std::to_string(tile.kv_extent), r.kv_end);
    if (r.kv_end != tile.kv_extent && r.kv_end % config.kv_block != 0)
      return corrupt(at("work_info_set", record, ".kv_end"), "a multiple of kv_block", r.kv_end);
    const std::int32_t after = lengths.seq_lens[static_cast<std::size_t>(r.request)] - r.kv_end;
    if (r.kv_after != after)
      return corrupt(at("work_info_set", record, ".kv_after"), std::to_string(after), r.kv_after);
    const std::int64_t partial_row = split ? next_partial_row : -1;
    if (r.partial_row != partial_row)
      return corrupt(at("work_info_set", record, ".partial_row"), std::to_string(partial_row), r.partial_row);
    if (split) {
      const std::size_t p = static_cast<std::size_t>(first_partial) + i;
      if (plan.reduce_partial_map[p] != partial_row)
        return corrupt(at("reduce_partial_map", p), std::to_string(partial_row), plan.reduce_partial_map[p]);
      next_partial_row += tile.rows();
    }
    covered = r.kv_end;
  }
  if (covered != tile.kv_extent)
    return corrupt(at("tile", index), std::to_string(tile.kv_extent) + " tokens covered", covered);
  return {};
}

}  // namespace

Status check_plan(const PlanConfig& config, const StepLengths& lengths, const Plan& plan) {
  return within_memory([&]() -> Status {
    const Result<PlanSizes> sizes = plan_sizes(config);
    if (!sizes.ok()) return sizes.status();
    if (Status status = plan::check_lengths(config, lengths); !status.ok()) return status;
    std::vector<plan::Tile> tiles(static_cast<std::size_t>(sizes->tiles));
    std::int64_t line_ticks = 0;
    tiles.resize(static_cast<std::size_t>(plan::make_tiles(config, lengths, tiles, line_ticks)));
    if (Status status = check_shape(config, lengths, plan, tiles.size()); !status.ok()) return status;

    // Records grouped by tile.
    std::vector<const WorkRecord*> records;
    for (const WorkRecord& record : plan.work_info_set) {
      if (record.tile < 0 || static_cast<std::size_t>(record.tile) >= tiles.size())
        return corrupt("work_info_set.tile", "below " + std::to_string(tiles.size()), record.tile);
      records.push_back(&record);
    }
    std::sort(records.begin(), records.end(),
              [](const WorkRecord* a, const WorkRecord* b) { return a->tile < b->tile; });
    std::int64_t partial_rows = 0, split_tiles = 0;
    auto first = records.begin();
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      const auto last = std::find_if(first, records.end(),
                                     [&](const WorkRecord* r) { return r->tile != static_cast<std::int32_t>(t); });
      if (Status status = check_tile(config, lengths, plan, tiles[t], t, {first, last}, partial_rows); !status.ok())
        return status;
      split_tiles += last - first > 1;
      first = last;
    }
    if (plan.work_meta_data[kMetaPartialRows] != partial_rows)
      return corrupt(at("work_meta_data", kMetaPartialRows), std::to_string(partial_rows), plan.partial_rows());
    if (plan.work_meta_data[kMetaSplitTiles] != split_tiles)
      return corrupt(at("work_meta_data", kMetaSplitTiles), std::to_string(split_tiles),
                     plan.work_meta_data[kMetaSplitTiles]);
    const auto records_made = static_cast<std::int64_t>(plan.work_info_set.size());
    const auto partials_made = static_cast<std::int64_t>(plan.reduce_partial_map.size());
    if (records_made > sizes->records)
      return corrupt("work_info_set", "at most " + std::to_string(sizes->records), records_made);
    if (partials_made > sizes->partials)
      return corrupt("reduce_partial_map", "at most " + std::to_string(sizes->partials), partials_made);
    if (partial_rows > sizes->partial_rows)
      return corrupt(at("work_meta_data", kMetaPartialRows), "at most " + std::to_string(sizes->partial_rows),
                     partial_rows);
    // Equal pieces are counted with the others at rest, so there must be no second one behind any.
    if (const std::int32_t splits = plan.work_meta_data[kMetaSplits]; splits < 0) {
      if (config.op != Op::decode || config.policy.kind != PolicyKind::balanced)
        return corrupt(at("work_meta_data", kMetaSplits), "0 or more", splits);
      for (std::size_t w = 0; w + 1 < plan.work_indptr.size(); ++w)
        if (plan.work_indptr[w + 1] - plan.work_indptr[w] > 1)
          return corrupt(at("work_meta_data", kMetaSplits), "0 or more where a worker has several records", splits);
    }
    if (plan.makespan_ticks() != makespan_ticks(config, plan))
      return corrupt(at("work_meta_data", kMetaMakespanLow), std::to_string(makespan_ticks(config, plan)),
                     plan.makespan_ticks());
    return {};
  });
}

}  // namespace latte
