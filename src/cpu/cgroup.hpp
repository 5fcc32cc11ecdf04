// The CPU quota of this process's control groups, of version 1 or 2. What the files say is parsed apart from reading
// them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace latte::cpu {

// A control group as /proc/self/cgroup names it, where it has to do with CPUs.
struct CpuGroup {
  bool v2 = false;
  std::string path;  // "/a/b"; the groups around it are "/a" and ""
  bool operator==(const CpuGroup&) const = default;
};
std::vector<CpuGroup> parse_cgroups(std::string_view text);

// CPUs' worth of time in each period; 0 = unlimited, or nothing that can be read.
double parse_quota_v2(std::string_view cpu_max);                                       // "150000 100000", "max 100000"
double parse_quota_v1(std::string_view cfs_quota_us, std::string_view cfs_period_us);  // "150000" and "100000", "-1"

// Threads that a quota keeps busy all the time: more would be halted in every period, and with them who waits for them.
// At least 1; 0 = unlimited.
std::int32_t quota_threads(double cpus);

// Of the tightest quota of this process's groups and the groups around them; 0 = unlimited. `root`: what lies
// before /proc and /sys.
std::int32_t cgroup_threads(const std::string& root = "");

}  // namespace latte::cpu
