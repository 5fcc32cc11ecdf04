#include "cli/captured.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>

#include <fmt/format.h>

#include "cli/captured_parts.hpp"
#include "cli/options.hpp"
#include "cli/text.hpp"

namespace latte::cli {
namespace {

class Reader {
 public:
  explicit Reader(const Safetensors& file) : file_(file) {}

  Result<CapturedCall> read() {
    for (const auto step : {&Reader::read_metadata, &Reader::read_query, &Reader::read_cache, &Reader::read_lengths,
                            &Reader::read_scales, &Reader::read_expected})
      if (Status status = (this->*step)(); !status.ok()) return status;
    return std::move(call_);
  }

 private:
  Status read_metadata() {
    if (const std::string* op = file_.find_metadata("op"); op != nullptr && *op != "decode")
      return bad("metadata op", "decode", shown(*op));
    if (Status status = read_mask_and_scale(file_, call_.problem.mask, call_.args.scale); !status.ok()) return status;
    if (Status status = read_width("latent", latent_); !status.ok()) return status;
    return read_width("rope", rope_);
  }

  // Stays 0 when the file does not say.
  Status read_width(const char* name, std::int32_t& width) {
    const std::string* text = file_.find_metadata(name);
    if (text == nullptr) return {};
    char* end = nullptr;
    errno = 0;
    const long value = std::strtol(text->c_str(), &end, 10);
    if (end == text->c_str() || *end != '\0' || errno != 0 || value < 1 || value > kMaxWidth)
      return bad(fmt::format("metadata {}", name), fmt::format("a width from 1 to {}", kMaxWidth), shown(*text));
    width = static_cast<std::int32_t>(value);
    return {};
  }

  Status read_query() {
    const FileTensor* q = file_.find("q");
    const FileTensor* nope = file_.find("q_nope");
    const FileTensor* pe = file_.find("q_pe");
    if ((q != nullptr) == (nope != nullptr || pe != nullptr) || (nope != nullptr) != (pe != nullptr))
      return {Code::missing_argument, "q", "either tensor q or both q_nope and q_pe", "neither, both or a part"};
    DecodeProblem& problem = call_.problem;
    if (q != nullptr) {
      if (Status status = rows_view("q", *q, call_.args.q); !status.ok()) return status;
      problem.latent = latent_ != 0 ? latent_ : 512;
      problem.rope = rope_ != 0 ? rope_ : 64;
      if (q->shape[2] != std::int64_t{problem.latent} + problem.rope)
        return bad("q",
                   fmt::format("{} columns (metadata latent and rope say {} + {})", problem.latent + problem.rope,
                               problem.latent, problem.rope),
                   described(*q));
    } else {
      if (Status status = rows_view("q_nope", *nope, call_.args.q_nope); !status.ok()) return status;
      if (Status status = rows_view("q_pe", *pe, call_.args.q_pe); !status.ok()) return status;
      if (nope->dtype != pe->dtype || nope->shape[0] != pe->shape[0] || nope->shape[1] != pe->shape[1])
        return bad("q_pe", fmt::format("dtype, tokens and heads of q_nope, {}", described(*nope)), described(*pe));
      if ((latent_ != 0 && nope->shape[2] != latent_) || (rope_ != 0 && pe->shape[2] != rope_))
        return bad("q_nope and q_pe", "the widths of metadata latent and rope",
                   fmt::format("{} and {}", nope->shape[2], pe->shape[2]));
      problem.latent = static_cast<std::int32_t>(nope->shape[2]);
      problem.rope = static_cast<std::int32_t>(pe->shape[2]);
    }
    const FileTensor& first = q != nullptr ? *q : *nope;
    call_.rows = first.shape[0];
    problem.heads = static_cast<std::int32_t>(first.shape[1]);
    problem.q_dtype = library_dtype(first.dtype);
    problem.out_dtype = problem.q_dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : problem.q_dtype;
    return {};
  }

  Status read_cache() {
    const FileTensor* cache = file_.find("kv_cache");
    if (cache == nullptr) return {Code::missing_argument, "kv_cache", "a tensor", "none"};
    std::vector<std::int64_t> shape = cache->shape;
    if (shape.size() == 4 && shape[2] == 1) shape.erase(shape.begin() + 2);
    if (shape.size() != 3 || shape[1] < 1 || shape[1] > kMaxInt)
      return bad("kv_cache", "a shape [pages, page_size, W] with page_size from 1 to 2^31 - 1", described(*cache));
    DecodeProblem& problem = call_.problem;
    problem.page_size = static_cast<std::int32_t>(shape[1]);
    if (const std::string* format = file_.find_metadata("kv_format")) {
      const Result<KvFormat> parsed = parse_kv_format(*format);
      if (!parsed) return parsed.status();
      problem.kv_format = *parsed;
    } else if (is_float(cache->dtype)) {
      problem.kv_format = cache->dtype == FileDtype::f32   ? KvFormat::f32
                          : cache->dtype == FileDtype::f16 ? KvFormat::f16
                                                           : KvFormat::bf16;
    } else if (cache->dtype == FileDtype::f8_e4m3) {
      problem.kv_format = KvFormat::fp8_e4m3;
    } else {
      return {Code::missing_argument, "metadata kv_format", "fp8_e4m3 or fp8_ds_mla", "none, and kv_cache is bytes"};
    }
    const std::int64_t width = kv_token_elements(problem.kv_format, problem.latent, problem.rope);
    const Dtype dtype = kv_element_dtype(problem.kv_format);
    const bool dtype_fits =
        cache->dtype == file_dtype(dtype) || (dtype_bytes(dtype) == 1 && cache->dtype == FileDtype::u8);
    if (!dtype_fits || shape[2] != width)
      return bad("kv_cache",
                 fmt::format("{} with {} columns for {} {} + {}", file_dtype_name(file_dtype(dtype)), width,
                             kv_format_name(problem.kv_format), problem.latent, problem.rope),
                 described(*cache));
    call_.args.kv_cache = dense(static_cast<const void*>(cache->bytes.data()), dtype, {shape[0], shape[1], shape[2]});
    return {};
  }

  Status read_lengths() {
    const FileTensor* tensor = nullptr;
    if (Status status = read_integers(file_, "seq_lens", 1, call_.seq_lens, tensor); !status.ok()) return status;
    const auto requests = static_cast<std::int64_t>(call_.seq_lens.size());
    if (Status status = read_integers(file_, "query_start", 1, call_.query_start, tensor); !status.ok()) return status;
    if (tensor->shape[0] != requests + 1)
      return bad("query_start", fmt::format("{} entries, one more than seq_lens", requests + 1), described(*tensor));
    if (Status status = read_integers(file_, "block_table", 2, call_.block_table, tensor, Wide::minus_one);
        !status.ok())
      return status;
    if (tensor->shape[0] != requests)
      return bad("block_table", fmt::format("{} rows, as seq_lens has entries", requests), described(*tensor));
    const std::int64_t columns = tensor->shape[1];
    call_.args.pages.block_table = call_.block_table.data();
    call_.args.pages.block_table_stride = columns;
    call_.args.pages.max_pages = columns;

    if (Status status = check_starts("query_start", call_.query_start, call_.rows, "q"); !status.ok()) return status;
    for (std::size_t b = 0; b < call_.seq_lens.size(); ++b) {
      const std::int64_t tokens = call_.seq_lens[b], page = call_.problem.page_size;
      if (tokens < 0) return bad(fmt::format("seq_lens[{}]", b), "0 or more", fmt::format("{}", tokens));
      if (call_.query_start[b] == call_.query_start[b + 1]) continue;  // nobody reads its pages
      const std::int64_t pages = (tokens + page - 1) / page;
      if (pages > columns)
        return bad("block_table", fmt::format("at least {} columns for request {}", pages, b),
                   fmt::format("{}", columns));
      if (Status status = check_page_ids(*tensor, b, pages); !status.ok()) return status;
    }
    return {};
  }

  // The library refuses ids that are out of range, but got -1 for those that do not fit.
  Status check_page_ids(const FileTensor& table, std::size_t request, std::int64_t pages) {
    const std::size_t first = request * static_cast<std::size_t>(table.shape[1]);
    for (std::size_t p = 0; p < static_cast<std::size_t>(pages); ++p)
      if (const std::int64_t id = integer_at(table, first + p); !fits_32_bits(id))
        return bad("block_table", fmt::format("page ids in [0, {})", call_.args.kv_cache.shape[0]),
                   fmt::format("{} as page {} of request {}", id, p, request));
    return {};
  }

  Status read_scale(const char* name, float& value) {
    const FileTensor* tensor = file_.find(name);
    if (tensor == nullptr) return {};
    if (tensor->dtype != FileDtype::f32 || tensor->elements() != 1) return bad(name, "one F32", described(*tensor));
    std::memcpy(&value, tensor->bytes.data(), sizeof value);
    return {};
  }

  Status read_scales() {
    if (Status status = read_scale("kv_scale", call_.args.kv_scale.value); !status.ok()) return status;
    return read_scale("q_scale", call_.args.q_scale.value);
  }

  Status read_expected() {
    return read_expectation(file_, {call_.rows, call_.problem.heads, call_.problem.latent}, call_.expect_out,
                            call_.expect_lse);
  }

  const Safetensors& file_;
  CapturedCall call_;
  std::int32_t latent_ = 0, rope_ = 0;
};

TensorToWrite one_float(const char* name, const float& value) {
  return {.name = name, .dtype = FileDtype::f32, .shape = {1}, .bytes = std::as_bytes(std::span(&value, 1))};
}

}  // namespace

Limits CapturedCall::limits() const {
  Limits limits{.max_requests = std::max<std::int32_t>(1, static_cast<std::int32_t>(seq_lens.size())),
                .max_total_query_tokens = std::max(1, query_start.back()),
                .max_kv_tokens = 1,
                .max_total_kv_tokens = 0};
  for (std::size_t b = 0; b < seq_lens.size(); ++b) {
    limits.max_query_tokens = std::max(limits.max_query_tokens, query_start[b + 1] - query_start[b]);
    limits.max_kv_tokens = std::max(limits.max_kv_tokens, seq_lens[b]);
    limits.max_total_kv_tokens += seq_lens[b];
  }
  limits.max_total_kv_tokens = std::max<std::int64_t>(1, limits.max_total_kv_tokens);
  return limits;
}

Result<CapturedCall> read_captured(const Safetensors& file) { return Reader(file).read(); }

Status save_captured(const std::string& path, const testkit::DecodeBatch& batch, const testkit::OracleResult* expect) {
  const DecodeArgs args = batch.args();
  const DecodeProblem problem = batch.description().problem();
  const StepLengths lengths = batch.lengths();
  const auto requests = static_cast<std::int64_t>(lengths.seq_lens.size());
  const PageTable& pages = args.pages;
  const std::vector<std::int32_t> seq_lens(lengths.seq_lens.begin(), lengths.seq_lens.end()),
      query_start(lengths.query_start.begin(), lengths.query_start.end());
  std::vector<TensorToWrite> tensors = {
      to_write("q", args.q),
      to_write("kv_cache", args.kv_cache),
      {.name = "block_table",
       .dtype = FileDtype::i32,
       .shape = {requests, pages.max_pages},
       .bytes = std::as_bytes(std::span(pages.block_table, static_cast<std::size_t>(requests * pages.max_pages)))},
      to_write("seq_lens", seq_lens),
      to_write("query_start", query_start),
  };
  if (problem.kv_format == KvFormat::fp8_e4m3) tensors.push_back(one_float("kv_scale", args.kv_scale.value));
  if (problem.q_dtype == Dtype::fp8_e4m3) tensors.push_back(one_float("q_scale", args.q_scale.value));
  std::optional<ExpectedTensors> expected;
  if (expect != nullptr) expected.emplace(*expect).add_to(tensors);
  return save_safetensors(path, tensors,
                          {{"op", "decode"},
                           {"scale", fmt::format("{}", args.scale)},
                           {"mask", mask_name(problem.mask)},
                           {"kv_format", kv_format_name(problem.kv_format)},
                           {"latent", fmt::format("{}", problem.latent)},
                           {"rope", fmt::format("{}", problem.rope)}});
}

}  // namespace latte::cli
