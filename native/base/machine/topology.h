// The machine as this process may use it: CPUs allowed by affinity, their SMT siblings and NUMA
// nodes, control-group limits, caches, huge pages; and how many compute threads follow from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/machine/cgroup.h"
#include "base/machine/sysfs.h"

namespace tandem {

// A NUMA node that this process may use. A node without an allowed CPU (pure memory) has no cpus.
struct NumaNode {
  int node_id = 0;
  std::vector<int> cpus;  // Allowed ones only.
  int64_t memory_total_bytes = 0;
  int64_t memory_free_bytes = 0;
};

// One size of preallocated huge pages.
struct HugepagePool {
  int64_t page_size_bytes = 0;
  int64_t num_pages = 0;
  int64_t num_free = 0;
};

struct HugepageState {
  std::string transparent;  // "always", "madvise", "never"; "" if the kernel has none.
  std::vector<HugepagePool> pools;
};

// Sizes in bytes of the caches of the first allowed CPU; 0: unknown.
struct CacheSizes {
  int64_t l1d_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
};

struct Topology {
  int num_online_cpus = 0;
  std::vector<int> allowed_cpus;
  // The allowed CPUs grouped by physical core, in order of their first CPU.
  std::vector<std::vector<int>> cores;
  std::vector<NumaNode> numa_nodes;
  int num_packages = 0;  // Sockets with an allowed CPU.
  CacheSizes caches;
  HugepageState hugepages;
  int64_t memory_total_bytes = 0;
  int64_t memory_available_bytes = 0;  // Before the limit of the control group.
  CgroupLimits limits;

  int num_physical_cores() const { return static_cast<int>(cores.size()); }
};

// A recommended number of threads, with the reason.
struct ThreadAdvice {
  int threads = 1;
  std::string reason;
};

// Reads the machine's topology. It never fails: what cannot be read gets its plainest value (one
// node, every CPU a core of its own). The result has at least one CPU, one core and one node. Cost:
// reads some hundred small files per 64 CPUs.
Topology read_topology(const Root& root = Root());

HugepageState read_hugepage_state(const Root& root = Root());

// Returns the bytes of memory that this process can still have, by the machine and by its control
// groups; empty if the machine does not report it. Cost: reads a dozen small files.
std::optional<int64_t> read_free_memory(const Root& root = Root());

// Compute threads, the submitting thread included: one per allowed physical core, because the SMT
// sibling shares the vector units and the L2 that a kernel fills, and at most the whole CPUs of the
// quota. The quota is rounded down: with one thread more than it covers, the kernel stops *all*
// threads of the group until the period (100 ms) ends, in the middle of a token; the fraction left
// over feeds the tokenizer and the HTTP thread. At least 1.
ThreadAdvice recommend_threads(const Topology& topology);

}  // namespace tandem
