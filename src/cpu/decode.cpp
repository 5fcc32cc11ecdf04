// One decode call: every worker walks its records of the plan; whoever finishes a tile's last piece joins its partials.
#include <atomic>
#include <cstring>

#include "cpu/kernel.hpp"

namespace latte::cpu {
namespace {

// How the workspace is divided. Counters first, so that their place does not depend on anything else.
struct Workspace {
  std::int32_t* arrived;  // [tiles]: pieces of the tile that are done
  float* partial_lse;
  float* partial_out;
  std::byte* scratch;
  std::size_t scratch_bytes;

  Workspace(Carver& carver, std::int64_t tiles, std::int64_t partial_rows, std::int32_t latent, std::int32_t workers,
            std::size_t bytes_per_worker)
      : scratch_bytes(bytes_per_worker) {
    arrived = carver.take<std::int32_t>(tiles);
    partial_lse = carver.take<float>(partial_rows);
    partial_out = carver.take<float>(partial_rows * latent);
    scratch = carver.take<std::byte>(static_cast<std::int64_t>(bytes_per_worker) * workers);
  }
};

struct Context {
  const DecodeCall& call;
  const Workspace& workspace;
};

// The partials of one row of a tile, in the plan's order.
struct TilePartials {
  const Workspace& workspace;
  const std::int32_t* first_rows;  // reduce_partial_map of the tile
  std::int32_t row;                // within the tile
  std::int32_t latent;

  static float lse(const void* context, std::int32_t k) {
    const auto& p = *static_cast<const TilePartials*>(context);
    return p.workspace.partial_lse[p.first_rows[k] + p.row];
  }
  static MergeRow::Values values(const void* context, std::int32_t k) {
    const auto& p = *static_cast<const TilePartials*>(context);
    const std::int64_t row = p.first_rows[k] + p.row;
    return {reinterpret_cast<const std::byte*>(p.workspace.partial_out + row * p.latent), Dtype::f32};
  }
};

void merge_tile(const Context& context, std::int32_t tile) {
  const DecodeCall& call = context.call;
  const Plan& plan = *call.plan;
  const auto t = static_cast<std::size_t>(tile);
  const RowRange rows = plan.reduce_final_map[t];
  const std::int32_t first = plan.reduce_indptr[t], count = plan.reduce_indptr[t + 1] - first;
  for (std::int32_t row = rows.begin; row < rows.end; ++row) {
    const TilePartials partials{context.workspace, plan.reduce_partial_map.data() + first, row - rows.begin,
                                call.latent};
    const std::int64_t token = row / call.heads, head = row % call.heads;
    call.kernel->merge_row({
        .context = &partials,
        .lse = TilePartials::lse,
        .values = TilePartials::values,
        .count = count,
        .latent = call.latent,
        .out = call.out.row(token, head),
        .out_dtype = call.out.dtype,
        .lse_out = call.out.lse_at(token, head),
    });
  }
}

void run_worker(void* opaque, std::int32_t worker) {
  const auto& context = *static_cast<const Context*>(opaque);
  const DecodeCall& call = context.call;
  const Plan& plan = *call.plan;
  const Workspace& workspace = context.workspace;
  const auto w = static_cast<std::size_t>(worker);

  call.kernel->enter();
  for (std::int32_t i = plan.work_indptr[w]; i < plan.work_indptr[w + 1]; ++i) {
    const WorkRecord& record = plan.work_info_set[static_cast<std::size_t>(i)];
    call.kernel->run({.call = call,
                      .record = record,
                      .scratch = workspace.scratch + w * workspace.scratch_bytes,
                      .partial_out = workspace.partial_out,
                      .partial_lse = workspace.partial_lse});
    if (record.partial_row < 0) continue;
    // Release our partial, acquire everybody else's.
    const auto t = static_cast<std::size_t>(record.tile);
    const std::int32_t pieces = plan.reduce_indptr[t + 1] - plan.reduce_indptr[t];
    if (std::atomic_ref(workspace.arrived[t]).fetch_add(1, std::memory_order_acq_rel) + 1 == pieces)
      merge_tile(context, record.tile);
  }
  call.kernel->leave();
}

Shape shape_of(const DecodeCall& call) {
  return {.row_tile = call.plan->work_meta_data[kMetaRowTile],
          .latent = call.latent,
          .rope = call.rope,
          .format = call.kv.format};
}

}  // namespace

std::size_t workspace_bytes(const Kernel& kernel, const DecodeProblem& problem, const PlanConfig& config,
                            const PlanSizes& sizes) {
  Carver carver;
  const Shape shape{
      .row_tile = config.row_tile, .latent = problem.latent, .rope = problem.rope, .format = problem.kv_format};
  Workspace(carver, sizes.tiles, sizes.partial_rows, problem.latent, config.workers, kernel.scratch_bytes(shape));
  return carver.used();
}

void run_decode(Workers& workers, const DecodeCall& call) {
  const Plan& plan = *call.plan;
  const auto tiles = static_cast<std::int64_t>(plan.reduce_final_map.size());
  Carver carver(call.workspace);
  const Workspace workspace(carver, tiles, plan.partial_rows(), call.latent, plan.workers(),
                            call.kernel->scratch_bytes(shape_of(call)));
  std::memset(workspace.arrived, 0, static_cast<std::size_t>(tiles) * sizeof(std::int32_t));
  Context context{call, workspace};
  workers.run(plan.workers(), run_worker, &context);
}

}  // namespace latte::cpu
