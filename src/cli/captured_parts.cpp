#include "cli/captured_parts.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "cli/options.hpp"
#include "cli/text.hpp"

namespace latte::cli {

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

std::string described(const FileTensor& tensor) {
  return fmt::format("{} {}", file_dtype_name(tensor.dtype), shape_text(tensor.shape));
}

bool is_float(FileDtype dtype) {
  return dtype == FileDtype::f32 || dtype == FileDtype::bf16 || dtype == FileDtype::f16;
}

Status bad(std::string field, std::string expected, std::string got) {
  return {Code::invalid_argument, std::move(field), std::move(expected), std::move(got)};
}

Status read_mask_and_scale(const Safetensors& file, Mask& mask, float& scale) {
  if (const std::string* text = file.find_metadata("mask")) {
    const Result<Mask> parsed = parse_mask(*text);
    if (!parsed) return parsed.status();
    mask = *parsed;
  }
  const std::string* text = file.find_metadata("scale");
  if (text == nullptr) return {Code::missing_argument, "metadata scale", "the softmax scale, a number", "none"};
  char* end = nullptr;
  scale = std::strtof(text->c_str(), &end);
  if (end == text->c_str() || *end != '\0' || !std::isfinite(scale))
    return bad("metadata scale", "a finite number", shown(*text));
  return {};
}

Status rows_view(const char* name, const FileTensor& tensor, ConstTensorView& view) {
  if (!is_float(tensor.dtype) && tensor.dtype != FileDtype::f8_e4m3)
    return bad(name, "BF16, F16, F32 or F8_E4M3", described(tensor));
  if (tensor.shape.size() != 3 || tensor.shape[1] < 1 || tensor.shape[1] > kMaxInt)
    return bad(name, "a shape [T, H, width] with at least one head", described(tensor));
  if (tensor.shape[2] < 1 || tensor.shape[2] > kMaxWidth)
    return bad(name, fmt::format("a width from 1 to {}", kMaxWidth), described(tensor));
  view = dense(static_cast<const void*>(tensor.bytes.data()), library_dtype(tensor.dtype),
               {tensor.shape[0], tensor.shape[1], tensor.shape[2]});
  return {};
}

std::int64_t integer_at(const FileTensor& tensor, std::size_t index) {
  if (tensor.dtype == FileDtype::i64) return reinterpret_cast<const std::int64_t*>(tensor.bytes.data())[index];
  return reinterpret_cast<const std::int32_t*>(tensor.bytes.data())[index];
}

Status read_integers(const Safetensors& file, const char* name, std::size_t rank, std::vector<std::int32_t>& values,
                     const FileTensor*& tensor, Wide wide) {
  tensor = file.find(name);
  if (tensor == nullptr) return {Code::missing_argument, name, "a tensor", "none"};
  if ((tensor->dtype != FileDtype::i32 && tensor->dtype != FileDtype::i64) || tensor->shape.size() != rank)
    return bad(name, fmt::format("I32 or I64 with {} dimension{}", rank, rank == 1 ? "" : "s"), described(*tensor));
  values.resize(static_cast<std::size_t>(tensor->elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t value = integer_at(*tensor, i);
    const bool fits = fits_32_bits(value);
    if (!fits && wide == Wide::refused)
      return bad(fmt::format("{}[{}]", name, i), "a number of 32 bits", fmt::format("{}", value));
    values[i] = fits ? static_cast<std::int32_t>(value) : -1;
  }
  return {};
}

Status check_starts(const char* name, const std::vector<std::int32_t>& starts, std::int64_t rows, const char* of) {
  std::int32_t before = 0;
  for (std::size_t b = 0; b < starts.size(); ++b) {
    const std::int64_t least = b == 0 ? 0 : before, most = b == 0 ? 0 : rows;
    if (starts[b] < least || starts[b] > most)
      return bad(fmt::format("{}[{}]", name, b),
                 b == 0 ? "0, where prefix sums begin"
                        : fmt::format("a number from {}, the one before it, to the {} rows of {}", before, rows, of),
                 fmt::format("{}", starts[b]));
    before = starts[b];
  }
  return {};
}

Status read_expectation(const Safetensors& file, const std::vector<std::int64_t>& out_shape, const FileTensor*& out,
                        const FileTensor*& lse) {
  const auto check = [&](const char* name, const std::vector<std::int64_t>& shape,
                         const FileTensor*& tensor) -> Status {
    tensor = file.find(name);
    if (tensor == nullptr || (is_float(tensor->dtype) && tensor->shape == shape)) return {};
    return bad(name, fmt::format("BF16, F16 or F32 {}", shape_text(shape)), described(*tensor));
  };
  if (Status status = check("expect.out", out_shape, out); !status.ok()) return status;
  return check("expect.lse", {out_shape[0], out_shape[1]}, lse);
}

TensorToWrite to_write(const char* name, const ConstTensorView& view) {
  std::size_t bytes = dtype_bytes(view.dtype);
  for (int axis = 0; axis < view.rank; ++axis)
    bytes *= static_cast<std::size_t>(view.shape[static_cast<std::size_t>(axis)]);
  return {.name = name,
          .dtype = file_dtype(view.dtype),
          .shape = {view.shape.begin(), view.shape.begin() + view.rank},
          .bytes = {view.bytes(), bytes}};
}

TensorToWrite to_write(const char* name, const std::vector<std::int32_t>& values) {
  return {.name = name,
          .dtype = FileDtype::i32,
          .shape = {static_cast<std::int64_t>(values.size())},
          .bytes = std::as_bytes(std::span(values))};
}

ExpectedTensors::ExpectedTensors(const testkit::OracleResult& oracle)
    : tokens(oracle.tokens),
      heads(oracle.heads),
      width(oracle.latent),
      out(oracle.out.begin(), oracle.out.end()),
      lse(oracle.lse.begin(), oracle.lse.end()) {}

void ExpectedTensors::add_to(std::vector<TensorToWrite>& tensors) const {
  tensors.push_back({.name = "expect.out",
                     .dtype = FileDtype::f32,
                     .shape = {tokens, heads, width},
                     .bytes = std::as_bytes(std::span(out))});
  tensors.push_back({.name = "expect.lse",
                     .dtype = FileDtype::f32,
                     .shape = {tokens, heads},
                     .bytes = std::as_bytes(std::span(lse))});
}

}  // namespace latte::cli
