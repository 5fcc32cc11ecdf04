// A call of decode or prefill: every worker walks its records of the plan, and then those that others have not begun;
// whoever finishes a tile's last piece joins its partials, in the plan's order.
//
// Op supplies
//   call           with `kernel`, `plan`, `out` and `workspace`
//   map, shape     RowMap and Shape of the call
//   piece(record)  the record resolved, without scratch and partials
#pragma once

#include <atomic>
#include <cstring>

#include "cpu/kernel.hpp"

namespace latte::cpu {

// How the workspace of a call is divided.
struct CallMemory {
  std::int32_t* arrived;  // [tiles]: pieces of the tile that are done
  std::int32_t* begun;    // [workers]: records of the worker's share that somebody has begun, or more
  double* partial_lse;
  float* partial_out;
  std::byte* scratch;
  std::size_t scratch_bytes;

  CallMemory(Carver& carver, std::int64_t tiles, std::int64_t partial_rows, std::int32_t v_width, std::int32_t workers,
             std::size_t bytes_per_worker)
      : scratch_bytes(bytes_per_worker) {
    arrived = carver.take<std::int32_t>(tiles);
    begun = carver.take<std::int32_t>(workers);
    partial_lse = carver.take<double>(partial_rows);
    partial_out = carver.take<float>(partial_rows * v_width);
    scratch = carver.take<std::byte>(static_cast<std::int64_t>(bytes_per_worker) * workers);
  }
};

// The bytes of it under a configuration's limits.
inline std::size_t workspace_bytes(const Kernel& kernel, const Shape& shape, const PlanConfig& config,
                                   const PlanSizes& sizes) {
  Carver carver;
  CallMemory(carver, sizes.tiles, sizes.partial_rows, shape.v_width, config.workers, kernel.scratch_bytes(shape));
  return carver.used();
}

// The partials of one row of a tile, in the plan's order.
struct TilePartials {
  const CallMemory& workspace;
  const std::int32_t* first_rows;  // reduce_partial_map of the tile
  std::int32_t row;                // within the tile
  std::int32_t v_width;

  static double lse(const void* context, std::int32_t k) {
    const auto& p = *static_cast<const TilePartials*>(context);
    return p.workspace.partial_lse[p.first_rows[k] + p.row];
  }
  static MergeRow::Values values(const void* context, std::int32_t k) {
    const auto& p = *static_cast<const TilePartials*>(context);
    const std::int64_t row = p.first_rows[k] + p.row;
    return {reinterpret_cast<const std::byte*>(p.workspace.partial_out + row * p.v_width), Dtype::f32};
  }
};

template <class Op>
class Walk {
 public:
  explicit Walk(const Op& op) : op_(op), plan_(*op.call.plan), workspace_(divide()) {
    std::memset(workspace_.arrived, 0, plan_.reduce_final_map.size() * sizeof(std::int32_t));
    std::memset(workspace_.begun, 0, static_cast<std::size_t>(plan_.workers()) * sizeof(std::int32_t));
  }

  void run(Workers& workers) { workers.run(plan_.workers(), run_worker, this); }

 private:
  CallMemory divide() const {
    Carver carver(op_.call.workspace);
    return {carver,
            static_cast<std::int64_t>(plan_.reduce_final_map.size()),
            plan_.partial_rows(),
            op_.shape.v_width,
            plan_.workers(),
            op_.call.kernel->scratch_bytes(op_.shape)};
  }

  static void run_worker(void* opaque, std::int32_t worker) {
    const Walk& walk = *static_cast<const Walk*>(opaque);
    const std::int32_t workers = walk.plan_.workers();
    std::byte* scratch = walk.workspace_.scratch + static_cast<std::size_t>(worker) * walk.workspace_.scratch_bytes;
    walk.op_.call.kernel->enter();
    for (std::int32_t i = 0; i < workers; ++i)
      walk.run_share(static_cast<std::size_t>((worker + i) % workers), scratch);
    walk.op_.call.kernel->leave();
  }

  // What is left of a worker's share. A processor that something else needs too may be slower than the plan thinks.
  void run_share(std::size_t owner, std::byte* scratch) const {
    const std::int32_t first = plan_.work_indptr[owner], count = plan_.work_indptr[owner + 1] - first;
    std::atomic_ref begun(workspace_.begun[owner]);
    while (begun.load(std::memory_order_relaxed) < count) {
      const std::int32_t next = begun.fetch_add(1, std::memory_order_relaxed);
      if (next < count) run_record(plan_.work_info_set[static_cast<std::size_t>(first + next)], scratch);
    }
  }

  void run_record(const WorkRecord& record, std::byte* scratch) const {
    Piece piece = op_.piece(record);
    piece.scratch = scratch;
    piece.partial_out = workspace_.partial_out;
    piece.partial_lse = workspace_.partial_lse;
    op_.call.kernel->run(piece);
    if (record.partial_row < 0) return;
    // Release our partial, acquire everybody else's.
    const auto t = static_cast<std::size_t>(record.tile);
    const std::int32_t pieces = plan_.reduce_indptr[t + 1] - plan_.reduce_indptr[t];
    if (std::atomic_ref(workspace_.arrived[t]).fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) merge_tile(t);
  }

  void merge_tile(std::size_t tile) const {
    const RowRange rows = plan_.reduce_final_map[tile];
    const std::int32_t first = plan_.reduce_indptr[tile], count = plan_.reduce_indptr[tile + 1] - first;
    for (std::int32_t row = rows.begin; row < rows.end; ++row) {
      const TilePartials partials{workspace_, plan_.reduce_partial_map.data() + first, row - rows.begin,
                                  op_.shape.v_width};
      const std::int64_t token = op_.map.token(row), head = op_.map.head(row);
      op_.call.kernel->merge_row({
          .context = &partials,
          .lse = TilePartials::lse,
          .values = TilePartials::values,
          .count = count,
          .width = op_.shape.v_width,
          .out = op_.call.out.row(token, head),
          .out_dtype = op_.call.out.dtype,
          .lse_out = op_.call.out.lse_at(token, head),
      });
    }
  }

  const Op op_;
  const Plan& plan_;
  const CallMemory workspace_;
};

}  // namespace latte::cpu
