// What captured calls of both ops share: checked reads of a file's parts, and tensors to write.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cli/safetensors.hpp"
#include "latte/problem.hpp"
#include "latte/tensor.hpp"
#include "testkit/oracle.hpp"

namespace latte::cli {

inline constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t kMaxWidth = 65536;  // of rows: more than any kernel takes

Dtype library_dtype(FileDtype dtype);  // of floats and bytes
FileDtype file_dtype(Dtype dtype);

// "BF16 [2, 64, 576]"
std::string described(const FileTensor& tensor);
bool is_float(FileDtype dtype);  // of 16 or 32 bits
Status bad(std::string field, std::string expected, std::string got);

// The metadata `mask` (untouched when there is none) and `scale` (required).
Status read_mask_and_scale(const Safetensors& file, Mask& mask, float& scale);
// A [T, H, width] tensor of floats or fp8.
Status rows_view(const char* name, const FileTensor& tensor, ConstTensorView& view);
// I32 or I64. Numbers that do not fit 32 bits are an error, or, where some are not used and may be anything, -1.
enum class Wide : std::uint8_t { refused, minus_one };
Status read_integers(const Safetensors& file, const char* name, std::size_t rank, std::vector<std::int32_t>& values,
                     const FileTensor*& tensor, Wide wide = Wide::refused);
inline bool fits_32_bits(std::int64_t value) { return value == static_cast<std::int32_t>(value); }
// One of those, as the file has it.
std::int64_t integer_at(const FileTensor& tensor, std::size_t index);
// Prefix sums from 0 to at most `rows`, the rows of the tensor `of`.
Status check_starts(const char* name, const std::vector<std::int32_t>& starts, std::int64_t rows, const char* of);
// expect.out and expect.lse where the file has them, of these shapes.
Status read_expectation(const Safetensors& file, const std::vector<std::int64_t>& out_shape, const FileTensor*& out,
                        const FileTensor*& lse);

TensorToWrite to_write(const char* name, const ConstTensorView& dense_view);
TensorToWrite to_write(const char* name, const std::vector<std::int32_t>& values);

// The oracle's answer as tensors; must live until they are written.
struct ExpectedTensors {
  explicit ExpectedTensors(const testkit::OracleResult& oracle);
  void add_to(std::vector<TensorToWrite>& tensors) const;

  std::int64_t tokens, heads, width;
  std::vector<float> out, lse;
};

}  // namespace latte::cli
