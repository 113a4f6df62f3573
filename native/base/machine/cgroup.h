// What the control groups of this process allow it: CPU quota and memory, cgroup v1 and v2, the
// tightest of every group from the process's own up to the top that is visible here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/machine/sysfs.h"

namespace tandem {

struct CgroupLimits {
  // CPU time per wall time, in CPUs (1.5 = 150 ms every 100 ms); empty = no quota.
  std::optional<double> cpu_quota;
  // The file that set the quota, for the report; empty if there is none.
  std::string cpu_quota_source;
  std::optional<int64_t> memory_limit_bytes;
  std::string memory_limit_source;
  // What is left of the limits, file pages that the kernel can give up included: of the group with the
  // least. Empty if no group with a limit says what it uses. Never negative.
  std::optional<int64_t> memory_left_bytes;
};

// Never fails: groups that cannot be read set no limit.
CgroupLimits read_cgroup_limits(const Root& root);

}  // namespace tandem
