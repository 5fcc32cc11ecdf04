// Reading and writing .safetensors files: 8 bytes of header length (little endian), a JSON header, then the tensors'
// bytes. Files come from other people's programs, so every field is checked before it is believed: any sequence of
// bytes gives either tensors that lie within the file or an error value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "latte/status.hpp"

namespace latte::cli {

// `other`: of tensors that no call has, and that a captured file may hold all the same. Their sizes are not checked.
enum class FileDtype : std::uint8_t { f32, bf16, f16, f8_e4m3, u8, i32, i64, other };

std::size_t file_dtype_bytes(FileDtype dtype);
const char* file_dtype_name(FileDtype dtype);  // "BF16"

// Where a tensor lies: bytes [begin, end) of the data section.
struct TensorEntry {
  FileDtype dtype = FileDtype::u8;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// The JSON header alone. Tensor ranges are checked to tile the data section without gap or overlap.
struct SafetensorsHeader {
  std::map<std::string, TensorEntry, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own bound
inline constexpr std::size_t kMaxTensors = 1 << 16;
inline constexpr std::size_t kMaxTensorRank = 8;

Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, std::uint64_t data_bytes);

// "[2, 64, 576]"
std::string shape_text(std::span<const std::int64_t> shape);

// 64-byte aligned memory without initialisation. `make` gives an empty buffer's data() == nullptr.
class AlignedBytes {
 public:
  static Result<AlignedBytes> make(std::size_t bytes);
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* pointer) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

// A tensor in memory, aligned for its dtype.
struct FileTensor {
  FileDtype dtype = FileDtype::u8;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;

  std::int64_t elements() const { return static_cast<std::int64_t>(bytes.size() / file_dtype_bytes(dtype)); }
};

class Safetensors {
 public:
  static Result<Safetensors> load(const std::string& path);
  static Result<Safetensors> parse(std::span<const std::byte> file);

  const FileTensor* find(std::string_view name) const;            // null when there is none
  const std::string* find_metadata(std::string_view name) const;  // null when there is none
  const std::map<std::string, FileTensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

 private:
  static Result<Safetensors> adopt(SafetensorsHeader header, AlignedBytes data);

  std::map<std::string, FileTensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
  AlignedBytes data_;
  std::vector<AlignedBytes> realigned_;  // copies of tensors that lie at odd offsets
};

struct TensorToWrite {
  std::string name;
  FileDtype dtype = FileDtype::u8;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

Status save_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string, std::less<>>& metadata);

}  // namespace latte::cli
