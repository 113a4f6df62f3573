#include "base/machine/cgroup.h"

#include <algorithm>
#include <vector>

namespace tandem {
namespace {

// cgroup v1 writes "no limit" as LONG_MAX rounded down to a page; no machine has 2^60 bytes.
constexpr int64_t kUnlimitedBytes = int64_t{1} << 60;

// One line of /proc/self/mountinfo that mounts a cgroup hierarchy.
struct CgroupMount {
  bool is_v2 = false;
  std::string root;         // The group that is visible at `mountpoint`.
  std::string mountpoint;
  std::vector<std::string> options;  // v1: the controllers, among others.
};

// mountinfo writes space, tab, newline and backslash as \ooo.
std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_octal = [&](size_t at) { return text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && i + 3 < text.size() && is_octal(i + 1) && is_octal(i + 2) &&
        is_octal(i + 3)) {
      const int value = (text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0');
      out.push_back(static_cast<char>(value));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

std::vector<CgroupMount> read_mounts(const Root& root) {
  std::vector<CgroupMount> mounts;
  const std::string text = root.read_text("/proc/self/mountinfo").value_or("");
  for (const std::string& line : split(text, '\n')) {
    // Format of a line: id parent major:minor root mountpoint options [optional...] - fstype source
    // super-options
    const std::vector<std::string> fields = split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (dash - fields.begin() < 6 || fields.end() - dash < 4) continue;
    const std::string& fs_type = dash[1];
    if (fs_type != "cgroup" && fs_type != "cgroup2") continue;
    mounts.push_back(
        {fs_type == "cgroup2", unescape(fields[3]), unescape(fields[4]), split(dash[3], ',')});
  }
  return mounts;
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The group of this process in a hierarchy, as /proc/self/cgroup names it ("" if it does not).
std::string own_group(const std::string& proc_cgroup, bool is_v2, const std::string& controller) {
  for (const std::string& line : split(proc_cgroup, '\n')) {
    // hierarchy-id:controllers:path; v2 is "0::path". The path may hold colons.
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_match = is_v2 ? controllers.empty() && line.substr(0, first) == "0"
                                : contains(split(controllers, ','), controller);
    if (is_match) return line.substr(second + 1);
  }
  return "";
}

// Folders from the process's group up to the mount point, tightest scope first.
//
// The group is named relative to the hierarchy (or to the cgroup namespace), the mount shows it
// from `mount.root` on. A container without a cgroup namespace has both "/docker/x": the limits
// stand at the mount point itself. A group that does not lie below the mount's root (one named by
// "/..", outside the namespace) leaves the mount point as the only folder that is certainly ours.
std::vector<std::string> group_folders(const CgroupMount& mount, const std::string& group) {
  const std::string base = mount.root == "/" ? "" : mount.root;
  std::string relative;
  if (group.starts_with(base) && group.find("/..") == std::string::npos &&
      (group.size() == base.size() || group[base.size()] == '/'))
    relative = group.substr(base.size());
  while (!relative.empty() && relative.back() == '/') relative.pop_back();
  std::vector<std::string> folders;
  while (true) {
    folders.push_back(mount.mountpoint + relative);
    if (relative.empty()) return folders;
    relative.resize(relative.rfind('/'));
  }
}

void tighten_cpu(CgroupLimits& limits, std::optional<int64_t> quota_us,
                 std::optional<int64_t> period_us, const std::string& source) {
  if (!quota_us || !period_us || *quota_us <= 0 || *period_us <= 0) return;
  const double cpus = static_cast<double>(*quota_us) / static_cast<double>(*period_us);
  if (limits.cpu_quota && *limits.cpu_quota <= cpus) return;
  limits.cpu_quota = cpus;
  limits.cpu_quota_source = source;
}

void tighten_memory(CgroupLimits& limits, std::optional<int64_t> bytes, const std::string& source) {
  if (!bytes || *bytes <= 0 || *bytes >= kUnlimitedBytes) return;
  if (limits.memory_limit_bytes && *limits.memory_limit_bytes <= *bytes) return;
  limits.memory_limit_bytes = *bytes;
  limits.memory_limit_source = source;
}

// Sums the counters of memory.stat that stand for file pages which can be dropped or written back.
int64_t read_reclaimable(const Root& root, const std::string& path, const std::string& prefix) {
  int64_t sum = 0;
  for (const std::string& line : split(root.read_text(path).value_or(""), '\n')) {
    const std::vector<std::string> words = split(line, ' ');
    if (words.size() == 2 &&
        (words[0] == prefix + "active_file" || words[0] == prefix + "inactive_file"))
      sum += std::max<int64_t>(parse_int(words[1]).value_or(0), 0);
  }
  return sum;
}

void tighten_left(CgroupLimits& limits, std::optional<int64_t> limit, std::optional<int64_t> used,
                  int64_t reclaimable) {
  if (!limit || *limit <= 0 || *limit >= kUnlimitedBytes || !used || *used < 0) return;
  const int64_t held = *used - std::min(reclaimable, *used);
  const int64_t left = *limit - std::min(held, *limit);
  limits.memory_left_bytes = std::min(limits.memory_left_bytes.value_or(left), left);
}

void read_v2(const Root& root, const std::string& folder, CgroupLimits& limits) {
  const std::string cpu_max = folder + "/cpu.max";
  // "max 100000" or "150000 100000"; the word "max" is no integer and so sets no limit.
  const std::vector<std::string> words = split(root.read_text(cpu_max).value_or(""), ' ');
  if (words.size() == 2) tighten_cpu(limits, parse_int(words[0]), parse_int(words[1]), cpu_max);
  const std::string memory_max = folder + "/memory.max";
  const std::optional<int64_t> limit = root.read_int(memory_max);
  tighten_memory(limits, limit, memory_max);
  if (limit)
    tighten_left(limits, limit, root.read_int(folder + "/memory.current"),
                 read_reclaimable(root, folder + "/memory.stat", ""));
}

}  // namespace

CgroupLimits read_cgroup_limits(const Root& root) {
  CgroupLimits limits;
  const std::string proc_cgroup = root.read_text("/proc/self/cgroup").value_or("");
  // A hybrid host mounts both versions; a controller lives in one, the other has no such file.
  for (const CgroupMount& mount : read_mounts(root)) {
    if (mount.is_v2) {
      for (const std::string& folder : group_folders(mount, own_group(proc_cgroup, true, "")))
        read_v2(root, folder, limits);
      continue;
    }
    if (contains(mount.options, "cpu")) {
      for (const std::string& folder : group_folders(mount, own_group(proc_cgroup, false, "cpu")))
        tighten_cpu(limits, root.read_int(folder + "/cpu.cfs_quota_us"),
                    root.read_int(folder + "/cpu.cfs_period_us"), folder + "/cpu.cfs_quota_us");
    }
    if (contains(mount.options, "memory")) {
      for (const std::string& folder :
           group_folders(mount, own_group(proc_cgroup, false, "memory"))) {
        const std::string path = folder + "/memory.limit_in_bytes";
        const std::optional<int64_t> limit = root.read_int(path);
        tighten_memory(limits, limit, path);
        if (limit)
          tighten_left(limits, limit, root.read_int(folder + "/memory.usage_in_bytes"),
                       read_reclaimable(root, folder + "/memory.stat", "total_"));
      }
    }
  }
  return limits;
}

}  // namespace tandem
