// Goal: a damaged /proc never harms the reader. The limits themselves are tested from Python, on
// recorded trees of several machines (tests/native/test_topology.py).
#include "base/machine/cgroup.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/test.h"

namespace tandem {
namespace {

CgroupLimits read_with(const std::string& mountinfo, const std::string& cgroup) {
  char folder[] = "/tmp/tandem_cgroup_XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string self = std::string(folder) + "/proc/self";
  std::filesystem::create_directories(self);
  std::ofstream(self + "/mountinfo") << mountinfo;
  std::ofstream(self + "/cgroup") << cgroup;
  const CgroupLimits limits = read_cgroup_limits(Root(folder));
  std::filesystem::remove_all(folder);
  return limits;
}

TEST(damaged_mountinfo_sets_no_limit) {
  const std::string line = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
  for (size_t length = 0; length <= line.size(); ++length)
    CHECK(!read_with(line.substr(0, length), "0::/a/b").cpu_quota.has_value());
  for (const char* mountinfo : {"- - - - - -", "1 2 3 \\04 \\ rw - cgroup x cpu", "\n\n - cgroup"})
    CHECK(!read_with(mountinfo, "1:cpu:/..").cpu_quota.has_value());
}

TEST(damaged_group_lines_set_no_limit) {
  const std::string mountinfo = "31 23 0:28 /x /sys/fs/cgroup rw - cgroup cgroup cpu,memory";
  for (const char* cgroup :
       {"", ":", "::", "1:cpu", "1:cpu:", "1:cpu:x", "1:cpu:///", "0::/x/../y"})
    CHECK(!read_with(mountinfo, cgroup).memory_limit_bytes.has_value());
}

}  // namespace
}  // namespace tandem
