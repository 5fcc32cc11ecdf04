// The picture of a plan: workers down, estimated time across, colour by request, merges marked.
#pragma once

#include <string>

#include "latte/plan.hpp"
#include "latte/problem.hpp"

namespace latte::cli {

struct PlanPicture {
  const PlanConfig& config;
  const Plan& plan;
  StepLengths lengths;
  std::string title;  // "16q1s4k_4q4s1k, balanced"
};

// A whole SVG document. Times are the cost model's: the records of a worker one after another, each record_ticks long.
std::string plan_svg(const PlanPicture& picture);

}  // namespace latte::cli
