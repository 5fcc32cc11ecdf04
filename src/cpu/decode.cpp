// One decode call: a row is a token and a head, keys lie in pages, values are the front of the keys.
#include "cpu/walk.hpp"

namespace latte::cpu {
namespace {

Shape shape_of(std::int32_t latent, std::int32_t rope, KvFormat format, std::int32_t row_tile) {
  return {.row_tile = row_tile, .width = latent + rope, .v_width = latent, .format = format, .values_in_keys = true};
}

struct DecodeOp {
  const DecodeCall& call;
  const RowMap map{.inner = call.heads, .head_major = false};
  const Shape shape = shape_of(call.latent, call.rope, call.kv.format, call.plan->work_meta_data[kMetaRowTile]);

  Piece piece(const WorkRecord& record) const {
    const auto request = static_cast<std::size_t>(record.request);
    const TokenReader reader(call.kv, record.request);
    return {.record = record,
            .map = map,
            .shape = shape,
            .q = call.q,
            .keys = reader,
            .values = reader,
            .score_scale = call.score_scale,
            .value_scale = call.value_scale,
            .bounds = call.lengths.visible.empty() ? nullptr : call.lengths.visible.data(),
            .mask = call.mask,
            .kv_tokens = call.lengths.seq_lens[request],
            .query_end = call.lengths.query_start[request + 1],
            .out = call.out};
  }
};

}  // namespace

std::size_t workspace_bytes(const Kernel& kernel, const DecodeProblem& problem, const PlanConfig& config,
                            const PlanSizes& sizes) {
  return workspace_bytes(kernel, shape_of(problem.latent, problem.rope, problem.kv_format, config.row_tile), config,
                         sizes);
}

void run_decode(Workers& workers, const DecodeCall& call) { Walk(DecodeOp{call}).run(workers); }

}  // namespace latte::cpu
