// Errors are values: a code, the field at fault, what was expected and what came.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace latte {

enum class Code {
  ok = 0,
  invalid_argument,  // a field's value, shape, stride or dtype is wrong
  out_of_limits,     // valid in itself, but above the limits the buffers were sized for
  unsupported,       // correct, but this backend or build cannot do it
  stale_metadata,    // the slot was built again after this metadata was made
  missing_argument,  // a required field is empty, or only some of a group was given
  corrupt_plan,      // a plan that does not describe its own batch
  out_of_memory,     // the operating system gave no memory
  internal,          // a defect of latte: please report it
  device_fault,      // the device or its driver reported an error, maybe of work that was queued earlier
};

const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string field, std::string expected, std::string got)
      : code_(code), field_(std::move(field)), expected_(std::move(expected)), got_(std::move(got)) {}

  bool ok() const { return code_ == Code::ok; }
  explicit operator bool() const { return ok(); }
  Code code() const { return code_; }
  const std::string& field() const { return field_; }
  const std::string& expected() const { return expected_; }
  const std::string& got() const { return got_; }
  // "invalid_argument: q: expected last stride 1, got 2"
  std::string message() const;

 private:
  Code code_ = Code::ok;
  std::string field_, expected_, got_;
};

// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Status& status() const { return status_; }
  // Throws std::runtime_error with the message when there is no value; test ok() first where that is not wanted.
  T& value() & {
    if (!value_) throw std::runtime_error(status_.message());
    return *value_;
  }
  T&& value() && {
    if (!value_) throw std::runtime_error(status_.message());
    return std::move(*value_);
  }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace latte
