// The program as its users meet it: help, exit codes, what it prints.
#include "program.hpp"

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/batch_spec.hpp"
#include "cli/options.hpp"
#include "latte/latte.hpp"

namespace latte::cli_test {
namespace {

using Json = nlohmann::json;

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(Program, HelpAndVersionSucceedOnStdout) {
  const ProgramRun help = run_latte({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(help.err, "");
  for (const char* word : {"info", "check", "bench", "plan", "run", "capture", "Exit codes"})
    EXPECT_NE(help.out.find(word), std::string::npos) << word;
  for (const char* command : {"info", "check", "bench", "plan", "run", "capture"}) {
    const ProgramRun run = run_latte({command, "--help"});
    EXPECT_EQ(run.exit_code, 0) << command;
    EXPECT_NE(run.out.find("--help"), std::string::npos) << command;
  }
  const ProgramRun version_run = run_latte({"--version"});
  EXPECT_EQ(version_run.exit_code, 0);
  EXPECT_NE(version_run.out.find(version()), std::string::npos);
}

TEST(Program, BadUsageAndBadInputExitWithTwoAndSayWhy) {
  const struct {
    std::vector<std::string> arguments;
    const char* message;
  } rows[] = {
      {{}, "subcommand"},
      {{"brew"}, "brew"},
      {{"bench"}, "--spec"},
      {{"bench", "--spec", "16x"}, "spec"},
      {{"bench", "--spec", "q1s1k", "--kv", "int4"}, "kv_format"},
      {{"bench", "--spec", "q1s1k", "--heads", "0"}, "heads"},
      {{"bench", "--spec", "q1s1k", "--heads", "many"}, "heads"},
      {{"bench", "--spec", "q1s1k", "--page", "0"}, "page"},
      {{"bench", "--spec", "q1s1k", "--policy", "fair"}, "--policy"},
      {{"bench", "--spec", "q1s1k", "--kernel", "abacus"}, "kernel"},
      {{"bench", "--spec", "q1s1k", "--op", "training"}, "--op"},
      {{"bench", "--spec", "q1s1k", "--backend", "tpu"}, "tpu"},
      {{"bench", "--spec", "q1s1k", "--backend", "cuda", "--device", "-3"}, "expected"},
      {{"bench", "--spec", "q1s1k", "--overlap", "maybe"}, "--overlap"},
      {{"bench", "--spec", "q1s1k", "--overlap", "on"}, "--overlap"},
      {{"bench", "--spec", "q1s1k", "--heads", "16", "0"}, "heads"},
      {{"plan", "--spec", "q1s1k", "--backend", "cuda", "--kv", "fp8"}, "fp8 caches come later"},
      {{"bench", "--spec", "q1s1k", "--model", "deepseek-v3", "--tp", "3"}, "--tp"},
      {{"bench", "--spec", "q1s1k", "--model", "deepseek-v3", "--heads", "8"}, "--model"},
      {{"bench", "--spec", "q1s1k", "--tp", "8"}, "--tp"},
      {{"bench", "--spec", "q1s1k", "--working-set", "1T"}, "--working-set"},
      {{"bench", "--spec", "q1s1k", "--repeats", "-1"}, "--repeats"},
      {{"bench", "--spec", "q1s1k", "--threads", "-1"}, "threads"},
      {{"bench", "--spec", "q1s1k", "--workers", "-1"}, "--workers"},
      {{"bench", "--spec", "q1s1k", "--threads", "1", "--workers", "2"}, "limits.workers"},
      {{"bench", "--op", "prefill", "--spec", "q8", "--threads", "1", "--workers", "2"}, "limits.workers"},
      {{"bench", "--spec", "65536q1s1048576k"}, "GiB"},
      {{"bench", "--spec", "2q1s64", "65536q1s1048576k", "--repeats", "1", "--json"}, "GiB"},
      {{"bench", "--spec", "q1s1k", "--heads", "010"}, "--heads: expected a decimal integer"},
      {{"plan", "--spec", "q1s4k", "--workers", ""}, "--workers: expected a decimal integer"},
      {{"capture", "--spec", "q1s8", "--out", "x", "--seed", "-1"}, "--seed: expected a decimal integer"},
      {{"capture", "--spec", "q1s8", "--out", "x", "--seed", "18446744073709551616"}, "--seed: expected a decimal"},
      {{"bench", "--spec", "8q1s1", "--page", "1073741824"}, "GiB"},
      {{"capture", "--spec", "8q1s1", "--page", "1073741824", "--out", "x"}, "GiB"},
      {{"plan"}, "--spec"},
      {{"plan", "--spec", "q1s4k", "--workers", "-1"}, "--workers"},
      {{"plan", "--spec", "q1s4k", "--op", "training"}, "--op"},
      {{"plan", "--spec", "q1s4k", "--svg", "/nonexistent/plan.svg"}, "/nonexistent/plan.svg: expected a file"},
      {{"plan", "--spec", "q1s4k", "--rows", "3", "--json"}, "--rows"},
      {{"plan", "--spec", "q1s4k", "--backend", "cuda", "--kernel", "avx2"}, "kernel"},
      {{"plan", "--spec", "q1s4k", "--backend", "cuda", "--threads", "2"}, "threads"},
      {{"plan", "--spec", "q1s4k", "--backend", "cuda", "--device", "99"}, "expected"},
      {{"plan", "--spec", "q1s4k", "--device", "1"}, "device"},
      {{"bench", "--spec", "q1s1k", "--repeats", "3", "--min-time", "1"}, "--min-time"},
      {{"info", "--support-markdown", "--json"}, "--support-markdown"},
      {{"run"}, "case"},
      {{"run", "/nonexistent/case.safetensors"}, "/nonexistent/case.safetensors"},
      {{"run", LATTE_PROGRAM_PATH}, "safetensors"},
      {{"run", LATTE_PROGRAM_PATH, "--out", LATTE_PROGRAM_PATH}, "another file"},
      {{"run", "/tmp"}, "a directory"},
      {{"run", "case.safetensors", "--out", ""}, "--out"},
      {{"plan", "--spec", "q1s4k", "--svg", ""}, "--svg"},
      {{"capture", "--spec", "q1s8", "--out", ""}, "--out"},
      {{"check", "--kernel", "abacus"}, "kernel"},
      {{"check", "--tolerance-factor", "0"}, "--tolerance-factor"},
      {{"check", "--tolerance-factor", "nan"}, "--tolerance-factor"},
      {{"check", "--tolerance-factor", "inf"}, "--tolerance-factor"},
      {{"info", "--backend", "abacus"}, "abacus"},
      {{"capture", "--spec", "q1s8"}, "--out"},
      {{"capture", "--spec", "q1s8", "--out", "/nonexistent/case.safetensors"}, "/nonexistent/case.safetensors"},
      {{"capture", "--spec", "q1s8", "--out", "x", "--latent", "-5"}, "--latent"},
  };
  for (const auto& row : rows) {
    std::string call = "latte";
    for (const std::string& argument : row.arguments) call += " " + argument;
    const ProgramRun run = run_latte(row.arguments);
    EXPECT_EQ(run.exit_code, 2) << call;
    EXPECT_EQ(run.out, "") << call;
    EXPECT_EQ(run.err.substr(run.err.rfind("latte: ") == std::string::npos ? 0 : run.err.rfind("latte: "), 7),
              "latte: ")
        << call << "\n"
        << run.err;
    EXPECT_NE(run.err.find(row.message), std::string::npos) << call << "\n" << run.err;
  }
}

TEST(Program, InfoNamesEveryKernelAndWhyNot) {
  const ProgramRun run = run_latte({"info", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json info = Json::parse(run.out);
  EXPECT_GE(info["threads"].get<int>(), 1);
  EXPECT_NE(info["threads_reason"], "");
  bool scalar_usable = false;
  for (const Json& kernel : info["kernels"]) {
    if (kernel["name"] == "scalar") scalar_usable = kernel["usable"];
    EXPECT_TRUE(kernel["usable"].get<bool>() || kernel["reason"] != "") << kernel["name"];
  }
  EXPECT_TRUE(scalar_usable);
  EXPECT_FALSE(info["support"].empty());
  const ProgramRun text = run_latte({"info", "--threads", "1"});
  EXPECT_NE(text.out.find("as --threads asks"), std::string::npos);
  EXPECT_NE(text.out.find("scalar"), std::string::npos);
}

TEST(Program, TheReadmeHasTheSupportTableOfTheCode) {
  const std::string readme = read_file(std::filesystem::path(LATTE_SOURCE_DIR) / "README.md");
  const std::string begin = "<!-- support-table:begin -->\n", end = "<!-- support-table:end -->";
  const std::size_t from = readme.find(begin), to = readme.find(end);
  ASSERT_NE(from, std::string::npos) << "README.md lacks " << begin;
  ASSERT_NE(to, std::string::npos) << "README.md lacks " << end;
  const ProgramRun run = run_latte({"info", "--support-markdown"});
  ASSERT_EQ(run.exit_code, 0);
  EXPECT_EQ(readme.substr(from + begin.size(), to - from - begin.size()), run.out)
      << "paste the output of `latte info --support-markdown` between the markers";
}

TEST(Program, ThePlanInJsonIsAPlanOfItsBatch) {
  const std::vector<std::vector<std::string>> calls = {
      {"plan", "--spec", "1q1s64k_63q1s2k", "--workers", "132", "--json"},
      {"plan", "--spec", "16q1s4k_4q4s1k", "--workers", "8", "--policy", "uniform:4", "--heads", "100", "--json"},
      {"plan", "--spec", "3q3s300_2q1s0", "--workers", "5", "--policy", "batch_invariant:256", "--json"},
      {"plan", "--spec", "100q1s4k", "--backend", "cuda", "--workers", "132", "--heads", "16", "--json"},
      {"plan", "--op", "prefill", "--spec", "1q2k_7q300", "--workers", "132", "--heads", "3", "--json"},
      {"plan", "--op", "prefill", "--spec", "q512s4k_q9", "--workers", "7", "--policy", "batch_invariant", "--json"},
      {"plan", "--op", "prefill", "--spec", "8q1k", "--workers", "9", "--policy", "uniform:2", "--mask", "none",
       "--json"}};
  for (const auto& call : calls) {
    const ProgramRun run = run_latte(call);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const Json json = Json::parse(run.out);
    const auto ints = [&](const char* name) { return json[name].get<std::vector<std::int32_t>>(); };
    const auto meta = ints("work_meta_data"), indptr = ints("work_indptr"), reduce = ints("reduce_indptr"),
               partials = ints("reduce_partial_map"), seq_lens = ints("seq_lens"), query_start = ints("query_start");
    std::vector<WorkRecord> records;
    for (const Json& r : json["work_info_set"]) records.push_back({r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]});
    std::vector<RowRange> finals;
    for (const Json& r : json["reduce_final_map"]) finals.push_back({r[0], r[1]});

    PlanConfig config{
        .heads = json["heads"], .row_tile = json["row_tile"], .kv_block = json["kv_block"], .workers = json["workers"]};
    config.op = cli::parse_op(json["op"].get<std::string>()).value();
    config.mask = cli::parse_mask(json["mask"].get<std::string>()).value();
    config.shared_cache_tokens = json["shared_cache_tokens"];
    config.policy = cli::parse_policy(json["policy"].get<std::string>()).value();
    const Json& cost = json["cost"];
    config.cost = {.piece_ticks = cost["piece_ticks"],
                   .split_ticks = cost["split_ticks"],
                   .block_ticks = cost["block_ticks"],
                   .granule_ticks = cost["granule_ticks"],
                   .row_granule = cost["row_granule"],
                   .alone_percent = cost["alone_percent"]};
    config.limits = cli::parse_batch_spec(json["spec"].get<std::string>()).value().limits();
    config.limits.workers = config.workers;
    const Plan plan{meta, indptr, records, reduce, finals, partials};
    const StepLengths lengths{.seq_lens = seq_lens, .query_start = query_start, .visible = {}};
    const Status status = check_plan(config, lengths, plan);
    EXPECT_TRUE(status.ok()) << run.out.substr(0, 200) << "\n" << status.message();
    EXPECT_EQ(json["makespan_ticks"].get<std::int64_t>(), makespan_ticks(config, plan));
  }
}

TEST(Program, ThePlanAsTextSumsUpAndTheSvgIsWritten) {
  const std::string svg = (scratch() / "plan.svg").string();
  const ProgramRun run = run_latte({"plan", "--spec", "256q1s4k", "--workers", "132", "--rows", "3", "--svg", svg});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* text : {"256 requests", "workers    132", "makespan", "129 more workers"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  const std::string drawn = read_file(svg);
  EXPECT_EQ(drawn.rfind("<?xml", 0), 0u);
  EXPECT_NE(drawn.find("132 workers"), std::string::npos);

  const ProgramRun prefill = run_latte({"plan", "--op", "prefill", "--spec", "2q1k", "--heads", "4", "--workers", "9"});
  ASSERT_EQ(prefill.exit_code, 0) << prefill.err;
  for (const char* text : {"2048 query tokens", "(4 heads)", "balanced, whole tiles", "request.head"})
    EXPECT_NE(prefill.out.find(text), std::string::npos) << text << "\n" << prefill.out;
}

// By what the plan says, as kernels of different machines cut differently.
TEST(Program, PrefillSaysInHowManyPiecesItIsCut) {
  for (const char* spec : {"5q512s1536", "1q512s4k", "2q4k"}) {
    const std::vector<std::string> plan = {"plan", "--op",   "prefill", "--spec",    spec, "--heads",
                                           "1",    "--mask", "none",    "--workers", "64"};
    std::vector<std::string> as_json = plan;
    as_json.push_back("--json");
    const ProgramRun json = run_latte(as_json), text = run_latte(plan);
    ASSERT_EQ(json.exit_code, 0) << json.err;
    const int splits = Json::parse(json.out)["splits"].get<int>();
    const std::string said = splits == 0   ? "balanced, whole tiles and the last ones cut"
                             : splits == 1 ? "balanced, whole tiles\n"
                                           : "balanced, as uniform:" + std::to_string(splits) + "\n";
    EXPECT_NE(text.out.find(said), std::string::npos) << said << text.out;
  }
}

TEST(Program, AChunkIsShownAsItIsPlanned) {
  const ProgramRun run = run_latte({"plan", "--spec", "q1s1k", "--policy", "batch_invariant:7", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json plan = Json::parse(run.out);
  EXPECT_EQ(plan["policy"], "batch_invariant:" + plan["kv_block"].dump());
  EXPECT_EQ(plan["policy_asked"], "batch_invariant:7");
  for (const Json& record : plan["work_info_set"])
    EXPECT_EQ(record[5].get<int>() - record[4].get<int>(), plan["kv_block"].get<int>());
  const ProgramRun text = run_latte({"plan", "--spec", "q1s1k", "--policy", "batch_invariant:7"});
  EXPECT_NE(text.out.find(", asked for as batch_invariant:7\n"), std::string::npos) << text.out;
  const ProgramRun bench =
      run_latte({"bench", "--spec", "q1s1k", "--policy", "batch_invariant:7", "--repeats", "3", "--json"});
  ASSERT_EQ(bench.exit_code, 0) << bench.err;
  EXPECT_EQ(Json::parse(bench.out)["policy"], plan["policy"]);
}

TEST(Program, WorksWhereStandardErrorCannotBeWritten) {
  const auto out = scratch() / "unheard";
  for (const char* err : {"2>/dev/full", "2>&-"}) {
    const auto exit_code = [&](const std::string& arguments) {
      const int status =
          std::system(fmt::format("'{}' {} >'{}' {}", LATTE_PROGRAM_PATH, arguments, out.string(), err).c_str());
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    };
    EXPECT_EQ(exit_code("bench --spec q1s64 --threads 1 --repeats 1 --json"), 0) << err;
    EXPECT_EQ(json_lines(read_file(out)).size(), 1u) << err;
    EXPECT_EQ(exit_code("plan --spec x"), 2) << err;
    EXPECT_EQ(exit_code("check --kernel abacus"), 2) << err;
  }
}

TEST(Program, ABenchRowInJsonHasItsKeysAndAddsUp) {
  const ProgramRun run =
      run_latte({"bench", "--spec", "2q1s64", "--spec", "q3s100_q1s10", "4q1s1k", "--heads", "8", "--page", "16",
                 "--kv", "bf16", "--policy", "uniform:2", "--repeats", "5", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const std::vector<Json> rows = json_lines(run.out);
  ASSERT_EQ(rows.size(), 3u);
  const std::set<std::string> keys = {"samples", "op",     "backend",  "kernel",     "spec",       "heads",   "page",
                                      "kv",      "policy", "time_us",  "spread_us",  "plan_us",    "bytes",   "flops",
                                      "gbps",    "tflops", "floor_us", "over_floor", "ceilings",   "machine", "commit",
                                      "q",       "latent", "rope",     "mask",       "working_set"};
  const char* specs[] = {"2q1s64", "q3s100_q1s10", "4q1s1k"};
  const double kv_tokens[] = {128, 110, 4096}, queries[] = {2, 4, 4}, pairs[] = {128, 98 + 99 + 100 + 10, 4096};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Json& row = rows[i];
    std::set<std::string> found;
    for (const auto& [key, value] : row.items()) found.insert(key);
    EXPECT_EQ(found, keys);
    EXPECT_EQ(row["op"], "decode");
    EXPECT_EQ(row["backend"], "cpu");
    EXPECT_EQ(row["spec"], specs[i]);
    EXPECT_EQ(row["heads"], 8);
    EXPECT_EQ(row["page"], 16);
    EXPECT_EQ(row["kv"], "bf16");
    EXPECT_EQ(row["policy"], "uniform:2");
    EXPECT_EQ(row["samples"], 5);
    EXPECT_TRUE(row["machine"].is_string());
    EXPECT_TRUE(row["commit"].is_string());
    const double time = row["time_us"], bytes = row["bytes"], flops = row["flops"], floor = row["floor_us"];
    const double read = row["ceilings"]["read_gbps"], arithmetic = row["ceilings"]["tflops"];
    EXPECT_GT(time, 0);
    EXPECT_GT(row["plan_us"].get<double>(), 0);
    EXPECT_GE(row["spread_us"].get<double>(), 0);
    EXPECT_GT(read, 0);
    EXPECT_GT(arithmetic, 0);
    EXPECT_DOUBLE_EQ(bytes, kv_tokens[i] * 576 * 2 + queries[i] * 8 * (576 + 512) * 2);
    EXPECT_DOUBLE_EQ(flops, 2 * 8 * pairs[i] * (576 + 512));
    EXPECT_NEAR(floor, std::max(flops / arithmetic / 1e6, bytes / read / 1e3), 1e-9 * floor);
    EXPECT_NEAR(row["over_floor"].get<double>(), time / floor, 1e-9 * time / floor);
    EXPECT_NEAR(row["gbps"].get<double>(), bytes / time / 1e3, 1e-9);
    EXPECT_NEAR(row["tflops"].get<double>(), flops / time / 1e6, 1e-9);
  }
}

TEST(Program, ABenchMayUseFewerWorkers) {
  for (const std::vector<std::string>& batch : {std::vector<std::string>{"--spec", "2q1s64", "--page", "16"},
                                                std::vector<std::string>{"--op", "prefill", "--spec", "q8"}}) {
    std::vector<std::string> arguments = {"bench", "--threads", "2", "--workers", "1", "--repeats", "3"};
    arguments.insert(arguments.end(), batch.begin(), batch.end());
    const ProgramRun text = run_latte(arguments);
    ASSERT_EQ(text.exit_code, 0) << text.err;
    EXPECT_NE(text.out.find("planned for 1 of the workers"), std::string::npos) << text.out;
    arguments.push_back("--json");
    const ProgramRun json = run_latte(arguments);
    ASSERT_EQ(json.exit_code, 0) << json.err;
    EXPECT_EQ(Json::parse(json.out)["workers"], 1);
  }
}

TEST(Program, ABenchTableHasAHeaderLineWithTheMachine) {
  const ProgramRun run = run_latte(
      {"bench", "--spec", "2q1s64", "--model", "deepseek-v3", "--tp", "8", "--repeats", "3", "--working-set", "1M"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* text : {"thread", "latte ", "ceilings for", "time/floor", "2q1s64"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_NE(run.err.find("measuring"), std::string::npos);
}

TEST(Program, BenchRunsEveryCombinationOfBatchHeadsAndPage) {
  const ProgramRun run = run_latte(
      {"bench", "--spec", "2q1s64", "1q2s32", "--heads", "2", "3", "--page", "16", "64", "--repeats", "3", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::set<std::string> seen;
  for (const Json& row : json_lines(run.out))
    seen.insert(row["spec"].get<std::string>() + " " + row["heads"].dump() + " " + row["page"].dump());
  EXPECT_EQ(seen.size(), 8u) << run.out;
  EXPECT_TRUE(seen.contains("1q2s32 3 16"));
}

// A plan for a GPU needs none.
TEST(Program, PlansForCudaAreShownWithTheKernelAndItsReasons) {
  const ProgramRun run =
      run_latte({"plan", "--spec", "64q1s4k", "--heads", "16", "--backend", "cuda", "--workers", "132", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json plan = Json::parse(run.out);
  EXPECT_EQ(plan["kernel"].get<std::string>().rfind("sm90_", 0), 0u) << plan["kernel"];
  EXPECT_NE(plan["reason"].get<std::string>().find("16 heads"), std::string::npos) << plan["reason"];
  EXPECT_EQ(plan["workers"], 132);
  const ProgramRun text = run_latte({"plan", "--spec", "4q1s4k", "--heads", "128", "--backend", "cuda"});
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("kernel     sm90_"), std::string::npos) << text.out;
  // Tiles of more than 64 rows take two multiprocessors each.
  for (const auto& [heads, said] :
       {std::pair("128", "workers    66 (pairs, of 133 multiprocessors)\n"), std::pair("64", "workers    133\n")}) {
    const ProgramRun odd =
        run_latte({"plan", "--spec", "4q1s4k", "--heads", heads, "--backend", "cuda", "--workers", "133"});
    EXPECT_NE(odd.out.find(said), std::string::npos) << odd.out << odd.err;
  }
  // Prefill has no pairs, though a plain grid may have fewer thread blocks than there are multiprocessors.
  const ProgramRun grid = run_latte(
      {"plan", "--op", "prefill", "--spec", "q128", "--heads", "4", "--policy", "uniform:1", "--backend", "cuda"});
  ASSERT_EQ(grid.exit_code, 0) << grid.err;
  EXPECT_EQ(grid.out.find("pairs, of"), std::string::npos) << grid.out;
  // One whole request each for 100 of the multiprocessors, which use up the memory.
  const ProgramRun whole =
      run_latte({"plan", "--spec", "100q1s4k", "--heads", "16", "--backend", "cuda", "--workers", "132"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  for (const char* said : {"balanced, in equal pieces", "0 of them split", "records    100"})
    EXPECT_NE(whole.out.find(said), std::string::npos) << said << "\n" << whole.out;
}

TEST(Program, InfoSaysWhetherCudaCanBeUsed) {
  const Json info = Json::parse(run_latte({"info", "--json"}).out);
  EXPECT_FALSE(info["cuda"].get<std::string>().empty());
  const bool open = Backend::open({.name = "cuda"}).ok();
  EXPECT_EQ(info["cuda"].get<std::string>().rfind("not available: ", 0) == 0, !open) << info["cuda"];
  EXPECT_EQ(run_latte({"info", "--backend", "cuda"}).exit_code, open ? 0 : 2);
}

TEST(Program, AutoRunsSomewhereAndSaysWhyNotOnAGpu) {
  const bool gpu = Backend::open({.name = "cuda"}).ok();
  const ProgramRun run = run_latte({"info", "--backend", "auto", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json info = Json::parse(run.out);
  EXPECT_EQ(info["backend"], gpu ? "cuda" : "cpu");
  EXPECT_EQ(info["note"].get<std::string>().empty(), gpu) << info["note"];
  EXPECT_EQ(run_latte({"info", "--backend", "auto"}).out.find("cuda cannot be opened") == std::string::npos, gpu);
  EXPECT_EQ(Json::parse(run_latte({"info", "--json"}).out)["note"], "");

  // A kernel's name asks for the CPU, with and without a GPU.
  const ProgramRun plan = run_latte({"plan", "--spec", "q1s1k", "--backend", "auto", "--kernel", "scalar"});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_EQ(plan.err.rfind("latte: cpu, as cuda cannot be opened: ", 0), 0u) << plan.err;
  EXPECT_NE(plan.out.find("kernel     scalar"), std::string::npos) << plan.out;
}

TEST(Program, CheckPassesItsQuickGrid) {
  const ProgramRun run = run_latte({"check", "--quick", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  const Json json = Json::parse(run.out);
  EXPECT_EQ(json["failed"], 0);
  EXPECT_GE(json["runs"].get<int>(), json["cases"].get<int>());
  for (const Json& group : json["groups"])
    EXPECT_LE(group["out_error"].get<double>(), group["out_allowed"].get<double>());
}

// Nothing comes within a millionth of what is tolerated, so each run is a wrong result.
TEST(Program, CheckExitsWithOneWhenAResultIsWrong) {
  for (const char* op : {"decode", "prefill"}) {
    const std::vector<std::string> arguments = {
        "check", "--quick", "--op", op, "--kernel", "auto", "--tolerance-factor", "1e-6"};
    const ProgramRun text = run_latte(arguments);
    EXPECT_EQ(text.exit_code, 1) << text.out << text.err;
    EXPECT_NE(text.out.find("FAILED "), std::string::npos) << text.out;
    EXPECT_NE(text.out.find("runs failed"), std::string::npos) << text.out;
    EXPECT_EQ(text.out.find("ok: "), std::string::npos) << text.out;
  }
  const ProgramRun run =
      run_latte({"check", "--quick", "--op", "decode", "--kernel", "auto", "--tolerance-factor", "1e-6", "--json"});
  EXPECT_EQ(run.exit_code, 1) << run.out << run.err;
  const Json json = Json::parse(run.out);
  EXPECT_GT(json["failed"].get<int>(), 0);
  EXPECT_EQ(json["failed"].get<std::size_t>(), json["failures"].size());
  EXPECT_EQ(json["tolerance_factor"], 1e-6);
}

}  // namespace
}  // namespace latte::cli_test
