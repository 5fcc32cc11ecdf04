// The support table, made by asking the code that decides: every entry is a probe that was accepted, never a promise
// typed by hand. The answers are the same on every machine and in every build: the CPU's portable kernel serves all
// that any of its kernels serves, and the choice of a CUDA kernel needs no GPU.
#include <array>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "backend/validate/validate.hpp"
#include "backend/views.hpp"
#include "cuda/sm90/decode/choice.hpp"
#include "latte/backend.hpp"

namespace latte {
namespace backend {
namespace {

constexpr std::array kFormats = {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3,
                                 KvFormat::fp8_ds_mla};
constexpr std::array kDtypes = {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3};

// A column of the table: who is asked.
struct Column {
  Place place = Place::host;
  PlanTarget target;

  // A DecodeProblem or a PrefillProblem.
  template <class Problem>
  bool takes(const Problem& problem, const Policy& policy = {}) const {
    return choose_for(target, problem, {.max_requests = 1, .max_kv_tokens = 1024}, policy).ok();
  }
};

class List {
 public:
  void add(bool yes, const std::string& name) {
    if (yes) text_ += (text_.empty() ? "" : ", ") + name;
  }
  std::string text() const { return text_.empty() ? "no" : text_; }

 private:
  std::string text_;
};

// `whole` when every probe of the first list is taken and none of the second; otherwise those that are taken.
template <class Probe>
std::string range_text(const std::string& whole, std::initializer_list<std::int32_t> inside,
                       std::initializer_list<std::int32_t> outside, Probe probe) {
  bool all = true;
  List list;
  for (std::int32_t value : inside) {
    all = all && probe(value);
    list.add(probe(value), std::to_string(value));
  }
  for (std::int32_t value : outside) {
    all = all && !probe(value);
    list.add(probe(value), std::to_string(value));
  }
  return all ? whole : list.text();
}

std::string query_dtypes(const Column& column, KvFormat format) {
  List list;
  for (Dtype dtype : kDtypes)
    list.add(column.takes(DecodeProblem{.heads = 1, .q_dtype = dtype, .kv_format = format}), dtype_name(dtype));
  return list.text();
}

// What decode and prefill are both asked.
template <class Problem>
std::string output_dtypes(const Column& column) {
  List list;
  for (Dtype dtype : kDtypes) list.add(column.takes(Problem{.heads = 1, .out_dtype = dtype}), dtype_name(dtype));
  return list.text();
}

template <class Problem>
std::string heads(const Column& column) {
  return range_text("any >= 1", {1, 2, 3, 8, 12, 16, 24, 48, 64, 100, 128, 1000}, {0, -1},
                    [&](std::int32_t value) { return column.takes(Problem{.heads = value}); });
}

template <class Problem>
List masks(const Column& column) {
  List list;
  for (Mask mask : {Mask::causal, Mask::none})
    list.add(column.takes(Problem{.heads = 1, .mask = mask}), mask_name(mask));
  return list;
}

template <class Problem>
std::string policies(const Column& column) {
  List list;
  for (const Policy& policy : {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(256)})
    list.add(column.takes(Problem{.heads = 1}, policy), policy_name(policy.kind));
  return list.text();
}

std::string page_sizes(const Column& column) {
  return range_text("any >= 1", {1, 2, 7, 16, 64, 100, 128, 1000, std::numeric_limits<std::int32_t>::max()}, {0, -1},
                    [&](std::int32_t value) { return column.takes(DecodeProblem{.heads = 1, .page_size = value}); });
}

std::string widths(const Column& column) {
  List list;
  list.add(column.takes(DecodeProblem{.heads = 1, .latent = 512, .rope = 64}), "512/64");
  list.add(column.takes(DecodeProblem{.heads = 1, .latent = 256, .rope = 64}), "256/64");
  const auto both = [&](std::int32_t width) {
    return column.takes(DecodeProblem{.heads = 1, .latent = width}) &&
           column.takes(DecodeProblem{.heads = 1, .rope = width});
  };
  const std::string others =
      range_text("other multiples of 16", {16, 32, 48, 128, 192, 384, 1024}, {0, 8, 24, 100, 577}, both);
  list.add(others != "no", others);
  return list.text();
}

std::string decode_masks(const Column& column) {
  List list = masks<DecodeProblem>(column);
  // A step of one request with two tokens, of which its only query token sees one.
  const std::array<std::int32_t, 1> seq_lens = {2}, visible = {1};
  const std::array<std::int32_t, 2> query_start = {0, 1};
  const PlanConfig config{.limits = {.max_requests = 1, .max_kv_tokens = 2}};
  list.add(OwnedPlan::make(config, {.seq_lens = seq_lens, .query_start = query_start, .visible = visible}).ok(),
           "visible tokens per query");
  return list.text();
}

// One request, two query tokens, two heads, one page: small enough to lie on the stack for probes of the arguments.
struct TinyStep {
  DecodeProblem problem{.heads = 2, .latent = 16, .rope = 16, .q_dtype = Dtype::f32, .out_dtype = Dtype::f32};
  std::array<std::int32_t, 1> seq_lens = {2};
  std::array<std::int32_t, 2> query_start = {0, 2};
  std::array<std::int32_t, 1> page_ids = {0};
  std::array<std::int32_t, 2> page_indptr = {0, 1};
  alignas(16) std::array<float, 2 * 2 * 32> memory{};

  PlannedStep step(const Column& column) const {
    return {.problem = problem, .seq_lens = seq_lens, .query_start = query_start, .visible = {}, .place = column.place};
  }
  // [2, 2, width], head-major: the transposed view that an absorbed projection leaves behind.
  TensorView transposed(std::int64_t width) {
    TensorView view = dense(memory.data(), Dtype::f32, {2, 2, width});
    std::swap(view.stride[0], view.stride[1]);
    return view;
  }
};

std::string query_layouts(const Column& column) {
  TinyStep tiny;
  List list;
  DecodeArgs whole, pair;
  whole.q = tiny.transposed(32);
  pair.q_nope = tiny.transposed(16);
  pair.q_pe = tiny.transposed(16);
  list.add(validate_query(tiny.step(column), whole).ok(), "one tensor");
  list.add(validate_query(tiny.step(column), pair).ok(), "q_nope + q_pe (free strides)");
  return list.text();
}

std::string page_lists(const Column& column) {
  TinyStep tiny;
  List list;
  PageTable table, csr;
  table.block_table = tiny.page_ids.data();
  table.block_table_stride = 7;
  table.max_pages = 1;
  csr.page_indptr = tiny.page_indptr;
  csr.page_indices = tiny.page_ids;
  list.add(validate_pages(tiny.step(column), table, 1).ok(), "block table (free row stride)");
  list.add(validate_pages(tiny.step(column), csr, 1).ok(), "CSR");
  return list.text();
}

std::string log_sum_exps(const Column& column) {
  TinyStep tiny;
  List list;
  const TensorView out = tiny.transposed(16);
  TensorView lse = dense(tiny.memory.data(), Dtype::f32, {2, 2});
  lse.stride = {1, 2};
  const OutputShape shape = output_shape(tiny.step(column));
  list.add(validate_outputs(out, {}, shape, column.place).ok(), "optional");
  list.add(validate_outputs(out, lse, shape, column.place).ok(), "f32 (free strides)");
  return list.text();
}

std::string cache_writes(const Column& column) {
  alignas(16) std::array<std::byte, 4 * 1024> memory{};
  List list;
  for (KvFormat format : kFormats) {
    WriteKvArgs args;
    args.kv_c = dense(static_cast<const void*>(memory.data()), Dtype::bf16, {1, 512});
    args.k_pe = dense(static_cast<const void*>(memory.data()), Dtype::bf16, {1, 64});
    args.kv_cache = dense(memory.data(), kv_element_dtype(format), {1, 1, kv_token_elements(format, 512, 64)});
    args.kv_format = format;
    const std::array<std::int64_t, 1> slots = {0};
    args.slot_mapping = slots;
    list.add(validate_write_kv_args(args, column.place).ok(), kv_format_name(format));
  }
  return list.text();
}

std::string prefill_dtypes(const Column& column) {
  List list;
  for (Dtype dtype : kDtypes) list.add(column.takes(PrefillProblem{.heads = 1, .dtype = dtype}), dtype_name(dtype));
  return list.text();
}

std::string prefill_widths(const Column& column) {
  List list;
  list.add(column.takes(PrefillProblem{.heads = 1}), "192/128");
  const auto both = [&](std::int32_t width) {
    return column.takes(PrefillProblem{.heads = 1, .qk_width = width}) &&
           column.takes(PrefillProblem{.heads = 1, .v_width = width});
  };
  const std::string others =
      range_text("other multiples of 16", {16, 32, 48, 64, 96, 256, 512, 1024}, {0, 8, 100}, both);
  list.add(others != "no", others);
  return list.text();
}

// Chunks of a context come out of every cache that prefill can be asked to gather from.
std::string prefill_contexts(const Column& column) {
  List list;
  for (KvFormat format : kFormats)
    list.add(column.takes(PrefillProblem{.heads = 1, .context = PrefillContext{.kv_format = format, .max_tokens = 1}}),
             kv_format_name(format));
  return list.text();
}

std::string merges(const Column& column) {
  alignas(16) std::array<float, 16> memory{};
  List list;
  for (Dtype dtype : kDtypes) {
    const Partial part{dense(static_cast<const void*>(memory.data()), dtype, {1, 1, 16}),
                       dense(static_cast<const void*>(memory.data()), Dtype::f32, {1, 1})};
    const MergeArgs args{.partials = {&part, 1}, .out = dense(memory.data(), dtype, {1, 1, 16})};
    list.add(validate_merge_args(args, column.place).ok(), dtype_name(dtype));
  }
  return list.text();
}

std::string merge_partials(const Column& column) {
  alignas(16) std::array<float, 16> memory{};
  const TensorView out = dense(memory.data(), Dtype::f32, {1, 1, 16});
  const std::vector<Partial> parts(1000, {out, dense(memory.data(), Dtype::f32, {1, 1})});
  const auto takes = [&](std::size_t count) {
    return validate_merge_args({.partials = std::span(parts).first(count), .out = out}, column.place).ok();
  };
  if (takes(parts.size())) return "any >= 1";
  std::size_t most = 0;
  while (takes(most + 1)) ++most;
  return "1 to " + std::to_string(most);
}

}  // namespace
}  // namespace backend

SupportTable support_table() {
  const backend::Column columns[] = {
      {backend::Place::host, {.backend = "cpu", .workers = 1}},
      {backend::Place::device, {.backend = "cuda", .workers = cuda::kHopperMultiprocessors}},
  };
  SupportTable table;
  for (const backend::Column& column : columns) table.backends.emplace_back(column.target.backend);
  const auto add = [&](std::string feature, auto ask) {
    SupportRow row{.feature = std::move(feature), .answers = {}};
    for (const backend::Column& column : columns) row.answers.push_back(ask(column));
    table.rows.push_back(std::move(row));
  };
  for (KvFormat format : backend::kFormats)
    add(std::string("decode, ") + kv_format_name(format) + " cache: query dtypes",
        [&](const backend::Column& column) { return backend::query_dtypes(column, format); });
  add("output dtypes", backend::output_dtypes<DecodeProblem>);
  add("query heads", backend::heads<DecodeProblem>);
  add("latent/rope widths", backend::widths);
  add("page sizes", backend::page_sizes);
  add("page lists", backend::page_lists);
  add("query layouts", backend::query_layouts);
  add("masks", backend::decode_masks);
  add("LSE", backend::log_sum_exps);
  add("planning policies", backend::policies<DecodeProblem>);
  add("prefill: q, k and v dtypes", backend::prefill_dtypes);
  add("prefill: output dtypes", backend::output_dtypes<PrefillProblem>);
  add("prefill: heads", backend::heads<PrefillProblem>);
  add("prefill: qk/v widths", backend::prefill_widths);
  add("prefill: masks", [](const backend::Column& column) { return backend::masks<PrefillProblem>(column).text(); });
  add("prefill: planning policies", backend::policies<PrefillProblem>);
  add("prefill: caches of older tokens", backend::prefill_contexts);
  add("merge dtypes", backend::merges);
  add("merge partials", backend::merge_partials);
  add("write_kv formats", backend::cache_writes);
  return table;
}

}  // namespace latte
