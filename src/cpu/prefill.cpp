// One prefill call: a tile is some tokens of one head, and that head's keys and values are tensors of their own.
#include "cpu/walk.hpp"

namespace latte::cpu {
namespace {

struct PrefillOp {
  const PrefillCall& call;
  const RowMap map{.inner = call.query_start.back(), .head_major = true};
  const Shape shape{.row_tile = call.plan->work_meta_data[kMetaRowTile],
                    .width = call.qk_width,
                    .v_width = call.v_width,
                    .format = format_of(call.q.dtype),
                    .values_in_keys = false};

  Piece piece(const WorkRecord& record) const {
    const auto request = static_cast<std::size_t>(record.request);
    const std::int32_t head = map.head(record.row_begin), first = call.kv_start[request];
    return {.record = record,
            .map = map,
            .shape = shape,
            .q = call.q,
            .keys = TokenReader(call.k, first, head),
            .values = TokenReader(call.v, first, head),
            .score_scale = call.scale * call.q_scale.at(head) * call.k_scale.at(head),
            .value_scale = call.v_scale.at(head),
            .bounds = nullptr,
            .mask = call.mask,
            .kv_tokens = call.kv_start[request + 1] - first,
            .query_end = call.query_start[request + 1],
            .out = call.out};
  }
};

}  // namespace

KvFormat format_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return KvFormat::f32;
    case Dtype::f16: return KvFormat::f16;
    case Dtype::fp8_e4m3: return KvFormat::fp8_e4m3;
    case Dtype::bf16:
    case Dtype::u8: break;
  }
  return KvFormat::bf16;
}

std::size_t workspace_bytes(const Kernel& kernel, const PrefillProblem& problem, const PlanConfig& config,
                            const PlanSizes& sizes) {
  const Shape shape{.row_tile = config.row_tile,
                    .width = problem.qk_width,
                    .v_width = problem.v_width,
                    .format = format_of(problem.dtype),
                    .values_in_keys = false};
  return workspace_bytes(kernel, shape, config, sizes);
}

void run_prefill(Workers& workers, const PrefillCall& call) { Walk(PrefillOp{call}).run(workers); }

}  // namespace latte::cpu
