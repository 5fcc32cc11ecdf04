// A plan out of a buffer of words that something else filled.
#include <string>

#include "latte/plan.hpp"

namespace latte {
namespace {

constexpr std::int64_t kRecordWords = sizeof(WorkRecord) / sizeof(std::int32_t);

Status corrupt(const char* field, std::string expected, std::int64_t got) {
  return {Code::corrupt_plan, field, std::move(expected), std::to_string(got)};
}

}  // namespace

Result<Plan> view_plan(std::span<const std::int32_t> words) {
  const auto size = static_cast<std::int64_t>(words.size());
  if (size < kMetaFields) return corrupt("words", "at least " + std::to_string(kMetaFields), size);
  const std::span<const std::int32_t> meta = words.first(kMetaFields);
  if (meta[kMetaVersion] != kPlanVersion)
    return corrupt("work_meta_data", "version " + std::to_string(kPlanVersion), meta[kMetaVersion]);
  for (MetaField count : {kMetaWorkers, kMetaRecords, kMetaTiles, kMetaPartials})
    if (meta[static_cast<std::size_t>(count)] < 0)
      return corrupt("work_meta_data", "counts >= 0", meta[static_cast<std::size_t>(count)]);

  Status status;
  const auto part = [&](MetaField offset_field, std::int64_t count, const char* field) -> const std::int32_t* {
    const std::int64_t offset = meta[static_cast<std::size_t>(offset_field)];
    if (offset < kMetaFields || offset + count > size)
      status = corrupt(field, "an offset within the " + std::to_string(size) + " words", offset);
    return words.data() + offset;
  };
  const std::int64_t records = meta[kMetaRecords], tiles = meta[kMetaTiles], partials = meta[kMetaPartials];
  const std::int64_t workers = meta[kMetaWorkers];
  const auto* indptr = part(kMetaOffsetIndptr, workers + 1, "work_indptr");
  const auto* info_set = part(kMetaOffsetRecords, records * kRecordWords, "work_info_set");
  const auto* reduce_indptr = part(kMetaOffsetReduceIndptr, tiles + 1, "reduce_indptr");
  const auto* reduce_final = part(kMetaOffsetReduceFinal, 2 * tiles, "reduce_final_map");
  const auto* reduce_partial = part(kMetaOffsetReducePartial, partials, "reduce_partial_map");
  if (!status.ok()) return status;
  return Plan{.work_meta_data = meta,
              .work_indptr = {indptr, static_cast<std::size_t>(workers + 1)},
              .work_info_set = {reinterpret_cast<const WorkRecord*>(info_set), static_cast<std::size_t>(records)},
              .reduce_indptr = {reduce_indptr, static_cast<std::size_t>(tiles + 1)},
              .reduce_final_map = {reinterpret_cast<const RowRange*>(reduce_final), static_cast<std::size_t>(tiles)},
              .reduce_partial_map = {reduce_partial, static_cast<std::size_t>(partials)}};
}

}  // namespace latte
