#include "cli/safetensors.hpp"

#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "program.hpp"

namespace latte::cli {
namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A file of a header and `data_bytes` bytes 0, 1, 2, ...
std::string file_of(const std::string& json, std::size_t data_bytes) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[static_cast<std::size_t>(i)] = static_cast<char>(json.size() >> (8 * i));
  file += json;
  for (std::size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

TEST(Safetensors, WhatIsSavedIsLoaded) {
  const std::vector<std::int32_t> ints = {1, -2, 3, 4, 5, 6};
  const std::vector<std::int64_t> wide = {-1, std::int64_t{1} << 40};
  const std::string bytes = "abc";
  const TensorToWrite tensors[] = {
      {.name = "bytes", .dtype = FileDtype::u8, .shape = {3}, .bytes = as_bytes(bytes)},
      {.name = "ints", .dtype = FileDtype::i32, .shape = {2, 3}, .bytes = std::as_bytes(std::span(ints))},
      {.name = "wide", .dtype = FileDtype::i64, .shape = {2}, .bytes = std::as_bytes(std::span(wide))},
      {.name = "nothing", .dtype = FileDtype::f32, .shape = {0, 7}, .bytes = {}},
  };
  const std::string path = (cli_test::scratch() / "round.safetensors").string();
  ASSERT_TRUE(save_safetensors(path, tensors, {{"op", "decode"}, {"quote", "\"\\\n"}}).ok());
  const auto file = Safetensors::load(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->tensors().size(), 4u);
  ASSERT_NE(file->find("ints"), nullptr);
  EXPECT_EQ(file->find("ints")->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(file->find("ints")->bytes.data(), ints.data(), 24), 0);
  EXPECT_EQ(std::memcmp(file->find("wide")->bytes.data(), wide.data(), 16), 0);
  EXPECT_EQ(std::memcmp(file->find("bytes")->bytes.data(), bytes.data(), 3), 0);
  EXPECT_EQ(file->find("nothing")->elements(), 0);
  EXPECT_EQ(file->find("other"), nullptr);
  ASSERT_NE(file->find_metadata("quote"), nullptr);
  EXPECT_EQ(*file->find_metadata("quote"), "\"\\\n");
}

TEST(Safetensors, ATruncationAtAnyByteIsAnError) {
  const std::string whole =
      file_of(R"({"__metadata__":{"op":"decode"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
              R"("b":{"dtype":"I32","shape":[2],"data_offsets":[12,20]}})",
              20);
  ASSERT_TRUE(Safetensors::parse(as_bytes(whole)).ok());
  const std::string path = (cli_test::scratch() / "cut.safetensors").string();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const std::string cut = whole.substr(0, length);
    EXPECT_FALSE(Safetensors::parse(as_bytes(cut)).ok()) << length;
    std::ofstream(path, std::ios::binary) << cut;
    EXPECT_FALSE(Safetensors::load(path).ok()) << length;
  }
  EXPECT_FALSE(Safetensors::parse(as_bytes(whole + "x")).ok()) << "one byte too many";
}

// A captured file may hold more than a call has.
TEST(Safetensors, TensorsOfOtherDtypesAreRead) {
  const auto file = Safetensors::parse(as_bytes(file_of(R"({"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},)"
                                                        R"("b":{"dtype":"BOOL","shape":[3],"data_offsets":[16,19]}})",
                                                        19)));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->find("a")->dtype, FileDtype::other);
  EXPECT_EQ(file->find("b")->bytes.size(), 3u);
}

TEST(Safetensors, AnyChangedByteGivesTensorsWithinTheFileOrAnError) {
  const std::string whole = file_of(
      R"({"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"U8","shape":[],"data_offsets":[12,13]}})",
      13);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = whole;
      changed[at] = static_cast<char>(value);
      const auto file = Safetensors::parse(as_bytes(changed));
      if (!file.ok()) continue;
      std::size_t bytes = 0;
      for (const auto& [name, tensor] : file->tensors()) bytes += tensor.bytes.size();
      EXPECT_EQ(bytes, 13u) << "byte " << at << " = " << value;
    }
  }
}

TEST(Safetensors, MalformedHeadersAreRefusedWithAReason) {
  const auto tensor = [](const std::string& fields) { return "{\"t\":{" + fields + "}}"; };
  const struct {
    const char* what;
    std::string json;
    std::size_t data_bytes;
    const char* message;  // a part of it
  } rows[] = {
      {"no JSON", "nonsense", 0, "JSON"},
      {"an empty header", "", 0, "JSON"},
      {"a list", "[]", 0, "a JSON object"},
      {"a number", "1", 0, "a JSON object"},
      {"bad UTF-8", "{\"\xff\":1}", 0, "JSON in UTF-8"},
      {"text behind the object", "{} x", 0, "JSON"},
      {"text behind a NUL", std::string("{}\0}}", 5), 0, "a NUL byte"},
      {"a space first", " {}", 0, "a JSON object, from its first byte on"},
      {"a byte order mark", "\xef\xbb\xbf{}", 0, "a JSON object, from its first byte on"},
      {"a tensor that is a number", R"({"t":1})", 0, "an object with dtype"},
      {"no dtype", tensor(R"("shape":[1],"data_offsets":[0,1])"), 1, "t'.dtype"},
      {"a number as dtype", tensor(R"("dtype":1,"shape":[1],"data_offsets":[0,1])"), 1, "t'.dtype"},
      {"a shape of another dtype", tensor(R"("dtype":"F7","shape":["a"],"data_offsets":[0,1])"), 1, "t'.shape"},
      {"no shape", tensor(R"("dtype":"U8","data_offsets":[0,1])"), 1, "t'.shape"},
      {"a shape that is a number", tensor(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"), 1, "t'.shape"},
      {"a negative extent", tensor(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1, "got '-1'"},
      {"a fractional extent", tensor(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), 1, "got '1.0'"},
      {"a text extent", tensor(R"("dtype":"U8","shape":["1"],"data_offsets":[0,1])"), 1, "t'.shape"},
      {"an extent of 2^63", tensor(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1])"), 1,
       "t'.shape"},
      {"a product past 64 bits", tensor(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "64 bits"},
      {"a product that wraps by the dtype",
       tensor(R"("dtype":"I64","shape":[2305843009213693952],"data_offsets":[0,0])"), 0, "64 bits"},
      {"nine dimensions", tensor(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])"), 1, "at most 8"},
      {"no offsets", tensor(R"("dtype":"U8","shape":[1])"), 1, "data_offsets"},
      {"one offset", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), 1, "data_offsets"},
      {"three offsets", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,2])"), 2, "data_offsets"},
      {"negative offsets", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[-1,0])"), 1, "data_offsets"},
      {"offsets that fall", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), 1, "begin <= end"},
      {"an end past the file", tensor(R"("dtype":"U8","shape":[9],"data_offsets":[0,9])"), 8, "truncated"},
      {"an end of 2^64 - 1", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615])"), 1,
       "truncated"},
      {"too few bytes for the shape", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,7])"), 7,
       "8 bytes for F32 [2]"},
      {"too many bytes for the shape", tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,5])"), 5,
       "4 bytes for F32 [1]"},
      {"an unknown field", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1)"), 1, "got 'x'"},
      {"overlapping tensors",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
       7, "no overlap"},
      {"the same bytes twice",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "no overlap"},
      {"a gap between tensors",
       R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
       5, "no gap"},
      {"a gap at the start", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), 2, "no gap"},
      {"bytes of no tensor at the end", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])"), 2,
       "1 bytes, as the header says"},
      {"the same name twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "'a' twice"},
      {"the same field twice", tensor(R"("dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1])"), 1,
       "'dtype' twice"},
      {"metadata that is a list", R"({"__metadata__":[]})", 0, "__metadata__"},
      {"metadata of numbers", R"({"__metadata__":{"scale":0.1}})", 0, "a string"},
      {"nesting without end", std::string(100000, '['), 0, "nesting"},
      {"objects without end",
       [] {
         std::string text;
         for (int i = 0; i < 10000; ++i) text += "{\"a\":";
         return text;
       }(),
       0, "nesting"},
      // Refused while it is read, which takes long otherwise.
      {"a million tensors",
       [] {
         std::string text = "{";
         for (int i = 0; i < 1'000'000; ++i) text += "\"" + std::to_string(i) + "\":{},";
         return text;
       }(),
       0, "more than 65536 tensors"},
      {"a million extents",
       [] {
         std::string text = R"({"t":{"shape":[)";
         for (int i = 0; i < 1'000'000; ++i) text += "1,";
         return text;
       }(),
       0, "more than 65536 values"},
  };
  for (const auto& row : rows) {
    const std::string bytes = file_of(row.json, row.data_bytes);
    const auto file = Safetensors::parse(as_bytes(bytes));
    ASSERT_FALSE(file.ok()) << row.what;
    EXPECT_NE(file.status().message().find(row.message), std::string::npos)
        << row.what << ": " << file.status().message();
  }
}

TEST(Safetensors, AnAbsurdHeaderLengthIsRefusedBeforeItIsRead) {
  for (const std::uint64_t length :
       {std::uint64_t{100'000'001}, std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    std::string file(16, '{');
    std::memcpy(file.data(), &length, 8);
    EXPECT_FALSE(Safetensors::parse(as_bytes(file)).ok()) << length;
  }
}

TEST(Safetensors, TensorsAtOddOffsetsAreAlignedInMemory) {
  const std::string bytes = file_of(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I64","shape":[1],"data_offsets":[1,9]}})",
      9);
  const auto file = Safetensors::parse(as_bytes(bytes));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const FileTensor* tensor = file->find("b");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor->bytes.data()) % 8, 0u);
  EXPECT_EQ(*reinterpret_cast<const std::int64_t*>(tensor->bytes.data()), 0x0807060504030201);
}

TEST(Safetensors, FilesThatCannotBeOpenedAreErrors) {
  EXPECT_FALSE(Safetensors::load("/nonexistent/file.safetensors").ok());
  EXPECT_FALSE(Safetensors::load(cli_test::scratch().string()).ok()) << "a directory";
  EXPECT_FALSE(Safetensors::load("/dev/null").ok());
  EXPECT_FALSE(save_safetensors("/nonexistent/file.safetensors", {}, {}).ok());
}

}  // namespace
}  // namespace latte::cli
