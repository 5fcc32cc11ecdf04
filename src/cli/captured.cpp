#include "cli/captured.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "cli/options.hpp"

namespace latte::cli {
namespace {

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

Status bad(std::string field, std::string expected, std::string got) {
  return {Code::invalid_argument, std::move(field), std::move(expected), std::move(got)};
}

std::string described(const FileTensor& tensor) {
  return fmt::format("{} {}", file_dtype_name(tensor.dtype), shape_text(tensor.shape));
}

bool is_float(FileDtype dtype) {
  return dtype == FileDtype::f32 || dtype == FileDtype::bf16 || dtype == FileDtype::f16;
}

class Reader {
 public:
  explicit Reader(const Safetensors& file) : file_(file) {}

  Result<CapturedCall> read() {
    for (const auto step : {&Reader::read_metadata, &Reader::read_query, &Reader::read_cache, &Reader::read_lengths,
                            &Reader::read_scales, &Reader::read_expectation})
      if (Status status = (this->*step)(); !status.ok()) return status;
    return std::move(call_);
  }

 private:
  Status read_metadata() {
    if (const std::string* op = file_.find_metadata("op"); op != nullptr && *op != "decode")
      return bad("metadata op", "decode", *op);
    if (const std::string* mask = file_.find_metadata("mask")) {
      const Result<Mask> parsed = parse_mask(*mask);
      if (!parsed) return parsed.status();
      call_.problem.mask = *parsed;
    }
    const std::string* scale = file_.find_metadata("scale");
    if (scale == nullptr) return {Code::missing_argument, "metadata scale", "the softmax scale, a number", "none"};
    char* end = nullptr;
    call_.args.scale = std::strtof(scale->c_str(), &end);
    if (end == scale->c_str() || *end != '\0' || !std::isfinite(call_.args.scale))
      return bad("metadata scale", "a finite number", *scale);
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
    if (end == text->c_str() || *end != '\0' || errno != 0 || value < 1 || value > 65536)
      return bad(fmt::format("metadata {}", name), "a width from 1 to 65536", *text);
    width = static_cast<std::int32_t>(value);
    return {};
  }

  // A [T, H, width] tensor of the query.
  Status query_view(const char* name, const FileTensor& tensor, ConstTensorView& view) {
    if (!is_float(tensor.dtype) && tensor.dtype != FileDtype::f8_e4m3)
      return bad(name, "BF16, F16, F32 or F8_E4M3", described(tensor));
    if (tensor.shape.size() != 3 || tensor.shape[1] < 1 || tensor.shape[1] > kMaxInt || tensor.shape[2] < 1)
      return bad(name, "a shape [T, H, width] with at least one head", described(tensor));
    view = dense(static_cast<const void*>(tensor.bytes.data()), library_dtype(tensor.dtype),
                 {tensor.shape[0], tensor.shape[1], tensor.shape[2]});
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
      if (Status status = query_view("q", *q, call_.args.q); !status.ok()) return status;
      problem.latent = latent_ != 0 ? latent_ : 512;
      problem.rope = rope_ != 0 ? rope_ : 64;
      if (q->shape[2] != std::int64_t{problem.latent} + problem.rope)
        return bad("q",
                   fmt::format("{} columns (metadata latent and rope say {} + {})", problem.latent + problem.rope,
                               problem.latent, problem.rope),
                   described(*q));
    } else {
      if (Status status = query_view("q_nope", *nope, call_.args.q_nope); !status.ok()) return status;
      if (Status status = query_view("q_pe", *pe, call_.args.q_pe); !status.ok()) return status;
      if (nope->dtype != pe->dtype || nope->shape[0] != pe->shape[0] || nope->shape[1] != pe->shape[1])
        return bad("q_pe", fmt::format("dtype, tokens and heads of q_nope, {}", described(*nope)), described(*pe));
      if (nope->shape[2] > 65536 || pe->shape[2] > 65536 || (latent_ != 0 && nope->shape[2] != latent_) ||
          (rope_ != 0 && pe->shape[2] != rope_))
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

  Status read_integers(const char* name, std::size_t rank, std::vector<std::int32_t>& values,
                       const FileTensor*& tensor) {
    tensor = file_.find(name);
    if (tensor == nullptr) return {Code::missing_argument, name, "a tensor", "none"};
    if ((tensor->dtype != FileDtype::i32 && tensor->dtype != FileDtype::i64) || tensor->shape.size() != rank)
      return bad(name, fmt::format("I32 or I64 with {} dimension{}", rank, rank == 1 ? "" : "s"), described(*tensor));
    const auto count = static_cast<std::size_t>(tensor->elements());
    values.resize(count);
    if (count == 0) return {};
    if (tensor->dtype == FileDtype::i32) {
      std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
      return {};
    }
    const auto* wide = reinterpret_cast<const std::int64_t*>(tensor->bytes.data());
    // Unused page ids may be anything; one that does not fit becomes -1, which the library refuses where it is used.
    for (std::size_t i = 0; i < count; ++i)
      values[i] = wide[i] < -kMaxInt || wide[i] > kMaxInt ? -1 : static_cast<std::int32_t>(wide[i]);
    return {};
  }

  Status read_lengths() {
    const FileTensor* tensor = nullptr;
    if (Status status = read_integers("seq_lens", 1, call_.seq_lens, tensor); !status.ok()) return status;
    const auto requests = static_cast<std::int64_t>(call_.seq_lens.size());
    if (Status status = read_integers("query_start", 1, call_.query_start, tensor); !status.ok()) return status;
    if (tensor->shape[0] != requests + 1)
      return bad("query_start", fmt::format("{} entries, one more than seq_lens", requests + 1), described(*tensor));
    if (Status status = read_integers("block_table", 2, call_.block_table, tensor); !status.ok()) return status;
    if (tensor->shape[0] != requests)
      return bad("block_table", fmt::format("{} rows, as seq_lens has entries", requests), described(*tensor));
    const std::int64_t columns = tensor->shape[1];
    call_.args.pages.block_table = call_.block_table.data();
    call_.args.pages.block_table_stride = columns;
    call_.args.pages.max_pages = columns;

    std::int32_t before = 0;
    for (std::size_t b = 0; b < call_.query_start.size(); ++b) {
      const std::int32_t start = call_.query_start[b];
      if (start < before || start > call_.rows || (b == 0 && start != 0))
        return bad(fmt::format("query_start[{}]", b),
                   fmt::format("prefix sums from 0 to at most the {} rows of q", call_.rows), fmt::format("{}", start));
      before = start;
    }
    for (std::size_t b = 0; b < call_.seq_lens.size(); ++b) {
      const std::int64_t tokens = call_.seq_lens[b], page = call_.problem.page_size;
      if (tokens < 0) return bad(fmt::format("seq_lens[{}]", b), "0 or more", fmt::format("{}", tokens));
      if ((tokens + page - 1) / page > columns)
        return bad("block_table", fmt::format("at least {} columns for request {}", (tokens + page - 1) / page, b),
                   fmt::format("{}", columns));
    }
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
    if (Status status = read_scale("kv_scale", call_.args.kv_scale); !status.ok()) return status;
    return read_scale("q_scale", call_.args.q_scale);
  }

  Status read_expectation() {
    const std::int64_t heads = call_.problem.heads;
    const auto check = [&](const char* name, const std::vector<std::int64_t>& shape,
                           const FileTensor*& tensor) -> Status {
      tensor = file_.find(name);
      if (tensor == nullptr || (is_float(tensor->dtype) && tensor->shape == shape)) return {};
      return bad(name, fmt::format("BF16, F16 or F32 {}", shape_text(shape)), described(*tensor));
    };
    if (Status status = check("expect.out", {call_.rows, heads, call_.problem.latent}, call_.expect_out); !status.ok())
      return status;
    return check("expect.lse", {call_.rows, heads}, call_.expect_lse);
  }

  const Safetensors& file_;
  CapturedCall call_;
  std::int32_t latent_ = 0, rope_ = 0;
};

std::span<const std::byte> bytes_of(const void* data, std::int64_t bytes) {
  return {static_cast<const std::byte*>(data), static_cast<std::size_t>(bytes)};
}

TensorToWrite to_write(const char* name, const ConstTensorView& view) {
  std::int64_t elements = 1;
  for (int axis = 0; axis < view.rank; ++axis) elements *= view.shape[static_cast<std::size_t>(axis)];
  return {.name = name,
          .dtype = file_dtype(view.dtype),
          .shape = {view.shape.begin(), view.shape.begin() + view.rank},
          .bytes = bytes_of(view.data, elements * static_cast<std::int64_t>(dtype_bytes(view.dtype)))};
}

template <class T>
TensorToWrite to_write(const char* name, FileDtype dtype, std::vector<std::int64_t> shape, const T* values,
                       std::size_t count) {
  return {.name = name,
          .dtype = dtype,
          .shape = std::move(shape),
          .bytes = bytes_of(values, static_cast<std::int64_t>(count * sizeof(T)))};
}

}  // namespace

Dtype library_dtype(FileDtype dtype) {
  switch (dtype) {
    case FileDtype::f32: return Dtype::f32;
    case FileDtype::bf16: return Dtype::bf16;
    case FileDtype::f16: return Dtype::f16;
    case FileDtype::f8_e4m3: return Dtype::fp8_e4m3;
    default: return Dtype::u8;
  }
}

FileDtype file_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return FileDtype::f32;
    case Dtype::bf16: return FileDtype::bf16;
    case Dtype::f16: return FileDtype::f16;
    case Dtype::fp8_e4m3: return FileDtype::f8_e4m3;
    case Dtype::u8: break;
  }
  return FileDtype::u8;
}

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
  std::vector<TensorToWrite> tensors = {
      to_write("q", args.q),
      to_write("kv_cache", args.kv_cache),
      to_write("block_table", FileDtype::i32, {requests, pages.max_pages}, pages.block_table,
               static_cast<std::size_t>(requests * pages.max_pages)),
      to_write("seq_lens", FileDtype::i32, {requests}, lengths.seq_lens.data(), lengths.seq_lens.size()),
      to_write("query_start", FileDtype::i32, {requests + 1}, lengths.query_start.data(), lengths.query_start.size()),
  };
  if (problem.kv_format == KvFormat::fp8_e4m3)
    tensors.push_back(to_write("kv_scale", FileDtype::f32, {1}, &args.kv_scale, 1));
  if (problem.q_dtype == Dtype::fp8_e4m3) tensors.push_back(to_write("q_scale", FileDtype::f32, {1}, &args.q_scale, 1));
  std::vector<float> out, lse;
  if (expect != nullptr) {
    out.assign(expect->out.begin(), expect->out.end());
    lse.assign(expect->lse.begin(), expect->lse.end());
    tensors.push_back(to_write("expect.out", FileDtype::f32, {expect->tokens, problem.heads, problem.latent},
                               out.data(), out.size()));
    tensors.push_back(to_write("expect.lse", FileDtype::f32, {expect->tokens, problem.heads}, lse.data(), lse.size()));
  }
  return save_safetensors(path, tensors,
                          {{"op", "decode"},
                           {"scale", fmt::format("{}", args.scale)},
                           {"mask", mask_name(problem.mask)},
                           {"kv_format", kv_format_name(problem.kv_format)},
                           {"latent", fmt::format("{}", problem.latent)},
                           {"rope", fmt::format("{}", problem.rope)}});
}

}  // namespace latte::cli
