#include "latte/ops.hpp"

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "backend/validate/validate.hpp"
#include "core/within_memory.hpp"

namespace latte {

Status merge(const Backend& backend, const MergeArgs& args) {
  return within_memory([&]() -> Status {
    const backend::Place place = backend.impl().place();
    LATTE_RETURN_IF_ERROR(backend::validate_stream(place, args.stream));
    LATTE_RETURN_IF_ERROR(backend::validate_merge_args(args, place));
    if (args.out.shape[0] == 0) return {};
    return backend.impl().merge(args);
  });
}

Status write_kv(const Backend& backend, const WriteKvArgs& args) {
  return within_memory([&]() -> Status {
    const backend::Place place = backend.impl().place();
    LATTE_RETURN_IF_ERROR(backend::validate_stream(place, args.stream));
    LATTE_RETURN_IF_ERROR(backend::validate_write_kv_args(args, place));
    if (args.slot_mapping.empty()) return {};
    return backend.impl().write_kv(args);
  });
}

Status gather_kv(const Backend& backend, const GatherKvArgs& args) {
  return within_memory([&]() -> Status {
    const backend::Place place = backend.impl().place();
    LATTE_RETURN_IF_ERROR(backend::validate_stream(place, args.stream));
    LATTE_RETURN_IF_ERROR(backend::validate_gather_kv_args(args, place));
    if (args.tokens == 0) return {};
    return backend.impl().gather_kv(args);
  });
}

}  // namespace latte
