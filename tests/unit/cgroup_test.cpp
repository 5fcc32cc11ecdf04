// What control groups say about CPUs, as text and as files.
#include "cpu/cgroup.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "cpu/workers.hpp"

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

// Files as a system has them, in a folder of the test.
class CgroupFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "latte_cgroup_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  std::int32_t threads() const { return cgroup_threads(root_.string()); }

  std::filesystem::path root_;
};

TEST_F(CgroupFiles, NoneAreNoLimit) {
  EXPECT_EQ(threads(), 0);
  write("proc/self/cgroup", "0::/a");
  EXPECT_EQ(threads(), 0);
}

TEST_F(CgroupFiles, TheTightestGroupOfVersion2Counts) {
  write("proc/self/cgroup", "0::/a/b");
  write("sys/fs/cgroup/a/b/cpu.max", "max 100000");
  EXPECT_EQ(threads(), 0);
  write("sys/fs/cgroup/a/b/cpu.max", "600000 100000");
  EXPECT_EQ(threads(), 6);
  write("sys/fs/cgroup/a/cpu.max", "350000 100000");
  EXPECT_EQ(threads(), 3) << "a group around it";
  write("sys/fs/cgroup/cpu.max", "200000 100000");
  EXPECT_EQ(threads(), 2) << "as a container sees its own, where it sees no other";
  write("sys/fs/cgroup/c/cpu.max", "100000 100000");
  EXPECT_EQ(threads(), 2) << "somebody else's";
}

TEST_F(CgroupFiles, TheTightestGroupOfVersion1Counts) {
  write("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/a/b");
  write("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1");
  write("sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000");
  EXPECT_EQ(threads(), 0);
  write("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "450000");
  EXPECT_EQ(threads(), 4);
  write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000");
  write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000");
  EXPECT_EQ(threads(), 2);
  write("sys/fs/cgroup/a/b/cpu.max", "100000 100000");
  EXPECT_EQ(threads(), 2) << "no group of this process is of version 2";
}

TEST_F(CgroupFiles, TheDefaultThreadCountIsCutByTheQuota) {
  const std::int32_t without = available_threads(root_.string());
  EXPECT_GE(without, 1);
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/cpu.max", "100000 100000");
  EXPECT_EQ(available_threads(root_.string()), 1);
  write("sys/fs/cgroup/cpu.max", "100000000000 100000");
  EXPECT_EQ(available_threads(root_.string()), without) << "a quota of more than there are";
}

// The files of the machine it runs on, whatever they say: nothing breaks, and the count is one that can be used.
TEST(Cgroup, OfThisProcessCutsTheThreadsThatMayRun) {
  const std::int32_t quota = cgroup_threads(), threads = available_threads();
  ASSERT_GE(quota, 0);
  EXPECT_GE(threads, 1);
  EXPECT_TRUE(quota == 0 || threads <= quota) << threads << " threads, " << quota << " by the quota";
}

}  // namespace
}  // namespace latte::cpu
