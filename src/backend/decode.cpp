#include "latte/decode.hpp"

#include "backend/builder.hpp"
#include "backend/errors.hpp"
#include "core/within_memory.hpp"

namespace latte {

Status decode(const DecodeMetadata& metadata, const DecodeArgs& args) {
  return within_memory([&]() -> Status {
    LATTE_RETURN_IF_ERROR(backend::check_current(metadata));
    const backend::Slot* slot = metadata.slot_;
    const backend::Builder& builder = *slot->builder;
    LATTE_RETURN_IF_ERROR(builder.take_finding());
    const backend::PlannedStep step = builder.planned_step(*slot);
    LATTE_RETURN_IF_ERROR(backend::validate_decode_args(step, args));
    if (step.query_tokens() == 0) return {};
    return slot->memory->run(step, args);
  });
}

}  // namespace latte
