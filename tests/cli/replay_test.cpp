// latte capture and latte run: a call goes through a file and comes back with the right verdict.
#include "cli/replay.hpp"

#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cli/safetensors.hpp"
#include "program.hpp"

namespace latte::cli_test {
namespace {

using cli::FileDtype;
using cli::FileTensor;
using cli::Safetensors;

std::string path_of(const char* name) { return (scratch() / name).string(); }

// The file once more with the bytes of one tensor changed.
void rewrite(const std::string& from, const std::string& to, const std::string& name, void (*change)(std::byte*)) {
  const auto file = Safetensors::load(from);
  ASSERT_TRUE(file.ok()) << file.status().message();
  std::vector<cli::TensorToWrite> tensors;
  std::vector<std::byte> changed;
  for (const auto& [key, tensor] : file->tensors()) {
    std::span<const std::byte> bytes = tensor.bytes;
    if (key == name) {
      changed.assign(bytes.begin(), bytes.end());
      change(changed.data());
      bytes = changed;
    }
    tensors.push_back({key, tensor.dtype, tensor.shape, bytes});
  }
  ASSERT_FALSE(changed.empty()) << "no tensor " << name;
  ASSERT_TRUE(cli::save_safetensors(to, tensors, file->metadata()).ok());
}

TEST(Replay, EveryFormatMatchesTheOracleAfterARoundTrip) {
  const std::vector<std::vector<std::string>> shapes = {
      {"--kv", "bf16"},
      {"--kv", "f16", "--page", "1"},
      {"--kv", "f32", "--heads", "3", "--page", "7"},
      {"--kv", "fp8_e4m3", "--heads", "12"},
      {"--kv", "fp8_e4m3", "--q", "fp8_e4m3"},
      {"--kv", "fp8_ds_mla"},
      {"--kv", "bf16", "--latent", "256", "--mask", "none"},
  };
  for (const auto& shape : shapes) {
    const std::string file = path_of("case.safetensors"), result = path_of("out.safetensors");
    std::vector<std::string> capture = {"capture", "--spec", "2q1s70_1q3s20_1q1s0", "--with-expect", "--out", file};
    capture.insert(capture.end(), shape.begin(), shape.end());
    const ProgramRun captured = run_latte(capture);
    ASSERT_EQ(captured.exit_code, 0) << shape[1] << captured.err;
    const ProgramRun run = run_latte({"run", file, "--out", result});
    EXPECT_EQ(run.exit_code, 0) << shape[1] << run.out << run.err;
    EXPECT_NE(run.out.find("matches"), std::string::npos) << run.out;

    const auto written = Safetensors::load(result);
    ASSERT_TRUE(written.ok()) << written.status().message();
    const auto source = Safetensors::load(file);
    ASSERT_NE(written->find("out"), nullptr);
    ASSERT_NE(written->find("lse"), nullptr);
    EXPECT_EQ(written->find("out")->shape, source->find("expect.out")->shape);
    EXPECT_EQ(written->find("lse")->shape, source->find("expect.lse")->shape);
    EXPECT_EQ(written->find("lse")->dtype, FileDtype::f32);
  }
}

TEST(Replay, AWrongExpectationIsFoundAndExitsWithOne) {
  const std::string good = path_of("good.safetensors"), wrong = path_of("wrong.safetensors");
  ASSERT_EQ(run_latte({"capture", "--spec", "3q1s40", "--heads", "4", "--with-expect", "--out", good}).exit_code, 0);
  for (const char* name : {"expect.out", "expect.lse"}) {
    rewrite(good, wrong, name, [](std::byte* bytes) {
      float value = 0;
      std::memcpy(&value, bytes, sizeof value);
      value += 1;
      std::memcpy(bytes, &value, sizeof value);
    });
    const ProgramRun run = run_latte({"run", wrong});
    EXPECT_EQ(run.exit_code, 1) << name << run.out << run.err;
    EXPECT_NE(run.out.find("DIFFERS"), std::string::npos) << run.out;
  }
}

// One row alone may be off by half as much again as a batch.
TEST(Replay, TellsTheLimitThatWasApplied) {
  const std::string file = path_of("limit.safetensors");
  for (const auto& [heads, limit] : {std::pair{"1", "allowed 4.500e-03"}, std::pair{"4", "allowed 3.375e-03"}}) {
    ASSERT_EQ(run_latte({"capture", "--spec", "q1s40", "--heads", heads, "--with-expect", "--out", file}).exit_code, 0);
    const ProgramRun run = run_latte({"run", file});
    EXPECT_NE(run.out.find(limit), std::string::npos) << run.out;
  }
}

TEST(Replay, AnExpectationOfNaNNeverMatches) {
  const std::string good = path_of("good.safetensors"), wrong = path_of("nan.safetensors");
  ASSERT_EQ(run_latte({"capture", "--spec", "2q1s40", "--heads", "4", "--with-expect", "--out", good}).exit_code, 0);
  rewrite(good, wrong, "expect.out", [](std::byte* bytes) { std::memset(bytes, 0xff, 4); });
  EXPECT_EQ(run_latte({"run", wrong}).exit_code, 1);
}

TEST(Replay, WithoutAnExpectationTheCallIsOnlyRun) {
  const std::string file = path_of("plain.safetensors");
  ASSERT_EQ(run_latte({"capture", "--spec", "q1s100", "--out", file}).exit_code, 0);
  const ProgramRun run = run_latte({"run", file, "--kernel", "scalar", "--policy", "uniform:2", "--threads", "1"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("nothing to compare"), std::string::npos);
  EXPECT_NE(run.out.find("kernel scalar"), std::string::npos) << run.out;
}

// For fp32 the tolerance takes a run of the oracle, which is for a file that expects something.
TEST(Replay, TheToleranceIsAskedForOnlyWhereThereIsSomethingToCompare) {
  const auto outputs = cli::Outputs::make(1, 1, 16, Dtype::f32).value();
  int asked = 0;
  const std::vector<std::byte> zero(sizeof(float));
  const FileTensor lse{.dtype = FileDtype::f32, .shape = {1, 1}, .bytes = zero};
  cli::Expectation expectation{.tokens = 1, .tolerance = [&asked] {
                                 ++asked;
                                 return testkit::Tolerance{.out = 1e-6, .lse = 1e-6};
                               }};
  EXPECT_EQ(cli::conclude({}, Op::decode, outputs, expectation), 0);
  EXPECT_EQ(asked, 0);
  expectation.lse = &lse;
  EXPECT_EQ(cli::conclude({}, Op::decode, outputs, expectation), 0);
  EXPECT_EQ(asked, 1);
}

TEST(Replay, AWildPageIdInUseIsAnErrorAndNotACrash) {
  const std::string good = path_of("good.safetensors"), wild = path_of("wild.safetensors");
  ASSERT_EQ(run_latte({"capture", "--spec", "2q1s40", "--heads", "4", "--page", "16", "--out", good}).exit_code, 0);
  for (auto* change : {+[](std::byte* bytes) { std::memset(bytes, 0x7f, 4); },
                       +[](std::byte* bytes) { std::memset(bytes, 0xff, 4); }}) {
    rewrite(good, wild, "block_table", change);
    const ProgramRun run = run_latte({"run", wild});
    EXPECT_EQ(run.exit_code, 2) << run.out << run.err;
    EXPECT_NE(run.err.find("block_table"), std::string::npos) << run.err;
  }
}

TEST(Replay, ATruncatedFileIsAnErrorAtEveryCut) {
  const std::string whole = path_of("whole.safetensors"), cut = path_of("cut.safetensors");
  ASSERT_EQ(run_latte({"capture", "--spec", "q1s3", "--heads", "1", "--latent", "16", "--rope", "16", "--page", "1",
                       "--out", whole})
                .exit_code,
            0);
  const std::string bytes = read_file(whole);
  ASSERT_GT(bytes.size(), 100u);
  for (std::size_t length = 0; length < bytes.size(); length += 1 + bytes.size() / 40) {
    std::ofstream(cut, std::ios::binary) << bytes.substr(0, length);
    const ProgramRun run = run_latte({"run", cut});
    EXPECT_EQ(run.exit_code, 2) << length;
    EXPECT_EQ(run.err.rfind("latte: ", 0), 0u) << run.err;
  }
}

}  // namespace
}  // namespace latte::cli_test
