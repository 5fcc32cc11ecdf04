// Options that several commands share, and the text forms of their values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/batch_spec.hpp"
#include "latte/backend.hpp"
#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"

namespace latte::cli {

// The attention's shape as typed. --model sets heads, widths and scale; the rest are single fields.
struct ShapeOptions {
  std::string op = "decode";  // of the commands that have --op
  std::int32_t heads = 16;
  std::int32_t latent = 512;
  std::int32_t rope = 64;
  std::int32_t page = 64;
  std::string kv = "bf16";
  std::string q = "auto";
  std::string mask = "causal";
  std::string model;
  std::int32_t tp = 1;
  std::string dtype = "bf16";         // prefill: of q, k and v
  std::string math = "auto";          // prefill
  const CLI::App* command = nullptr;  // where these were typed

  // With `sweeps`, --heads and --page take lists: the command runs all combinations.
  struct Sweeps {
    std::vector<std::int32_t> heads, pages;
  };
  void add_to(CLI::App& app, Sweeps* sweeps = nullptr);
  // --op, and what only prefill has.
  void add_ops_to(CLI::App& app);
  // The op; an error that names an option of the other one, if such was typed.
  Result<Op> checked_op() const;
};

struct Shape {
  DecodeProblem problem;
  float scale = 0;
};
Result<Shape> resolve(const ShapeOptions& options);

struct PrefillShape {
  PrefillProblem problem;
  float scale = 0;
};
Result<PrefillShape> resolve_prefill(const ShapeOptions& options);

inline constexpr const char* kBackendHelp = "Where to run: cpu, cuda, or auto = cuda where it can be used, else cpu";

struct BackendChoice {
  std::string name = "cpu";
  std::string kernel = "auto";
  std::int32_t threads = 0;
  std::int32_t device = 0;
  bool serial_launches = false;

  void add_to(CLI::App& command);
  // Says on stderr why `auto` became what it is, unless the command tells it itself.
  Result<Backend> open(bool tell = true) const;
};

// Of options that name a file to write: an empty one is a mistake, not a wish for none.
CLI::Validator file_name();

// Of options that are integers, below zero too if they are `with_sign`: decimal ones. CLI11 alone takes "010" for 8, ""
// for 0, and the largest number for larger ones.
CLI::Validator decimal(bool with_sign);

// "balanced", "uniform:4", "batch_invariant", "batch_invariant:2048"
Result<Policy> parse_policy(std::string_view text);
std::string policy_text(const Policy& policy);

// "1073741824", "256K", "512M", "1G"; powers of 1024.
Result<std::int64_t> parse_bytes(std::string_view text);

Result<KvFormat> parse_kv_format(std::string_view text);
Result<Dtype> parse_dtype(std::string_view field, std::string_view text);
Result<Mask> parse_mask(std::string_view text);
Result<Op> parse_op(std::string_view text);
Result<PrefillMath> parse_math(std::string_view text);

}  // namespace latte::cli
