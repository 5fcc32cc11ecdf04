#include "backend/errors.hpp"

#include <cstdio>
#include <utility>

namespace latte::backend {

Status invalid(std::string field, std::string expected, std::string got) {
  return {Code::invalid_argument, std::move(field), std::move(expected), std::move(got)};
}

Status missing(std::string field, std::string expected, std::string got) {
  return {Code::missing_argument, std::move(field), std::move(expected), std::move(got)};
}

Status unsupported(std::string field, std::string expected, std::string got) {
  return {Code::unsupported, std::move(field), std::move(expected), std::move(got)};
}

std::string text(float value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", static_cast<double>(value));
  return buffer;
}

std::string shape_text(std::span<const std::int64_t> shape, bool at_least_first) {
  std::string out = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) out += ", ";
    if (axis == 0 && at_least_first) out += ">= ";
    out += shape[axis] < 0 && at_least_first ? "any" : text(shape[axis]);
  }
  return out + "]";
}

std::string dtype_set_text(std::uint32_t dtype_bits) {
  std::string out;
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3, Dtype::u8}) {
    if (!contains(dtype_bits, dtype)) continue;
    if (!out.empty()) out += ", ";
    out += dtype_name(dtype);
  }
  return out;
}

}  // namespace latte::backend
