#include "cpu/cgroup.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

namespace latte::cpu {
namespace {

// The first line of a file, or nothing.
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

double ratio(double quota, double period) { return quota > 0 && period > 0 ? quota / period : 0; }

}  // namespace

std::vector<CpuGroup> parse_cgroups(std::string_view text) {
  std::vector<CpuGroup> groups;
  std::istringstream lines{std::string(text)};
  // "id:controllers:path"; version 2 has no controllers, version 1 names cpu among others.
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    groups.push_back({.v2 = v2, .path = std::move(path)});
  }
  return groups;
}

double parse_quota_v2(std::string_view cpu_max) {
  std::istringstream words{std::string(cpu_max)};
  double quota = 0, period = 0;
  words >> quota >> period;  // "max" is no number
  return words ? ratio(quota, period) : 0;
}

double parse_quota_v1(std::string_view cfs_quota_us, std::string_view cfs_period_us) {
  std::istringstream quota_text{std::string(cfs_quota_us)}, period_text{std::string(cfs_period_us)};
  double quota = 0, period = 0;
  quota_text >> quota;
  period_text >> period;
  return quota_text && period_text ? ratio(quota, period) : 0;
}

std::int32_t quota_threads(double cpus) {
  if (!(cpus > 0)) return 0;
  constexpr double kMost = std::numeric_limits<std::int32_t>::max();
  return std::max(1, static_cast<std::int32_t>(std::min(cpus, kMost)));
}

std::int32_t cgroup_threads(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  double least = 0;
  for (const CpuGroup& group : parse_cgroups(text)) {
    const std::string mount = root + (group.v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    for (std::string path = group.path;; path.resize(path.rfind('/'))) {
      const std::string directory = mount + path;
      const double quota = group.v2 ? parse_quota_v2(first_line(directory + "/cpu.max"))
                                    : parse_quota_v1(first_line(directory + "/cpu.cfs_quota_us"),
                                                     first_line(directory + "/cpu.cfs_period_us"));
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      if (path.find('/') == std::string::npos) break;
    }
  }
  return quota_threads(least);
}

}  // namespace latte::cpu
