#include "cli/captured.hpp"

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "program.hpp"

namespace latte::cli {
namespace {

constexpr std::int64_t kWide = std::int64_t{1} << 40;

// The parts of a small captured call, to be spoiled one by one.
struct Parts {
  struct Tensor {
    FileDtype dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string, std::less<>> metadata;

  template <class T>
  void set(const std::string& name, FileDtype dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
    Tensor tensor{dtype, std::move(shape), std::vector<std::byte>(values.size() * sizeof(T))};
    if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    tensors[name] = std::move(tensor);
  }
  void zeros(const std::string& name, FileDtype dtype, std::vector<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : shape) elements *= extent;
    const auto bytes = static_cast<std::size_t>(elements) * file_dtype_bytes(dtype);
    tensors[name] = {dtype, std::move(shape), std::vector<std::byte>(bytes)};
  }

  static Parts good() {
    Parts parts;
    parts.zeros("q", FileDtype::bf16, {3, 2, 32});
    parts.zeros("kv_cache", FileDtype::bf16, {4, 8, 32});
    parts.set<std::int32_t>("block_table", FileDtype::i32, {2, 2}, {3, 1, 0, 99});
    parts.set<std::int32_t>("seq_lens", FileDtype::i32, {2}, {10, 8});
    parts.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 2, 3});
    parts.metadata = {{"op", "decode"},      {"scale", "0.25"}, {"mask", "causal"},
                      {"kv_format", "bf16"}, {"latent", "16"},  {"rope", "16"}};
    return parts;
  }

  Result<Safetensors> file() const {
    std::vector<TensorToWrite> list;
    for (const auto& [name, tensor] : tensors) list.push_back({name, tensor.dtype, tensor.shape, tensor.bytes});
    const std::string path = (cli_test::scratch() / "parts.safetensors").string();
    if (Status status = save_safetensors(path, list, metadata); !status.ok()) return status;
    return Safetensors::load(path);
  }
};

TEST(Captured, AGoodFileGivesTheWholeCall) {
  const auto file = Parts::good().file();
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto call = read_captured(*file);
  ASSERT_TRUE(call.ok()) << call.status().message();
  EXPECT_EQ(call->problem.heads, 2);
  EXPECT_EQ(call->problem.latent, 16);
  EXPECT_EQ(call->problem.rope, 16);
  EXPECT_EQ(call->problem.page_size, 8);
  EXPECT_EQ(call->rows, 3);
  EXPECT_FLOAT_EQ(call->args.scale, 0.25f);
  EXPECT_EQ(call->seq_lens, (std::vector<std::int32_t>{10, 8}));
  EXPECT_EQ(call->limits().max_kv_tokens, 10);
  EXPECT_EQ(call->limits().max_query_tokens, 2);
}

TEST(Captured, EnginesMayWriteWideIntegersAFourthDimensionAndThePair) {
  Parts parts = Parts::good();
  parts.tensors.erase("q");
  parts.zeros("q_nope", FileDtype::f16, {3, 2, 16});
  parts.zeros("q_pe", FileDtype::f16, {3, 2, 16});
  parts.zeros("kv_cache", FileDtype::u8, {4, 8, 1, 32});
  parts.set<std::int64_t>("block_table", FileDtype::i64, {2, 2}, {3, 1, 0, kWide});
  parts.set<std::int64_t>("seq_lens", FileDtype::i64, {2}, {10, 8});
  parts.set<float>("kv_scale", FileDtype::f32, {1}, {0.5f});
  parts.metadata = {{"scale", "1e-1"}, {"kv_format", "fp8_e4m3"}};
  const auto file = parts.file();
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto call = read_captured(*file);
  ASSERT_TRUE(call.ok()) << call.status().message();
  EXPECT_EQ(call->problem.kv_format, KvFormat::fp8_e4m3);
  EXPECT_EQ(call->problem.mask, Mask::causal);
  EXPECT_EQ(call->problem.q_dtype, Dtype::f16);
  EXPECT_FLOAT_EQ(call->args.kv_scale.value, 0.5f);
  EXPECT_EQ(call->block_table, (std::vector<std::int32_t>{3, 1, 0, -1}));
}

TEST(Captured, PageIdsOfARequestWithoutQueryTokensMayBeAnything) {
  Parts parts = Parts::good();
  parts.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 3, 3});
  parts.set<std::int64_t>("block_table", FileDtype::i64, {2, 2}, {3, 1, kWide, -kWide});
  const auto file = parts.file();
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto call = read_captured(*file);
  ASSERT_TRUE(call.ok()) << call.status().message();
  EXPECT_EQ(call->block_table, (std::vector<std::int32_t>{3, 1, -1, -1}));
}

TEST(Captured, ARequestWithoutQueryTokensNeedsNoPages) {
  Parts parts = Parts::good();
  parts.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 3, 3});
  parts.set<std::int32_t>("seq_lens", FileDtype::i32, {2}, {10, 300});
  const auto file = parts.file();
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto call = read_captured(*file);
  ASSERT_TRUE(call.ok()) << call.status().message();
  EXPECT_EQ(call->seq_lens, (std::vector<std::int32_t>{10, 300}));
}

TEST(Captured, EveryWrongPartIsNamed) {
  const struct {
    const char* what;
    std::function<void(Parts&)> spoil;
    const char* message;  // a part of it
  } rows[] = {
      {"another op", [](Parts& p) { p.metadata["op"] = "prefill"; }, "metadata op"},
      {"no scale", [](Parts& p) { p.metadata.erase("scale"); }, "metadata scale"},
      {"a scale that is no number", [](Parts& p) { p.metadata["scale"] = "0.1x"; }, "metadata scale"},
      {"an infinite scale", [](Parts& p) { p.metadata["scale"] = "inf"; }, "metadata scale"},
      {"an unknown mask", [](Parts& p) { p.metadata["mask"] = "tree"; }, "mask"},
      {"an unknown format", [](Parts& p) { p.metadata["kv_format"] = "int4"; }, "kv_format"},
      {"a latent width of text", [](Parts& p) { p.metadata["latent"] = "wide"; }, "metadata latent"},
      {"a rope width of 0", [](Parts& p) { p.metadata["rope"] = "0"; }, "metadata rope"},
      {"a scale of lines and colours", [](Parts& p) { p.metadata["scale"] = "1\nlatte: \x1b[31mok"; },
       "got '1?latte: ?[31mok'"},
      {"a mask of two lines", [](Parts& p) { p.metadata["mask"] = "tree\nlatte: ok"; }, "got 'tree?latte: ok'"},
      {"a scale that does not end", [](Parts& p) { p.metadata["scale"] = std::string(5000, '1'); },
       "got '111111111111111111111111111111111111111111111111111111111111...'"},
      {"a pair whose extents multiply to more than 2^63",
       [](Parts& p) {
         p.tensors.erase("q");
         p.zeros("q_nope", FileDtype::f32, {0, 2147483647, std::int64_t{1} << 62});
         p.zeros("q_pe", FileDtype::f32, {0, 2147483647, std::int64_t{1} << 62});
       },
       "q_nope: expected a width"},
      {"a huge width", [](Parts& p) { p.metadata["latent"] = "99999999999999999999"; }, "metadata latent"},
      {"no query", [](Parts& p) { p.tensors.erase("q"); }, "q: expected either"},
      {"both query forms",
       [](Parts& p) {
         p.zeros("q_nope", FileDtype::bf16, {3, 2, 16});
         p.zeros("q_pe", FileDtype::bf16, {3, 2, 16});
       },
       "q: expected either"},
      {"half of the pair",
       [](Parts& p) {
         p.tensors.erase("q");
         p.zeros("q_nope", FileDtype::bf16, {3, 2, 16});
       },
       "q: expected either"},
      {"a pair of two dtypes",
       [](Parts& p) {
         p.tensors.erase("q");
         p.zeros("q_nope", FileDtype::bf16, {3, 2, 16});
         p.zeros("q_pe", FileDtype::f16, {3, 2, 16});
       },
       "q_pe"},
      {"a pair that metadata contradicts",
       [](Parts& p) {
         p.tensors.erase("q");
         p.zeros("q_nope", FileDtype::bf16, {3, 2, 32});
         p.zeros("q_pe", FileDtype::bf16, {3, 2, 16});
       },
       "q_nope and q_pe"},
      {"a query of integers",
       [](Parts& p) {
         p.zeros("q", FileDtype::i32, {3, 2, 32});
       },
       "q: expected BF16"},
      {"a flat query",
       [](Parts& p) {
         p.zeros("q", FileDtype::bf16, {6, 32});
       },
       "q: expected a shape"},
      {"a query without heads",
       [](Parts& p) {
         p.zeros("q", FileDtype::bf16, {3, 0, 32});
       },
       "q: expected a shape"},
      {"a query of another width",
       [](Parts& p) {
         p.zeros("q", FileDtype::bf16, {3, 2, 33});
       },
       "32 columns"},
      {"no cache", [](Parts& p) { p.tensors.erase("kv_cache"); }, "kv_cache"},
      {"a flat cache",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::bf16, {32, 32});
       },
       "kv_cache"},
      {"pages of no tokens",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::bf16, {4, 0, 32});
       },
       "page_size"},
      {"pages of 2^31 tokens",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::bf16, {0, std::int64_t{1} << 31, 32});
       },
       "page_size"},
      {"a cache of another width",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::bf16, {4, 8, 31});
       },
       "kv_cache"},
      {"a cache of another dtype",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::f32, {4, 8, 32});
       },
       "kv_cache"},
      {"bytes without a format",
       [](Parts& p) {
         p.zeros("kv_cache", FileDtype::u8, {4, 8, 32});
         p.metadata.erase("kv_format");
       },
       "metadata kv_format"},
      {"no lengths", [](Parts& p) { p.tensors.erase("seq_lens"); }, "seq_lens"},
      {"lengths of floats", [](Parts& p) { p.zeros("seq_lens", FileDtype::f32, {2}); }, "seq_lens"},
      {"a negative length",
       [](Parts& p) {
         p.set<std::int32_t>("seq_lens", FileDtype::i32, {2}, {10, -8});
       },
       "seq_lens[1]"},
      {"a length of more than 32 bits",
       [](Parts& p) {
         p.set<std::int64_t>("seq_lens", FileDtype::i64, {2}, {10, kWide});
       },
       "seq_lens[1]: expected a number of 32 bits, got 1099511627776"},
      {"a query start of more than 32 bits",
       [](Parts& p) {
         p.set<std::int64_t>("query_start", FileDtype::i64, {3}, {0, -kWide, 3});
       },
       "query_start[1]: expected a number of 32 bits, got -1099511627776"},
      {"a page id in use of more than 32 bits",
       [](Parts& p) {
         p.set<std::int64_t>("block_table", FileDtype::i64, {2, 2}, {3, kWide, 0, 1});
       },
       "block_table: expected page ids in [0, 4), got 1099511627776 as page 1 of request 0"},
      {"a length past the block table",
       [](Parts& p) {
         p.set<std::int32_t>("seq_lens", FileDtype::i32, {2}, {17, 8});
       },
       "block_table"},
      {"no query starts", [](Parts& p) { p.tensors.erase("query_start"); }, "query_start"},
      {"too few query starts", [](Parts& p) { p.zeros("query_start", FileDtype::i32, {2}); }, "query_start"},
      {"query starts that fall",
       [](Parts& p) {
         p.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 3, 2});
       },
       "query_start[2]"},
      {"query starts not from 0",
       [](Parts& p) {
         p.set<std::int32_t>("query_start", FileDtype::i32, {3}, {1, 2, 3});
       },
       "query_start[0]"},
      {"query starts past q",
       [](Parts& p) {
         p.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 2, 4});
       },
       "query_start[2]"},
      {"no block table", [](Parts& p) { p.tensors.erase("block_table"); }, "block_table"},
      {"a flat block table", [](Parts& p) { p.zeros("block_table", FileDtype::i32, {4}); }, "block_table"},
      {"a block table of other requests",
       [](Parts& p) {
         p.zeros("block_table", FileDtype::i32, {3, 2});
       },
       "block_table"},
      {"two cache scales", [](Parts& p) { p.zeros("kv_scale", FileDtype::f32, {2}); }, "kv_scale"},
      {"a query scale in half precision", [](Parts& p) { p.zeros("q_scale", FileDtype::f16, {1}); }, "q_scale"},
      {"an expectation of another shape",
       [](Parts& p) {
         p.zeros("expect.out", FileDtype::f32, {3, 2, 32});
       },
       "expect.out"},
      {"an expected LSE of integers",
       [](Parts& p) {
         p.zeros("expect.lse", FileDtype::i32, {3, 2});
       },
       "expect.lse"},
  };
  for (const auto& row : rows) {
    Parts parts = Parts::good();
    row.spoil(parts);
    const auto file = parts.file();
    ASSERT_TRUE(file.ok()) << row.what << ": " << file.status().message();
    const auto call = read_captured(*file);
    ASSERT_FALSE(call.ok()) << row.what;
    EXPECT_NE(call.status().message().find(row.message), std::string::npos)
        << row.what << ": " << call.status().message();
  }
}

}  // namespace
}  // namespace latte::cli
