// latte: multi-head latent attention with planned, persistent workers. Include this one.
#pragma once

#include "latte/backend.hpp"
#include "latte/decode.hpp"
#include "latte/device.hpp"
#include "latte/ops.hpp"
#include "latte/plan.hpp"
#include "latte/prefill.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"
#include "latte/workspace.hpp"

namespace latte {

// "0.1.0"
const char* version();

}  // namespace latte
