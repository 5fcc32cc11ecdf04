// What control groups say about CPUs, as text.
#include "cpu/cgroup.hpp"

#include <gtest/gtest.h>

namespace latte::cpu {
namespace {

TEST(Cgroup, OfVersion2IsTheLineWithoutControllers) {
  EXPECT_EQ(parse_cgroups("0::/user.slice/session.scope\n"),
            (std::vector<CpuGroup>{{true, "/user.slice/session.scope"}}));
  EXPECT_EQ(parse_cgroups("0::/"), (std::vector<CpuGroup>{{true, ""}})) << "the root is no directory of its own";
}

TEST(Cgroup, OfVersion1IsTheOneWithTheCpuController) {
  EXPECT_EQ(parse_cgroups("5:memory:/a\n4:cpu,cpuacct:/docker/b\n3:cpuset:/c\n1:name=systemd:/d\n"),
            (std::vector<CpuGroup>{{false, "/docker/b"}}));
  EXPECT_EQ(parse_cgroups("2:cpuacct,cpu:/a:b\n0::/\n"), (std::vector<CpuGroup>{{false, "/a:b"}, {true, ""}}))
      << "both";
}

TEST(Cgroup, LinesThatAreNoneAreSkipped) {
  for (const char* text : {"", "\n\n", "garbage", "0:", ":", "1:cpuset,cpuacct:/a"})
    EXPECT_TRUE(parse_cgroups(text).empty()) << text;
}

TEST(Cgroup, QuotaOfVersion2) {
  EXPECT_DOUBLE_EQ(parse_quota_v2("150000 100000"), 1.5);
  EXPECT_DOUBLE_EQ(parse_quota_v2("400000 100000\n"), 4);
  EXPECT_DOUBLE_EQ(parse_quota_v2("1000 100000"), 0.01);
  for (const char* text : {"max 100000", "max", "", "garbage", "100000", "100000 ", "100000 x", "100000 0", "-1 100000",
                           "0 100000", "100000 -1", "nan 100000"})
    EXPECT_EQ(parse_quota_v2(text), 0) << text;
}

TEST(Cgroup, QuotaOfVersion1) {
  EXPECT_DOUBLE_EQ(parse_quota_v1("150000", "100000"), 1.5);
  EXPECT_DOUBLE_EQ(parse_quota_v1("50000\n", "100000\n"), 0.5);
  EXPECT_EQ(parse_quota_v1("-1", "100000"), 0) << "unlimited";
  for (const char* text : {"", "garbage", "0", "-5", "max"}) {
    EXPECT_EQ(parse_quota_v1(text, "100000"), 0) << text;
    EXPECT_EQ(parse_quota_v1("100000", text), 0) << text;
  }
}

TEST(Cgroup, OnlyWholeCpusCountAndAtLeastOne) {
  EXPECT_EQ(quota_threads(0), 0) << "unlimited";
  EXPECT_EQ(quota_threads(0.01), 1);
  EXPECT_EQ(quota_threads(1), 1);
  EXPECT_EQ(quota_threads(1.5), 1);
  EXPECT_EQ(quota_threads(1.99), 1);
  EXPECT_EQ(quota_threads(2), 2);
  EXPECT_EQ(quota_threads(63.7), 63);
  EXPECT_EQ(quota_threads(1e300), INT32_MAX);
}

TEST(Cgroup, OfThisProcessCanBeRead) { EXPECT_GE(cgroup_threads(), 0); }

}  // namespace
}  // namespace latte::cpu
