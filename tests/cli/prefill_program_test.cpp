// Prefill as the program's users meet it.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/captured_prefill.hpp"
#include "cli/options.hpp"
#include "program.hpp"

namespace latte::cli_test {
namespace {

using cli::FileDtype;
using cli::Safetensors;
using Json = nlohmann::json;

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

std::string path_of(const char* name) { return (scratch() / name).string(); }

TEST(PrefillProgram, ABenchRowHasTheKeysOfDecodeAndItsArithmetic) {
  const ProgramRun run = run_latte({"bench", "--op", "prefill", "--spec", "2q32", "q3s40", "--heads", "2", "--policy",
                                    "uniform:1", "--dtype", "fp8", "--repeats", "3", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const std::vector<Json> rows = json_lines(run.out);
  ASSERT_EQ(rows.size(), 2u);
  const std::set<std::string> keys = {"samples", "op",     "backend",  "kernel",     "spec",       "heads",   "page",
                                      "kv",      "policy", "time_us",  "spread_us",  "plan_us",    "bytes",   "flops",
                                      "gbps",    "tflops", "floor_us", "over_floor", "ceilings",   "machine", "commit",
                                      "math",    "mask",   "qk_width", "v_width",    "working_set"};
  const double pairs[] = {2 * 32 * 33 / 2, 38 + 39 + 40}, queries[] = {64, 3}, tokens[] = {64, 40};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::set<std::string> found;
    for (const auto& [key, value] : rows[i].items()) found.insert(key);
    EXPECT_EQ(found, keys);
    EXPECT_EQ(rows[i]["op"], "prefill");
    EXPECT_EQ(rows[i]["kv"], "fp8_e4m3");
    EXPECT_EQ(rows[i]["math"], "half");
    EXPECT_EQ(rows[i]["mask"], "causal");
    EXPECT_EQ(rows[i]["qk_width"], 192);
    EXPECT_EQ(rows[i]["v_width"], 128);
    EXPECT_EQ(rows[i]["policy"], "uniform:1");
    EXPECT_EQ(rows[i]["samples"], 3);
    EXPECT_DOUBLE_EQ(rows[i]["flops"].get<double>(), 2 * 2 * 320 * pairs[i]);
    EXPECT_DOUBLE_EQ(rows[i]["bytes"].get<double>(), 2 * (queries[i] * (192 + 128 * 2) + tokens[i] * 320));
    EXPECT_GT(rows[i]["time_us"].get<double>(), 0);
    EXPECT_GT(rows[i]["plan_us"].get<double>(), 0);
    EXPECT_GT(rows[i]["ceilings"]["tflops"].get<double>(), 0);
  }
}

TEST(PrefillProgram, ABenchTableNamesDtypeAndMath) {
  const ProgramRun run = run_latte({"bench", "--op", "prefill", "--spec", "2q40", "--heads", "1", "3", "--dtype", "f16",
                                    "--math", "fp8", "--repeats", "3", "--working-set", "1M"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* text : {"ceilings for", "math", "dtype", "half", "f16", "2q40"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
}

TEST(PrefillProgram, CheckRunsWhatItIsAskedFor) {
  const ProgramRun run = run_latte({"check", "--quick", "--op", "prefill", "--kernel", "auto", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  const Json json = Json::parse(run.out);
  EXPECT_EQ(json["failed"], 0);
  EXPECT_GT(json["runs"].get<int>(), 30);
  std::set<std::string> formats;
  for (const Json& group : json["groups"]) {
    EXPECT_EQ(group["op"], "prefill");
    formats.insert(group["kv"].get<std::string>());
    EXPECT_LE(group["out_error"].get<double>(), group["out_allowed"].get<double>());
  }
  EXPECT_EQ(formats, (std::set<std::string>{"bf16", "f16", "f32", "fp8_e4m3"}));
}

TEST(PrefillProgram, InfoSaysWhatRunsForFp8TensorsAndWhy) {
  const ProgramRun run = run_latte({"info", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json info = Json::parse(run.out);
  ASSERT_EQ(info["prefill"].size(), 4u);
  for (const Json& row : info["prefill"]) {
    EXPECT_EQ(row["math"], "half") << row;
    EXPECT_NE(row["kernel"], "none") << row;
    EXPECT_NE(row["reason"], "") << row;
    if (row["dtype"] == "fp8_e4m3") {
      EXPECT_NE(row["reason"].get<std::string>().find("fp8"), std::string::npos) << row;
    }
  }
  EXPECT_NE(run_latte({"info"}).out.find("Prefill"), std::string::npos);
}

TEST(PrefillProgram, BadOptionsAreNamed) {
  const struct {
    std::vector<std::string> arguments;
    const char* message;
  } rows[] = {
      {{"bench", "--op", "prefill", "--spec", "q8", "--dtype", "int4"}, "--dtype"},
      {{"bench", "--op", "prefill", "--spec", "q8", "--math", "exact"}, "math"},
      {{"bench", "--op", "prefill", "--spec", "q8", "--heads", "0"}, "heads"},
      {{"bench", "--op", "prefill", "--spec", "q8", "--overlap", "on"}, "--overlap"},
      {{"check", "--op", "training"}, "--op"},
      {{"capture", "--op", "training", "--spec", "q8", "--out", "x"}, "--op"},
      {{"capture", "--op", "prefill", "--spec", "q8", "--out", "x", "--math", "fp8", "--with-expect"}, "--with-expect"},
  };
  for (const auto& row : rows) {
    const ProgramRun run = run_latte(row.arguments);
    EXPECT_EQ(run.exit_code, 2) << row.message << run.out;
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find(row.message), std::string::npos) << run.err;
  }
}

// Every command that has both ops, every option that only one of them has.
TEST(PrefillProgram, OptionsOfTheOtherOpAreNamed) {
  const std::vector<std::vector<std::string>> commands = {
      {"bench", "--spec", "q8"}, {"plan", "--spec", "q8"}, {"capture", "--spec", "q8", "--out", "/nonexistent/x"}};
  const struct {
    std::vector<std::string> typed;
    const char* op;  // that does not have it
  } rows[] = {
      {{"--latent", "512"}, "prefill"}, {{"--rope", "64"}, "prefill"},  {{"--page", "64"}, "prefill"},
      {{"--kv", "bf16"}, "prefill"},    {{"--q", "bf16"}, "prefill"},   {{"--overlap", "off"}, "prefill"},
      {{"--dtype", "bf16"}, "decode"},  {{"--math", "half"}, "decode"},
  };
  for (const auto& command : commands)
    for (const auto& row : rows) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), {"--op", row.op});
      arguments.insert(arguments.end(), row.typed.begin(), row.typed.end());
      const ProgramRun run = run_latte(arguments);
      EXPECT_EQ(run.exit_code, 2) << command[0] << " " << row.typed[0] << run.out;
      EXPECT_NE(run.err.find(row.typed[0]), std::string::npos) << command[0] << " " << row.typed[0] << run.err;
    }
}

TEST(PrefillProgram, ThePlanFollowsDtypeAndMath) {
  const auto kernel = [](const std::vector<std::string>& typed) {
    std::vector<std::string> arguments = {"plan",      "--op", "prefill",   "--spec", "2q1k",
                                          "--backend", "cuda", "--workers", "132",    "--json"};
    arguments.insert(arguments.end(), typed.begin(), typed.end());
    const ProgramRun run = run_latte(arguments);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return run.exit_code == 0 ? Json::parse(run.out)["kernel"].get<std::string>() : "";
  };
  EXPECT_EQ(kernel({}), "sm90_prefill_bf16");
  EXPECT_EQ(kernel({"--dtype", "fp8"}), "sm90_prefill_fp8");
  EXPECT_EQ(kernel({"--dtype", "fp8", "--math", "half"}), "sm90_prefill_f16");
  EXPECT_EQ(kernel({"--math", "fp8"}), "sm90_prefill_fp8");
}

TEST(PrefillReplay, EveryDtypeMatchesTheOracleAfterARoundTrip) {
  const std::vector<std::vector<std::string>> shapes = {
      {"--dtype", "bf16"}, {"--dtype", "f16", "--mask", "none"},     {"--dtype", "f32", "--heads", "3"},
      {"--dtype", "fp8"},  {"--dtype", "fp8_e4m3", "--math", "fp8"}, {"--model", "deepseek-v3", "--tp", "32"},
  };
  for (const auto& shape : shapes) {
    const std::string file = path_of("prefill.safetensors"), result = path_of("prefill_out.safetensors");
    std::vector<std::string> capture = {"capture",         "--op",  "prefill", "--spec",
                                        "2q70_q3s20_q1s0", "--out", file,      "--with-expect"};
    capture.insert(capture.end(), shape.begin(), shape.end());
    const ProgramRun captured = run_latte(capture);
    ASSERT_EQ(captured.exit_code, 0) << shape[1] << captured.err;
    const ProgramRun run = run_latte({"run", file, "--out", result, "--policy", "uniform:2"});
    EXPECT_EQ(run.exit_code, 0) << shape[1] << run.out << run.err;
    EXPECT_NE(run.out.find("matches"), std::string::npos) << run.out;
    EXPECT_NE(run.out.find("half arithmetic"), std::string::npos) << run.out;
    const auto written = Safetensors::load(result);
    ASSERT_TRUE(written.ok()) << written.status().message();
    const auto source = Safetensors::load(file);
    EXPECT_EQ(written->find("out")->shape, source->find("expect.out")->shape);
    EXPECT_EQ(written->find("lse")->shape, source->find("expect.lse")->shape);
    EXPECT_EQ(*written->find_metadata("op"), "prefill");
  }
}

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
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    tensors[name] = std::move(tensor);
  }
  void zeros(const std::string& name, FileDtype dtype, std::vector<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : shape) elements *= extent;
    const auto bytes = static_cast<std::size_t>(elements) * cli::file_dtype_bytes(dtype);
    tensors[name] = {dtype, std::move(shape), std::vector<std::byte>(bytes)};
  }

  static Parts good() {
    Parts parts;
    parts.zeros("q", FileDtype::bf16, {5, 2, 32});
    parts.zeros("k", FileDtype::bf16, {9, 2, 32});
    parts.zeros("v", FileDtype::bf16, {9, 2, 16});
    parts.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 2, 5});
    parts.set<std::int64_t>("kv_start", FileDtype::i64, {3}, {0, 6, 9});
    parts.metadata = {{"op", "prefill"}, {"scale", "0.25"}, {"mask", "none"}, {"math", "half"}};
    return parts;
  }

  Result<Safetensors> file() const {
    std::vector<cli::TensorToWrite> list;
    for (const auto& [name, tensor] : tensors) list.push_back({name, tensor.dtype, tensor.shape, tensor.bytes});
    const std::string path = path_of("prefill_parts.safetensors");
    if (Status status = cli::save_safetensors(path, list, metadata); !status.ok()) return status;
    return Safetensors::load(path);
  }
};

TEST(CapturedPrefill, AGoodFileGivesTheWholeCall) {
  Parts parts = Parts::good();
  parts.set<float>("k_scale", FileDtype::f32, {2}, {0.5f, 0.25f});
  parts.set<float>("v_scale", FileDtype::f32, {1}, {3.0f});
  const auto file = parts.file();
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto call = cli::read_captured_prefill(*file);
  ASSERT_TRUE(call.ok()) << call.status().message();
  EXPECT_EQ(call->problem.heads, 2);
  EXPECT_EQ(call->problem.qk_width, 32);
  EXPECT_EQ(call->problem.v_width, 16);
  EXPECT_EQ(call->problem.mask, Mask::none);
  EXPECT_EQ(call->problem.math, PrefillMath::half);
  EXPECT_FLOAT_EQ(call->args.scale, 0.25f);
  EXPECT_TRUE(call->args.k_scale.per_head);
  EXPECT_FLOAT_EQ(call->args.k_scale.ptr[1], 0.25f);
  EXPECT_FLOAT_EQ(call->args.v_scale.value, 3.0f);
  EXPECT_EQ(call->kv_start, (std::vector<std::int32_t>{0, 6, 9}));
  EXPECT_EQ(call->limits().max_query_tokens, 3);
  EXPECT_EQ(call->limits().max_kv_tokens, 6);
}

TEST(CapturedPrefill, EveryWrongPartIsNamed) {
  const struct {
    const char* what;
    std::function<void(Parts&)> spoil;
    const char* message;  // a part of it
  } rows[] = {
      {"another op", [](Parts& p) { p.metadata["op"] = "decode"; }, "metadata op"},
      {"no scale", [](Parts& p) { p.metadata.erase("scale"); }, "metadata scale"},
      {"an unknown mask", [](Parts& p) { p.metadata["mask"] = "tree"; }, "mask"},
      {"an unknown math", [](Parts& p) { p.metadata["math"] = "exact"; }, "math"},
      {"no k", [](Parts& p) { p.tensors.erase("k"); }, "k: expected a tensor"},
      {"q of integers",
       [](Parts& p) {
         p.zeros("q", FileDtype::i32, {5, 2, 32});
       },
       "q: expected BF16"},
      {"a flat v",
       [](Parts& p) {
         p.zeros("v", FileDtype::bf16, {9, 32});
       },
       "v: expected a shape"},
      {"k of other heads",
       [](Parts& p) {
         p.zeros("k", FileDtype::bf16, {9, 3, 32});
       },
       "k: expected dtype and heads"},
      {"v of another dtype",
       [](Parts& p) {
         p.zeros("v", FileDtype::f16, {9, 2, 16});
       },
       "v: expected dtype and heads"},
      {"k of another width",
       [](Parts& p) {
         p.zeros("k", FileDtype::bf16, {9, 2, 16});
       },
       "32 columns"},
      {"v of fewer tokens",
       [](Parts& p) {
         p.zeros("v", FileDtype::bf16, {8, 2, 16});
       },
       "9 tokens"},
      {"no query_start", [](Parts& p) { p.tensors.erase("query_start"); }, "query_start"},
      {"floats for kv_start", [](Parts& p) { p.zeros("kv_start", FileDtype::f32, {3}); }, "kv_start"},
      {"kv_start of other requests",
       [](Parts& p) {
         p.set<std::int32_t>("kv_start", FileDtype::i32, {2}, {0, 9});
       },
       "3 entries"},
      {"a start of more than 32 bits",
       [](Parts& p) {
         p.set<std::int64_t>("kv_start", FileDtype::i64, {3}, {0, 6, std::int64_t{1} << 40});
       },
       "kv_start[2]: expected a number of 32 bits, got 1099511627776"},
      {"a start that goes back",
       [](Parts& p) {
         p.set<std::int32_t>("kv_start", FileDtype::i32, {3}, {0, 6, 5});
       },
       "kv_start[2]"},
      {"a start past the end",
       [](Parts& p) {
         p.set<std::int32_t>("query_start", FileDtype::i32, {3}, {0, 2, 6});
       },
       "query_start[2]"},
      {"a first start that is not 0",
       [](Parts& p) {
         p.set<std::int32_t>("query_start", FileDtype::i32, {3}, {1, 2, 5});
       },
       "query_start[0]"},
      {"three scales for two heads",
       [](Parts& p) {
         p.set<float>("q_scale", FileDtype::f32, {3}, {1, 1, 1});
       },
       "q_scale"},
      {"expect.out of another shape",
       [](Parts& p) {
         p.zeros("expect.out", FileDtype::f32, {5, 2, 32});
       },
       "expect.out"},
  };
  for (const auto& row : rows) {
    Parts parts = Parts::good();
    row.spoil(parts);
    const auto file = parts.file();
    ASSERT_TRUE(file.ok()) << row.what << ": " << file.status().message();
    const auto call = cli::read_captured_prefill(*file);
    EXPECT_FALSE(call.ok()) << row.what;
    if (!call.ok()) {
      EXPECT_NE(call.status().message().find(row.message), std::string::npos)
          << row.what << ": " << call.status().message();
    }
  }
}

TEST(PrefillOptions, DtypeMathAndScaleFollowWhatWasTyped) {
  cli::ShapeOptions options;
  options.dtype = "f16";
  auto shape = cli::resolve_prefill(options);
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape->problem.dtype, Dtype::f16);
  EXPECT_EQ(shape->problem.out_dtype, Dtype::f16);
  EXPECT_EQ(shape->problem.math, PrefillMath::automatic);
  EXPECT_FLOAT_EQ(shape->scale, 0.0721687824f);
  options.dtype = "fp8";
  options.math = "half";
  options.model = "deepseek-v3";
  options.tp = 8;
  shape = cli::resolve_prefill(options);
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape->problem.dtype, Dtype::fp8_e4m3);
  EXPECT_EQ(shape->problem.out_dtype, Dtype::bf16);
  EXPECT_EQ(shape->problem.math, PrefillMath::half);
  EXPECT_EQ(shape->problem.heads, 16);
  EXPECT_FLOAT_EQ(shape->scale, cli::resolve(options)->scale);
  EXPECT_EQ(cli::parse_op("prefill").value(), Op::prefill);
  EXPECT_FALSE(cli::parse_op("train").ok());
}

}  // namespace
}  // namespace latte::cli_test
