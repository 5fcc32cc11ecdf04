#include "cli/captured_prefill.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include <fmt/format.h>

#include "cli/captured_parts.hpp"
#include "cli/options.hpp"
#include "cli/text.hpp"

namespace latte::cli {
namespace {

class PrefillReader {
 public:
  explicit PrefillReader(const Safetensors& file) : file_(file) {}

  Result<CapturedPrefill> read() {
    for (const auto step : {&PrefillReader::read_metadata, &PrefillReader::read_tensors, &PrefillReader::read_lengths,
                            &PrefillReader::read_scales, &PrefillReader::read_expected})
      if (Status status = (this->*step)(); !status.ok()) return status;
    return std::move(call_);
  }

 private:
  Status read_metadata() {
    if (const std::string* op = file_.find_metadata("op"); op == nullptr || *op != "prefill")
      return bad("metadata op", "prefill", op == nullptr ? "none" : shown(*op));
    if (const std::string* math = file_.find_metadata("math")) {
      const Result<PrefillMath> parsed = parse_math(*math);
      if (!parsed) return parsed.status();
      call_.problem.math = *parsed;
    }
    return read_mask_and_scale(file_, call_.problem.mask, call_.args.scale);
  }

  Status read_tensors() {
    PrefillArgs& args = call_.args;
    const struct {
      const char* name;
      ConstTensorView* view;
    } tensors[] = {{"q", &args.q}, {"k", &args.k}, {"v", &args.v}};
    for (const auto& [name, view] : tensors) {
      const FileTensor* tensor = file_.find(name);
      if (tensor == nullptr) return {Code::missing_argument, name, "a tensor", "none"};
      if (Status status = rows_view(name, *tensor, *view); !status.ok()) return status;
      if (tensor->shape[2] > 65536) return bad(name, "at most 65536 columns", described(*tensor));
      if (view->dtype != args.q.dtype || view->shape[1] != args.q.shape[1])
        return bad(name, fmt::format("dtype and heads of q, {}", described(*file_.find("q"))), described(*tensor));
    }
    if (args.k.shape[2] != args.q.shape[2])
      return bad("k", fmt::format("{} columns, as q has", args.q.shape[2]), described(*file_.find("k")));
    if (args.v.shape[0] != args.k.shape[0])
      return bad("v", fmt::format("{} tokens, as k has", args.k.shape[0]), described(*file_.find("v")));
    PrefillProblem& problem = call_.problem;
    problem.heads = static_cast<std::int32_t>(args.q.shape[1]);
    problem.qk_width = static_cast<std::int32_t>(args.q.shape[2]);
    problem.v_width = static_cast<std::int32_t>(args.v.shape[2]);
    problem.dtype = args.q.dtype;
    problem.out_dtype = problem.dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : problem.dtype;
    return {};
  }

  Status read_lengths() {
    const FileTensor* tensor = nullptr;
    if (Status status = read_integers(file_, "query_start", 1, call_.query_start, tensor); !status.ok()) return status;
    if (call_.query_start.empty()) return bad("query_start", "at least the entry 0", described(*tensor));
    if (Status status = read_integers(file_, "kv_start", 1, call_.kv_start, tensor); !status.ok()) return status;
    if (call_.kv_start.size() != call_.query_start.size())
      return bad("kv_start", fmt::format("{} entries, as query_start has", call_.query_start.size()),
                 described(*tensor));
    if (Status status = check_starts("query_start", call_.query_start, call_.rows(), "q"); !status.ok()) return status;
    return check_starts("kv_start", call_.kv_start, call_.args.k.shape[0], "k");
  }

  Status read_scale(const char* name, Fp8Scale& scale) {
    const FileTensor* tensor = file_.find(name);
    if (tensor == nullptr) return {};
    const std::int64_t count = tensor->elements();
    if (tensor->dtype != FileDtype::f32 || (count != 1 && count != call_.problem.heads))
      return bad(name, fmt::format("one F32, or one for each of the {} heads", call_.problem.heads),
                 described(*tensor));
    if (count == 1)
      std::memcpy(&scale.value, tensor->bytes.data(), sizeof scale.value);
    else
      scale = {.ptr = reinterpret_cast<const float*>(tensor->bytes.data()), .per_head = true};
    return {};
  }

  Status read_scales() {
    if (Status status = read_scale("q_scale", call_.args.q_scale); !status.ok()) return status;
    if (Status status = read_scale("k_scale", call_.args.k_scale); !status.ok()) return status;
    return read_scale("v_scale", call_.args.v_scale);
  }

  Status read_expected() {
    return read_expectation(file_, {call_.rows(), call_.problem.heads, call_.problem.v_width}, call_.expect_out,
                            call_.expect_lse);
  }

  const Safetensors& file_;
  CapturedPrefill call_;
};

TensorToWrite scale_tensor(const char* name, const Fp8Scale& scale, std::int64_t heads) {
  const std::span<const float> values =
      scale.ptr == nullptr ? std::span(&scale.value, 1) : std::span(scale.ptr, scale.per_head ? heads : 1);
  return {.name = name,
          .dtype = FileDtype::f32,
          .shape = {static_cast<std::int64_t>(values.size())},
          .bytes = std::as_bytes(values)};
}

}  // namespace

Limits CapturedPrefill::limits() const {
  Limits limits{.max_requests = std::max<std::int32_t>(1, static_cast<std::int32_t>(query_start.size()) - 1),
                .max_total_query_tokens = std::max(1, query_start.back()),
                .max_kv_tokens = 1,
                .max_total_kv_tokens = std::max(1, kv_start.back())};
  for (std::size_t b = 0; b + 1 < query_start.size(); ++b) {
    limits.max_query_tokens = std::max(limits.max_query_tokens, query_start[b + 1] - query_start[b]);
    limits.max_kv_tokens = std::max(limits.max_kv_tokens, kv_start[b + 1] - kv_start[b]);
  }
  return limits;
}

Result<CapturedPrefill> read_captured_prefill(const Safetensors& file) { return PrefillReader(file).read(); }

Status save_captured(const std::string& path, const testkit::PrefillBatch& batch, const testkit::OracleResult* expect) {
  const PrefillArgs args = batch.args();
  const testkit::PrefillCase& description = batch.description();
  const PrefillLengths lengths = batch.lengths();
  const std::vector<std::int32_t> query_start(lengths.query_start.begin(), lengths.query_start.end()),
      kv_start(lengths.kv_start.begin(), lengths.kv_start.end());
  std::vector<TensorToWrite> tensors = {to_write("q", args.q), to_write("k", args.k), to_write("v", args.v),
                                        to_write("query_start", query_start), to_write("kv_start", kv_start)};
  if (description.has_scales()) {
    tensors.push_back(scale_tensor("q_scale", args.q_scale, description.heads));
    tensors.push_back(scale_tensor("k_scale", args.k_scale, description.heads));
    tensors.push_back(scale_tensor("v_scale", args.v_scale, description.heads));
  }
  std::optional<ExpectedTensors> expected;
  if (expect != nullptr) expected.emplace(*expect).add_to(tensors);
  return save_safetensors(path, tensors,
                          {{"op", "prefill"},
                           {"scale", fmt::format("{}", args.scale)},
                           {"mask", mask_name(description.mask)},
                           {"math", prefill_math_name(description.math)}});
}

}  // namespace latte::cli
