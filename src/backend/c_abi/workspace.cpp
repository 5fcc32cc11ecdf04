#include <memory>
#include <utility>
#include <vector>

#include "backend/c_abi/c_abi.hpp"

namespace latte::c_abi {
namespace {

static_assert(sizeof(latte_workspace_need) == sizeof(void*) + 24, "lies in arrays");

Status need_workspace(const latte_workspace* workspace) {
  return workspace != nullptr ? Status() : backend::missing("workspace", "a workspace", "null");
}

}  // namespace
}  // namespace latte::c_abi

using namespace latte;
using namespace latte::c_abi;

extern "C" {

latte_code latte_workspace_create(const latte_backend* backend, const latte_workspace_need* needs, int32_t need_count,
                                  int32_t checks, latte_workspace** workspace, latte_error* error) {
  return guarded(error, [&]() -> Status {
    if (workspace == nullptr) return backend::missing("workspace", "where to put the handle", "null");
    *workspace = nullptr;
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    std::span<const latte_workspace_need> given;
    LATTE_RETURN_IF_ERROR(read_span(needs, need_count, "needs", given));
    WorkspaceOptions options;
    LATTE_RETURN_IF_ERROR(read_enum(checks, WorkspaceChecks::off, "checks", options.checks));
    std::vector<WorkspaceNeed> list;
    for (const latte_workspace_need& need : given) {
      WorkspaceNeed& entry = list.emplace_back();
      if (need.name != nullptr) entry.name = need.name;
      entry.bytes = static_cast<std::size_t>(need.bytes);
      if (need.alignment != 0) entry.alignment = static_cast<std::size_t>(need.alignment);
      if (need.phases != 0) entry.phases = need.phases;
    }
    auto created = Workspace::create(backend->backend, list, options);
    if (!created.ok()) return created.status();
    *workspace = std::make_unique<latte_workspace>(latte_workspace{std::move(*created)}).release();
    return {};
  });
}

latte_code latte_workspace_destroy(latte_workspace* workspace, latte_error* error) {
  return destroy_handle(workspace, error);
}

latte_code latte_workspace_take(latte_workspace* workspace, int32_t need, latte_workspace_slice* slice,
                                latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_workspace(workspace));
    LATTE_RETURN_IF_ERROR(check_struct(slice, "slice", sizeof(latte_workspace_slice)));
    const auto taken = workspace->workspace.take(need);
    if (!taken.ok()) return taken.status();
    write_struct({.size = 0,
                  .need = taken->need,
                  .data = taken->bytes.data(),
                  .bytes = taken->bytes.size(),
                  .generation = taken->generation},
                 slice);
    return {};
  });
}

latte_code latte_workspace_give_back(latte_workspace* workspace, const latte_workspace_slice* slice,
                                     latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_workspace(workspace));
    latte_workspace_slice full = LATTE_WORKSPACE_SLICE_INIT;
    LATTE_RETURN_IF_ERROR(read_struct(slice, "slice", sizeof(latte_workspace_slice), full));
    return workspace->workspace.give_back(
        {.bytes = {static_cast<std::byte*>(full.data), static_cast<std::size_t>(full.bytes)},
         .need = full.need,
         .generation = full.generation});
  });
}

latte_code latte_workspace_check(const latte_workspace* workspace, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_workspace(workspace));
    return workspace->workspace.check();
  });
}

}  // extern "C"
