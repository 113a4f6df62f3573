#include "base/machine/topology.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <thread>

namespace tandem {
namespace {

const std::string kCpus = "/sys/devices/system/cpu";
const std::string kNodes = "/sys/devices/system/node";

// Returns the list after `key:` in /proc/self/status. The file describes the main thread, from
// which other threads inherit.
std::optional<std::vector<int>> read_status_list(const Root& root, const std::string& key) {
  const std::string text = root.read_text("/proc/self/status").value_or("");
  for (const std::string& line : split(text, '\n'))
    if (line.starts_with(key + ":")) return parse_cpu_list(line.substr(key.size() + 1));
  return std::nullopt;
}

// Returns the allowed CPUs. The kernel intersects the affinity with the cpuset, so one list has
// both.
std::vector<int> read_allowed_cpus(const Root& root) {
  auto cpus = read_status_list(root, "Cpus_allowed_list");
  if (!cpus || cpus->empty()) cpus = root.read_list(kCpus + "/online");
  if (cpus && !cpus->empty()) return *cpus;
  const int count = root.is_live() ? static_cast<int>(std::thread::hardware_concurrency()) : 1;
  std::vector<int> all;
  for (int cpu = 0; cpu < std::max(count, 1); ++cpu) all.push_back(cpu);
  return all;
}

std::vector<std::vector<int>> read_cores(const Root& root, const std::vector<int>& allowed) {
  // Keyed by the first sibling, allowed or not: a cpuset may hold only the second of a pair.
  std::map<int, std::vector<int>> by_first_sibling;
  for (const int cpu : allowed) {
    const std::string folder = kCpus + "/cpu" + std::to_string(cpu) + "/topology";
    auto siblings = root.read_list(folder + "/core_cpus_list");
    if (!siblings) siblings = root.read_list(folder + "/thread_siblings_list");
    const bool is_usable = siblings && std::count(siblings->begin(), siblings->end(), cpu) > 0;
    by_first_sibling[is_usable ? siblings->front() : cpu].push_back(cpu);
  }
  std::vector<std::vector<int>> cores;
  for (auto& [first, cpus] : by_first_sibling) cores.push_back(std::move(cpus));
  std::sort(cores.begin(), cores.end());
  return cores;
}

int count_packages(const Root& root, const std::vector<int>& allowed) {
  std::set<int64_t> packages;
  for (const int cpu : allowed)
    packages.insert(root.read_int(kCpus + "/cpu" + std::to_string(cpu) +
                                  "/topology/physical_package_id").value_or(0));
  return static_cast<int>(packages.size());
}

std::vector<int> intersect(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

std::vector<NumaNode> read_numa_nodes(const Root& root, const Topology& topology) {
  std::vector<NumaNode> nodes;
  const auto allowed_nodes = read_status_list(root, "Mems_allowed_list");
  std::set<int> placed;
  for (const int id : root.read_list(kNodes + "/online").value_or(std::vector<int>{})) {
    const std::string folder = kNodes + "/node" + std::to_string(id);
    NumaNode node{id, {}, 0, 0};
    node.cpus = intersect(root.read_list(folder + "/cpulist").value_or(std::vector<int>{}),
                          topology.allowed_cpus);
    const std::string meminfo = root.read_text(folder + "/meminfo").value_or("");
    node.memory_total_bytes = find_size_bytes(meminfo, "MemTotal").value_or(0);
    node.memory_free_bytes = find_size_bytes(meminfo, "MemFree").value_or(0);
    const bool has_memory =
        node.memory_total_bytes > 0 &&
        (!allowed_nodes || std::count(allowed_nodes->begin(), allowed_nodes->end(), id) > 0);
    if (node.cpus.empty() && !has_memory) continue;
    placed.insert(node.cpus.begin(), node.cpus.end());
    nodes.push_back(std::move(node));
  }
  if (placed.size() == topology.allowed_cpus.size()) return nodes;
  // The kernel has no NUMA, or its tree lacks a CPU: put everything on one node.
  const std::string meminfo = root.read_text("/proc/meminfo").value_or("");
  return {NumaNode{0, topology.allowed_cpus, topology.memory_total_bytes,
                   find_size_bytes(meminfo, "MemFree").value_or(0)}};
}

int64_t parse_cache_size(std::string text) {
  int64_t unit = 1;
  if (text.ends_with("K")) unit = 1024;
  if (text.ends_with("M")) unit = 1024 * 1024;
  if (unit > 1) text.pop_back();
  const int64_t number = parse_int(text).value_or(0);
  return number > 0 && number < (int64_t{1} << 40) ? number * unit : 0;
}

CacheSizes read_caches(const Root& root, int cpu) {
  CacheSizes sizes;
  const std::string folder = kCpus + "/cpu" + std::to_string(cpu) + "/cache";
  for (const std::string& name : root.list_folder(folder)) {
    if (!name.starts_with("index")) continue;
    const std::string path = folder + "/" + name;
    const int64_t level = root.read_int(path + "/level").value_or(0);
    const int64_t bytes = parse_cache_size(root.read_text(path + "/size").value_or(""));
    if (root.read_text(path + "/type") == "Instruction") continue;
    if (level == 1) sizes.l1d_bytes = bytes;
    if (level == 2) sizes.l2_bytes = bytes;
    if (level == 3) sizes.l3_bytes = bytes;
  }
  return sizes;
}

std::string format_cpus(double cpus) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", cpus);
  return text;
}

}  // namespace

HugepageState read_hugepage_state(const Root& root) {
  HugepageState state;
  // "always [madvise] never": the brackets mark the choice.
  const std::string text =
      root.read_text("/sys/kernel/mm/transparent_hugepage/enabled").value_or("");
  const size_t open = text.find('['), close = text.find(']');
  if (open != std::string::npos && close != std::string::npos && open < close)
    state.transparent = text.substr(open + 1, close - open - 1);
  const std::string folder = "/sys/kernel/mm/hugepages";
  for (const std::string& name : root.list_folder(folder)) {
    // Folders of huge page sizes are named such as "hugepages-2048kB".
    const std::string prefix = "hugepages-";
    if (!name.starts_with(prefix) || !name.ends_with("kB")) continue;
    const auto size_kib = parse_int(name.substr(prefix.size(), name.size() - prefix.size() - 2));
    if (!size_kib || *size_kib <= 0 || *size_kib > (INT64_MAX >> 10)) continue;
    state.pools.push_back({*size_kib * 1024,
                           root.read_int(folder + "/" + name + "/nr_hugepages").value_or(0),
                           root.read_int(folder + "/" + name + "/free_hugepages").value_or(0)});
  }
  std::sort(state.pools.begin(), state.pools.end(),
            [](const auto& a, const auto& b) { return a.page_size_bytes < b.page_size_bytes; });
  return state;
}

Topology read_topology(const Root& root) {
  Topology topology;
  topology.allowed_cpus = read_allowed_cpus(root);
  const auto online = root.read_list(kCpus + "/online");
  topology.num_online_cpus =
      static_cast<int>(online ? online->size() : topology.allowed_cpus.size());
  topology.cores = read_cores(root, topology.allowed_cpus);
  topology.num_packages = count_packages(root, topology.allowed_cpus);
  const std::string meminfo = root.read_text("/proc/meminfo").value_or("");
  topology.memory_total_bytes = find_size_bytes(meminfo, "MemTotal").value_or(0);
  topology.memory_available_bytes = find_size_bytes(meminfo, "MemAvailable").value_or(0);
  topology.numa_nodes = read_numa_nodes(root, topology);
  topology.caches = read_caches(root, topology.allowed_cpus.front());
  topology.hugepages = read_hugepage_state(root);
  topology.limits = read_cgroup_limits(root);
  return topology;
}

std::optional<int64_t> read_free_memory(const Root& root) {
  const std::string meminfo = root.read_text("/proc/meminfo").value_or("");
  const std::optional<int64_t> available = find_size_bytes(meminfo, "MemAvailable");
  const std::optional<int64_t> left = read_cgroup_limits(root).memory_left_bytes;
  return available && left ? std::min(*available, *left) : available ? available : left;
}

ThreadAdvice recommend_threads(const Topology& topology) {
  const int num_cores = topology.num_physical_cores();
  const std::string cores = std::to_string(num_cores) + " physical cores allowed (" +
                            std::to_string(topology.allowed_cpus.size()) + " CPUs)";
  const auto& quota = topology.limits.cpu_quota;
  if (!quota || *quota >= num_cores) return {num_cores, cores};
  const int threads = std::max(1, static_cast<int>(std::floor(*quota)));
  return {threads, "CPU quota of " + format_cpus(*quota) + " (" +
                       topology.limits.cpu_quota_source + ") below " + cores};
}

}  // namespace tandem
