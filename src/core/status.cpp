#include "latte/status.hpp"

namespace latte {

const char* code_name(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid_argument";
    case Code::out_of_limits: return "out_of_limits";
    case Code::unsupported: return "unsupported";
    case Code::stale_metadata: return "stale_metadata";
    case Code::missing_argument: return "missing_argument";
    case Code::corrupt_plan: return "corrupt_plan";
    case Code::out_of_memory: return "out_of_memory";
    case Code::internal: return "internal";
    case Code::device_fault: return "device_fault";
  }
  return "unknown";
}

std::string Status::message() const {
  if (ok()) return "ok";
  return std::string(code_name(code_)) + ": " + field_ + ": expected " + expected_ + ", got " + got_;
}

}  // namespace latte
