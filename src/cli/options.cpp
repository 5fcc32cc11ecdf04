#include "cli/options.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "cli/text.hpp"

namespace latte::cli {
namespace {

// What --model stands for. The scale is that of the expanded head (128 nope + 64 rope values) with YaRN's correction
// (0.1 * mscale_all_dim * ln(factor) + 1)^2, as the models' configurations give it.
struct Model {
  std::string_view name;
  std::int32_t heads, latent, rope;
  double mscale_all_dim, yarn_factor;

  float scale() const {
    const double mscale = 0.1 * mscale_all_dim * std::log(yarn_factor) + 1;
    return static_cast<float>(mscale * mscale / std::sqrt(128.0 + 64.0));
  }
};
constexpr Model kModels[] = {
    {.name = "deepseek-v3", .heads = 128, .latent = 512, .rope = 64, .mscale_all_dim = 1, .yarn_factor = 40},
    {.name = "kimi-k2", .heads = 64, .latent = 512, .rope = 64, .mscale_all_dim = 1, .yarn_factor = 32},
    {.name = "deepseek-v2-lite", .heads = 16, .latent = 512, .rope = 64, .mscale_all_dim = 0.707, .yarn_factor = 40},
};

// Options that have a meaning for one op only, of whichever command.
constexpr std::pair<const char*, Op> kOptionsOfOneOp[] = {
    {"--latent", Op::decode}, {"--rope", Op::decode},    {"--page", Op::decode},   {"--kv", Op::decode},
    {"--q", Op::decode},      {"--overlap", Op::decode}, {"--dtype", Op::prefill}, {"--math", Op::prefill},
};

Status invalid(std::string_view field, std::string expected, std::string_view got) {
  return {Code::invalid_argument, std::string(field), std::move(expected), shown(got)};
}

// The whole text as a number from `low` to `high`.
bool parse_integer(std::string_view text, std::int64_t low, std::int64_t high, std::int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
}

}  // namespace

void ShapeOptions::add_to(CLI::App& app, Sweeps* sweeps) {
  if (sweeps != nullptr) *sweeps = {.heads = {heads}, .pages = {page}};
  auto* heads_option =
      (sweeps != nullptr ? app.add_option("--heads", sweeps->heads, "Query heads on this rank, one or more")
                         : app.add_option("--heads", heads, "Query heads on this rank"))
          ->capture_default_str();
  auto* latent_option =
      app.add_option("--latent", latent, "decode: latent width: K's first part, and V")->capture_default_str();
  auto* rope_option = app.add_option("--rope", rope, "decode: rope width: K's second part")->capture_default_str();
  (sweeps != nullptr ? app.add_option("--page", sweeps->pages, "decode: tokens a KV page, one or more")
                     : app.add_option("--page", page, "decode: tokens a KV page"))
      ->capture_default_str();
  app.add_option("--kv", kv, "decode: KV cache: bf16, f16, f32, fp8_e4m3 or fp8_ds_mla")->capture_default_str();
  app.add_option("--q", q, "decode: query: bf16, f16, f32, fp8_e4m3, or auto = what goes with the cache")
      ->capture_default_str();
  app.add_option("--mask", mask, "causal or none")->capture_default_str();
  app.add_option("--model", model, "deepseek-v3, kimi-k2 or deepseek-v2-lite: sets heads, widths and scale")
      ->excludes(heads_option)
      ->excludes(latent_option)
      ->excludes(rope_option);
  app.add_option("--tp", tp, "Tensor-parallel ranks that share the model's heads (with --model)")
      ->capture_default_str();
}

void ShapeOptions::add_ops_to(CLI::App& app) {
  command = &app;
  app.add_option("--op", op, "decode or prefill (keys and values of 192 and 128)")->capture_default_str();
  app.add_option("--dtype", dtype, "prefill: q, k and v: bf16, f16, f32 or fp8_e4m3")->capture_default_str();
  app.add_option("--math", math, "prefill: auto, half, or fp8 = 16-bit tensors are quantised on entry")
      ->capture_default_str();
}

Result<Op> ShapeOptions::checked_op() const {
  const Result<Op> chosen = parse_op(op);
  if (!chosen || command == nullptr) return chosen;
  for (const auto& [name, owner] : kOptionsOfOneOp) {
    const CLI::Option* option = command->get_option_no_throw(name);
    if (owner != *chosen && option != nullptr && option->count() > 0)
      return Status(Code::invalid_argument, name, fmt::format("--op {} with it", op_name(owner)), op_name(*chosen));
  }
  return chosen;
}

Result<Shape> resolve(const ShapeOptions& options) {
  Shape shape;
  DecodeProblem& problem = shape.problem;
  problem.heads = options.heads;
  problem.latent = options.latent;
  problem.rope = options.rope;
  if (options.model.empty()) {
    if (options.tp != 1) return Status(Code::missing_argument, "--tp", "--model with it", "none");
    if (options.latent < 1 || options.rope < 0)
      return Status(Code::invalid_argument, "--latent and --rope", "positive widths",
                    fmt::format("{} and {}", options.latent, options.rope));
    shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(problem.latent) + problem.rope));
  } else {
    const Model* found = nullptr;
    for (const Model& model : kModels)
      if (model.name == options.model) found = &model;
    if (found == nullptr) return invalid("--model", "deepseek-v3, kimi-k2 or deepseek-v2-lite", options.model);
    if (options.tp < 1 || found->heads % options.tp != 0)
      return Status(Code::invalid_argument, "--tp", fmt::format("a divisor of the model's {} heads", found->heads),
                    fmt::format("{}", options.tp));
    problem.heads = found->heads / options.tp;
    problem.latent = found->latent;
    problem.rope = found->rope;
    shape.scale = found->scale();
  }
  const Result<KvFormat> kv = parse_kv_format(options.kv);
  if (!kv) return kv.status();
  problem.kv_format = *kv;
  if (options.q == "auto") {
    problem.q_dtype = *kv == KvFormat::f32 ? Dtype::f32 : *kv == KvFormat::f16 ? Dtype::f16 : Dtype::bf16;
  } else {
    const Result<Dtype> q = parse_dtype("--q", options.q);
    if (!q) return q.status();
    problem.q_dtype = *q;
  }
  problem.out_dtype = problem.q_dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : problem.q_dtype;
  const Result<Mask> mask = parse_mask(options.mask);
  if (!mask) return mask.status();
  problem.mask = *mask;
  problem.page_size = options.page;
  return shape;
}

Result<PrefillShape> resolve_prefill(const ShapeOptions& options) {
  const Result<Shape> shape = resolve(options);
  if (!shape) return shape.status();
  PrefillShape prefill;
  PrefillProblem& problem = prefill.problem;
  problem.heads = shape->problem.heads;
  problem.mask = shape->problem.mask;
  const Result<Dtype> dtype = parse_dtype("--dtype", options.dtype);
  if (!dtype) return dtype.status();
  problem.dtype = *dtype;
  problem.out_dtype = problem.dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : problem.dtype;
  const Result<PrefillMath> math = parse_math(options.math);
  if (!math) return math.status();
  problem.math = *math;
  // A model's scale is that of its expanded heads, so it is the same for both ops.
  prefill.scale =
      options.model.empty() ? static_cast<float>(1 / std::sqrt(static_cast<double>(problem.qk_width))) : shape->scale;
  return prefill;
}

CLI::Validator file_name() {
  return {[](std::string& name) { return name.empty() ? std::string("expected the name of a file, got none") : ""; },
          ""};
}

CLI::Validator decimal(bool with_sign) {
  return {[with_sign](std::string& text) {
            const std::string_view digits =
                std::string_view(text).substr(with_sign && text.substr(0, 1) == "-" ? 1 : 0);
            std::uint64_t value = 0;
            const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
            const bool whole = error == std::errc() && end == digits.data() + digits.size();
            const bool plain = whole && (digits == "0" || digits.front() != '0');
            return plain ? std::string() : "expected a decimal integer, got " + shown(text);
          },
          ""};
}

Result<Policy> parse_policy(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const bool has_number = colon != std::string_view::npos;
  std::int64_t n = 0;
  if (has_number && !parse_integer(text.substr(colon + 1), 1, std::numeric_limits<std::int32_t>::max(), n))
    return invalid("--policy", "a positive number behind ':'", text);
  const auto number = static_cast<std::int32_t>(n);
  if (name == "balanced" && !has_number) return Policy::balanced();
  if (name == "uniform" && has_number) return Policy::uniform(number);
  if (name == "batch_invariant") return Policy::batch_invariant(number);
  return invalid("--policy", "balanced, uniform:N or batch_invariant[:TOKENS]", text);
}

std::string policy_text(const Policy& policy) {
  const std::string name = policy_name(policy.kind);
  return policy.n == 0 ? name : fmt::format("{}:{}", name, policy.n);
}

Result<std::int64_t> parse_bytes(std::string_view text) {
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    const char suffix = digits.back();
    shift = suffix == 'K' || suffix == 'k'   ? 10
            : suffix == 'M' || suffix == 'm' ? 20
            : suffix == 'G' || suffix == 'g' ? 30
                                             : 0;
    if (shift > 0) digits.remove_suffix(1);
  }
  std::int64_t value = 0;
  if (!parse_integer(digits, 0, std::numeric_limits<std::int64_t>::max() >> shift, value))
    return invalid("--working-set", "a number of bytes below 2^63, or of K, M or G", text);
  return value << shift;
}

Result<KvFormat> parse_kv_format(std::string_view text) {
  for (const KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla})
    if (text == kv_format_name(format)) return format;
  if (text == "fp16") return KvFormat::f16;
  if (text == "fp32") return KvFormat::f32;
  if (text == "fp8") return KvFormat::fp8_e4m3;
  return invalid("kv_format", "bf16, f16, f32, fp8_e4m3 or fp8_ds_mla", text);
}

Result<Dtype> parse_dtype(std::string_view field, std::string_view text) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3})
    if (text == dtype_name(dtype)) return dtype;
  if (text == "fp16") return Dtype::f16;
  if (text == "fp32") return Dtype::f32;
  if (text == "fp8") return Dtype::fp8_e4m3;
  return invalid(field, "bf16, f16, f32 or fp8_e4m3", text);
}

Result<Mask> parse_mask(std::string_view text) {
  for (const Mask mask : {Mask::causal, Mask::none})
    if (text == mask_name(mask)) return mask;
  return invalid("mask", "causal or none", text);
}

Result<Op> parse_op(std::string_view text) {
  for (const Op op : {Op::decode, Op::prefill})
    if (text == op_name(op)) return op;
  return invalid("--op", "decode or prefill", text);
}

Result<PrefillMath> parse_math(std::string_view text) {
  for (const PrefillMath math : {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8})
    if (text == prefill_math_name(math)) return math;
  if (text == "auto") return PrefillMath::automatic;
  return invalid("math", "auto, half or fp8", text);
}

}  // namespace latte::cli
