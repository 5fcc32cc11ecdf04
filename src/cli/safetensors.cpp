#include "cli/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/text.hpp"

namespace latte::cli {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are stored little endian and used in place");

struct DtypeRow {
  FileDtype dtype;
  const char* name;
  std::size_t bytes;
};
constexpr DtypeRow kDtypes[] = {
    {FileDtype::f32, "F32", 4}, {FileDtype::bf16, "BF16", 2},
    {FileDtype::f16, "F16", 2}, {FileDtype::f8_e4m3, "F8_E4M3", 1},
    {FileDtype::u8, "U8", 1},   {FileDtype::i32, "I32", 4},
    {FileDtype::i64, "I64", 8}, {FileDtype::other, "another dtype", 1},
};

const DtypeRow& row_of(FileDtype dtype) {
  return *std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const DtypeRow& r) { return r.dtype == dtype; });
}

Status bad(std::string field, std::string expected, std::string got) {
  return Status(Code::invalid_argument, std::move(field), std::move(expected), std::move(got));
}

// Reads a header without keeping it, to refuse at once what no header has: nesting, more entries than anybody writes,
// and equal keys, of which Json would keep the last and hide a tensor.
class HeaderGuard {
 public:
  using Text = Json::string_t;
  bool null() { return value(); }
  bool boolean(bool) { return value(); }
  bool number_integer(Json::number_integer_t) { return value(); }
  bool number_unsigned(Json::number_unsigned_t) { return value(); }
  bool number_float(Json::number_float_t, const Text&) { return value(); }
  bool string(const Text&) { return value(); }
  bool binary(const Json::binary_t&) { return value(); }
  bool start_object(std::size_t) { return open(); }
  bool start_array(std::size_t) { return open(); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(const Text& key) {
    if (levels_.back().keys.insert(key).second) return true;
    return refuse("the key " + shown(key) + " twice");
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) { return false; }

  // Empty where the text is a header as far as this can tell, or no JSON at all.
  const std::string& problem() const { return problem_; }

 private:
  struct Level {
    std::set<std::string> keys;
    std::size_t values = 0;
  };
  static constexpr std::size_t kMaxLevels = 3;  // the header, a tensor, its shape

  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool value() {
    if (levels_.empty() || ++levels_.back().values <= kMaxTensors + 1) return true;  // the metadata is one more
    return refuse(fmt::format("more than {} {}", kMaxTensors, levels_.size() == 1 ? "tensors" : "values in one place"));
  }
  bool open() {
    if (levels_.size() == kMaxLevels) return refuse("deeper nesting");
    if (!value()) return false;
    levels_.emplace_back();
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

  std::vector<Level> levels_;
  std::string problem_;
};

std::optional<std::uint64_t> as_count(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<std::uint64_t>();
}

Status parse_shape(const std::string& field, const Json& shape, TensorEntry& entry, std::uint64_t& bytes) {
  if (!shape.is_array() || shape.size() > kMaxTensorRank)
    return bad(field + ".shape", fmt::format("a list of at most {} extents", kMaxTensorRank),
               shape.is_array() ? fmt::format("{} of them", shape.size()) : shape.type_name());
  bytes = file_dtype_bytes(entry.dtype);
  bool zero = false;
  for (const Json& extent : shape) {
    const auto count = as_count(extent);
    if (!count || *count > static_cast<std::uint64_t>(INT64_MAX))
      return bad(field + ".shape", "extents that are integers from 0 to 2^63 - 1", shown(extent.dump()));
    entry.shape.push_back(static_cast<std::int64_t>(*count));
    zero = zero || *count == 0;
  }
  for (std::int64_t extent : entry.shape) {
    if (zero) break;
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes))
      return bad(field + ".shape", "a size that fits 64 bits", shape_text(entry.shape));
  }
  if (zero) bytes = 0;
  return {};
}

Status parse_entry(const std::string& field, const Json& json, std::uint64_t data_bytes, TensorEntry& entry) {
  if (!json.is_object()) return bad(field, "an object with dtype, shape and data_offsets", json.type_name());
  for (const auto& [key, value] : json.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      return bad(field, "only dtype, shape and data_offsets", shown(key));
  if (!json.contains("dtype") || !json["dtype"].is_string()) return bad(field + ".dtype", "a string", "none");
  const auto& name = json["dtype"].get_ref<const std::string&>();
  const auto* row =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const DtypeRow& r) { return name == r.name; });
  entry.dtype = row == std::end(kDtypes) ? FileDtype::other : row->dtype;

  if (!json.contains("shape")) return bad(field + ".shape", "a list of extents", "none");
  std::uint64_t bytes = 0;
  if (Status status = parse_shape(field, json["shape"], entry, bytes); !status.ok()) return status;

  const bool has_offsets =
      json.contains("data_offsets") && json["data_offsets"].is_array() && json["data_offsets"].size() == 2;
  if (!has_offsets) return bad(field + ".data_offsets", "two byte offsets", "something else");
  const auto begin = as_count(json["data_offsets"][0]), end = as_count(json["data_offsets"][1]);
  if (!begin || !end || *begin > *end)
    return bad(field + ".data_offsets", "begin <= end", shown(json["data_offsets"].dump()));
  if (*end > data_bytes)
    return bad(field + ".data_offsets", fmt::format("an end within the {} data bytes of the file", data_bytes),
               fmt::format("{} (is the file truncated?)", *end));
  if (entry.dtype != FileDtype::other && *end - *begin != bytes)
    return bad(field + ".data_offsets", fmt::format("{} bytes for {} {}", bytes, name, shape_text(entry.shape)),
               fmt::format("{}", *end - *begin));
  entry.begin = *begin;
  entry.end = *end;
  return {};
}

// The format wants every data byte to belong to exactly one tensor.
Status check_tiling(const SafetensorsHeader& header, std::uint64_t data_bytes) {
  struct Range {
    std::uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.tensors) ranges.push_back({entry.begin, entry.end, &name});
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  std::uint64_t covered = 0;
  for (const Range& range : ranges) {
    if (range.begin != covered)
      return bad("tensor " + shown(*range.name) + ".data_offsets",
                 fmt::format("a begin of {}: no gap, no overlap", covered), fmt::format("{}", range.begin));
    covered = range.end;
  }
  if (covered != data_bytes)
    return bad("safetensors data", fmt::format("{} bytes, as the header says", covered), fmt::format("{}", data_bytes));
  return {};
}

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

// The length field, checked against the bytes that are there.
Result<std::uint64_t> header_length(const unsigned char (&field)[8], std::uint64_t file_bytes) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | field[i];
  if (length > kMaxHeaderBytes)
    return bad("safetensors header", fmt::format("a length of at most {} bytes", kMaxHeaderBytes),
               fmt::format("{} (is this a safetensors file?)", length));
  if (length > file_bytes - 8)
    return bad("safetensors header", fmt::format("{} bytes, as the length field says", length),
               fmt::format("{} to the end of the file (truncated?)", file_bytes - 8));
  return length;
}

Status too_short(std::uint64_t bytes) { return bad("safetensors file", "at least 8 bytes", fmt::format("{}", bytes)); }

}  // namespace

std::size_t file_dtype_bytes(FileDtype dtype) { return row_of(dtype).bytes; }
const char* file_dtype_name(FileDtype dtype) { return row_of(dtype).name; }

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Result<SafetensorsHeader> parse_safetensors_header(std::string_view json_text, std::uint64_t data_bytes) {
  // The parser takes a NUL for the end, and skips spaces and a byte order mark.
  if (json_text.find('\0') != std::string_view::npos) return bad("safetensors header", "JSON in UTF-8", "a NUL byte");
  HeaderGuard guard;
  if (!Json::sax_parse(json_text, &guard))
    return guard.problem().empty() ? bad("safetensors header", "JSON in UTF-8", "something else")
                                   : bad("safetensors header", "an object of tensors", guard.problem());
  const Json json = Json::parse(json_text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return bad("safetensors header", "a JSON object", json.type_name());
  if (!json_text.starts_with('{'))
    return bad("safetensors header", "a JSON object, from its first byte on", "something before it");

  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return bad("__metadata__", "an object of strings", value.type_name());
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return bad("__metadata__ " + shown(key), "a string", text.type_name());
        header.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    if (Status status = parse_entry("tensor " + shown(name), value, data_bytes, header.tensors[name]); !status.ok())
      return status;
  }
  if (Status status = check_tiling(header, data_bytes); !status.ok()) return status;
  return header;
}

void AlignedBytes::Free::operator()(std::byte* pointer) const { std::free(pointer); }

Result<AlignedBytes> AlignedBytes::make(std::size_t bytes) {
  AlignedBytes result;
  if (bytes == 0) return result;
  if (bytes > SIZE_MAX - 63) return Status(Code::out_of_memory, "memory", "less", fmt::format("{} bytes", bytes));
  result.data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
  if (!result.data_) return Status(Code::out_of_memory, "memory", fmt::format("{} bytes", bytes), "none");
  result.size_ = bytes;
  return result;
}

const FileTensor* Safetensors::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

const std::string* Safetensors::find_metadata(std::string_view name) const {
  const auto it = metadata_.find(name);
  return it == metadata_.end() ? nullptr : &it->second;
}

Result<Safetensors> Safetensors::adopt(SafetensorsHeader header, AlignedBytes data) {
  Safetensors result;
  result.metadata_ = std::move(header.metadata);
  result.data_ = std::move(data);
  for (auto& [name, entry] : header.tensors) {
    FileTensor& tensor = result.tensors_[name];
    tensor.dtype = entry.dtype;
    tensor.shape = std::move(entry.shape);
    if (entry.end == entry.begin) continue;
    const std::size_t bytes = entry.end - entry.begin;
    std::byte* at = result.data_.data() + entry.begin;
    if (entry.begin % file_dtype_bytes(entry.dtype) != 0) {
      Result<AlignedBytes> copy = AlignedBytes::make(bytes);
      if (!copy) return copy.status();
      std::memcpy(copy->data(), at, bytes);
      at = copy->data();
      result.realigned_.push_back(std::move(*copy));
    }
    tensor.bytes = {at, bytes};
  }
  return result;
}

Result<Safetensors> Safetensors::parse(std::span<const std::byte> file) {
  if (file.size() < 8) return too_short(file.size());
  unsigned char field[8];
  std::memcpy(field, file.data(), 8);
  const Result<std::uint64_t> length = header_length(field, file.size());
  if (!length) return length.status();
  const std::string_view json(reinterpret_cast<const char*>(file.data()) + 8, *length);
  const std::span<const std::byte> body = file.subspan(8 + *length);
  Result<SafetensorsHeader> header = parse_safetensors_header(json, body.size());
  if (!header) return header.status();
  Result<AlignedBytes> data = AlignedBytes::make(body.size());
  if (!data) return data.status();
  if (!body.empty()) std::memcpy(data->data(), body.data(), body.size());
  return adopt(std::move(*header), std::move(*data));
}

Result<Safetensors> Safetensors::load(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return bad("file " + path, "a regular file", "a directory");
  errno = 0;
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file) return io_error(path, "a file that can be read");
  if (std::fseek(file.get(), 0, SEEK_END) != 0) return io_error(path, "a file with a size");
  const long end = std::ftell(file.get());
  if (end < 0) return io_error(path, "a regular file");
  std::rewind(file.get());
  const auto file_bytes = static_cast<std::uint64_t>(end);
  if (file_bytes < 8) return too_short(file_bytes);
  unsigned char field[8];
  if (std::fread(field, 1, 8, file.get()) != 8) return io_error(path, "8 bytes");
  const Result<std::uint64_t> length = header_length(field, file_bytes);
  if (!length) return length.status();
  std::string json(*length, '\0');
  if (std::fread(json.data(), 1, json.size(), file.get()) != json.size()) return io_error(path, "its header");
  const std::uint64_t data_bytes = file_bytes - 8 - *length;
  Result<SafetensorsHeader> header = parse_safetensors_header(json, data_bytes);
  if (!header) return header.status();
  Result<AlignedBytes> data = AlignedBytes::make(data_bytes);
  if (!data) return data.status();
  if (data_bytes > 0 && std::fread(data->data(), 1, data_bytes, file.get()) != data_bytes)
    return io_error(path, "its tensors");
  return adopt(std::move(*header), std::move(*data));
}

Status save_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                        const std::map<std::string, std::string, std::less<>>& metadata) {
  // Wide types first, so that every tensor is aligned for its dtype.
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return file_dtype_bytes(a->dtype) > file_dtype_bytes(b->dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  std::uint64_t offset = 0;
  for (const TensorToWrite* tensor : order) {
    const std::uint64_t end = offset + tensor->bytes.size();
    header[tensor->name] = {
        {"dtype", file_dtype_name(tensor->dtype)}, {"shape", tensor->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string json = header.dump();
  json.resize((json.size() + 63) / 64 * 64, ' ');
  // The length field's 8 bytes keep the data 8-byte aligned in the file.
  unsigned char field[8];
  for (int i = 0; i < 8; ++i) field[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(json.size()) >> (8 * i));

  errno = 0;
  File file(std::fopen(path.c_str(), "wb"));
  if (!file) return io_error(path, "a file that can be written");
  bool written =
      std::fwrite(field, 1, 8, file.get()) == 8 && std::fwrite(json.data(), 1, json.size(), file.get()) == json.size();
  for (const TensorToWrite* tensor : order) {
    if (tensor->bytes.empty()) continue;
    written = written && std::fwrite(tensor->bytes.data(), 1, tensor->bytes.size(), file.get()) == tensor->bytes.size();
  }
  written = std::fclose(file.release()) == 0 && written;
  if (!written) return io_error(path, "room to write it");
  return {};
}

}  // namespace latte::cli
