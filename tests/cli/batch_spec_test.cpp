#include "cli/batch_spec.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace latte::cli {
namespace {

TEST(BatchSpec, EveryFormOfAGroupIsRead) {
  const struct {
    const char* text;
    std::vector<RequestGroup> groups;
  } rows[] = {
      {"q1s4k", {{1, 1, 4096}}},
      {"16q1s4k", {{16, 1, 4096}}},
      {"16q1s4k_4q4s1k", {{16, 1, 4096}, {4, 4, 1024}}},
      {"q2k", {{1, 2048, 2048}}},
      {"2q2k_32q1s1k", {{2, 2048, 2048}, {32, 1, 1024}}},
      {"8q1s1000", {{8, 1, 1000}}},
      {"1q1s64k_63q1s2k", {{1, 1, 65536}, {63, 1, 2048}}},
      {"3q5s5", {{3, 5, 5}}},
      {"2q1s0", {{2, 1, 0}}},
      {"q1_q1_q1", {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}},
      {"007q01s08", {{7, 1, 8}}},
      {"1kq1s1", {{1024, 1, 1}}},
  };
  for (const auto& row : rows) {
    const auto spec = parse_batch_spec(row.text);
    ASSERT_TRUE(spec.ok()) << row.text << ": " << spec.status().message();
    EXPECT_EQ(spec->groups, row.groups) << row.text;
    EXPECT_EQ(spec->text, row.text);
  }
}

TEST(BatchSpec, AnErrorNamesTheCharacterAndWhatWasExpected) {
  const struct {
    const char* text;
    Code code;
    const char* expected;
    const char* got;
  } rows[] = {
      {"", Code::invalid_argument, "a count or 'q' at character 1", "the end"},
      {"16", Code::invalid_argument, "'q' at character 3", "the end"},
      {"q", Code::invalid_argument, "a query length at character 2", "the end"},
      {"qs4k", Code::invalid_argument, "a query length at character 2", "'s'"},
      {"q1s", Code::invalid_argument, "a KV length at character 4", "the end"},
      {"q1sk", Code::invalid_argument, "a KV length at character 4", "'k'"},
      {"q1s4m", Code::invalid_argument, "'_' or the end at character 5", "'m'"},
      {"q1s4kk", Code::invalid_argument, "'_' or the end at character 6", "'k'"},
      {"q1s4k_", Code::invalid_argument, "a count or 'q' at character 7", "the end"},
      {"_q1s4k", Code::invalid_argument, "a count or 'q' at character 1", "'_'"},
      {"q1s4k__q1", Code::invalid_argument, "a count or 'q' at character 7", "'_'"},
      {"q1 s4k", Code::invalid_argument, "'_' or the end at character 3", "' '"},
      {"-1q1s4k", Code::invalid_argument, "a count or 'q' at character 1", "'-'"},
      {"Q1s4k", Code::invalid_argument, "a count or 'q' at character 1", "'Q'"},
      {"s4k", Code::invalid_argument, "a count or 'q' at character 1", "'s'"},
      {"q1s4k\n", Code::invalid_argument, "'_' or the end at character 6", "'\\x0a'"},
      {"0q1s4k", Code::invalid_argument, "a count of at least 1 at character 1", "0"},
      {"q0s4k", Code::invalid_argument, "a query length of at least 1 at character 2", "0"},
      {"q4s3", Code::invalid_argument,
       "0 or a KV length of at least the query length 4 (it counts the query tokens) at character 4", "3"},
      {"q1s1048577k", Code::out_of_limits, "at most 1073741824 at character 4", "'1048577k'"},
      {"q1s99999999999999999999999999999", Code::out_of_limits, "at most 1073741824 at character 4",
       "'999999999999999999999999'"},
      {"65537q1s1", Code::out_of_limits, "at most 65536 at character 1", "'65537'"},
      {"65536q1s1_q1s1", Code::out_of_limits, "at most 65536 requests up to the group at character 11", "65537"},
      {"2q1024k", Code::out_of_limits, "at most 1048576 query tokens in all up to the group at character 1", "2097152"},
  };
  for (const auto& row : rows) {
    const auto spec = parse_batch_spec(row.text);
    ASSERT_FALSE(spec.ok()) << row.text;
    EXPECT_EQ(spec.status().code(), row.code) << row.text;
    EXPECT_EQ(spec.status().field(), "spec");
    EXPECT_EQ(spec.status().expected(), row.expected) << row.text;
    EXPECT_EQ(spec.status().got(), row.got) << row.text;
  }
}

TEST(BatchSpec, TheLargestBatchesDoNotOverflow) {
  const auto spec = parse_batch_spec("65536q16s1048576k");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->total_kv_tokens(), std::int64_t{65536} << 30);
  EXPECT_EQ(spec->total_query_tokens(), 1 << 20);
  EXPECT_FALSE(parse_batch_spec(std::string(5000, '1')).ok());
}

TEST(BatchSpec, LengthsAndLimitsFollowTheGroups) {
  const auto spec = parse_batch_spec("2q1s100_3q4s50");
  ASSERT_TRUE(spec.ok());
  const BatchLengths lengths = batch_lengths(*spec);
  EXPECT_EQ(lengths.seq_lens, (std::vector<std::int32_t>{100, 100, 50, 50, 50}));
  EXPECT_EQ(lengths.query_start, (std::vector<std::int32_t>{0, 1, 2, 6, 10, 14}));
  const Limits limits = spec->limits();
  EXPECT_EQ(limits.max_requests, 5);
  EXPECT_EQ(limits.max_query_tokens, 4);
  EXPECT_EQ(limits.max_total_query_tokens, 14);
  EXPECT_EQ(limits.max_kv_tokens, 100);
  EXPECT_EQ(limits.max_total_kv_tokens, 350);
}

}  // namespace
}  // namespace latte::cli
