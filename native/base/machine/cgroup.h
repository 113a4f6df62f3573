// Limits that the control groups of this process set: CPU quota and memory, for cgroup v1 and v2.
// The tightest limit counts, of all groups from the process's own up to the top that is visible
// here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/machine/sysfs.h"

namespace tandem {

struct CgroupLimits {
  // CPU time per wall time, in CPUs (1.5 = 150 ms every 100 ms); empty = no quota.
  std::optional<double> cpu_quota;
  // Path of the file that sets the quota, for reports; empty if there is no quota.
  std::string cpu_quota_source;
  std::optional<int64_t> memory_limit_bytes;
  std::string memory_limit_source;
  // Bytes that may still be used under the group with the least memory left; file pages that the
  // kernel can give up count as free. Empty if no group with a limit reports its usage. Never
  // negative.
  std::optional<int64_t> memory_left_bytes;
};

// Never fails: groups that cannot be read set no limit.
CgroupLimits read_cgroup_limits(const Root& root);

}  // namespace tandem
