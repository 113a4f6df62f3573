#include "base/machine/topology.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/machine/cpu_features.h"
#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

void bind_cpu_features(nb::module_& module) {
  nb::class_<CpuFeatures>(
      module, "CpuFeatures",
      "Instruction sets that kernels may use: in the CPU and enabled by the operating system.")
      .def_ro("vendor", &CpuFeatures::vendor)
      .def_ro("brand", &CpuFeatures::brand)
      .def_ro("avx2", &CpuFeatures::avx2)
      .def_ro("fma", &CpuFeatures::fma)
      .def_ro("f16c", &CpuFeatures::f16c)
      .def_ro("avx_vnni", &CpuFeatures::avx_vnni)
      .def_ro("avx512f", &CpuFeatures::avx512f)
      .def_ro("avx512bw", &CpuFeatures::avx512bw)
      .def_ro("avx512vl", &CpuFeatures::avx512vl)
      .def_ro("avx512dq", &CpuFeatures::avx512dq)
      .def_ro("avx512_vnni", &CpuFeatures::avx512_vnni)
      .def_ro("avx512_bf16", &CpuFeatures::avx512_bf16)
      .def_ro("avx512_vbmi", &CpuFeatures::avx512_vbmi)
      .def_ro("avx512_fp16", &CpuFeatures::avx512_fp16)
      .def_ro("amx_tile", &CpuFeatures::amx_tile)
      .def_ro("amx_int8", &CpuFeatures::amx_int8)
      .def_ro("amx_bf16", &CpuFeatures::amx_bf16)
      .def_ro("amx_blocker", &CpuFeatures::amx_blocker,
              "Why AMX is unusable although the CPU has it; empty otherwise.")
      .def_ro("cap", &CpuFeatures::cap,
              "The level of `cap_isa` that hides wider ones; empty for none.");
  module.def("cpu_features", &cpu_features, nb::rv_policy::reference,
             "Detect once; on a CPU with AMX this asks the kernel for the use of tiles.");
}

void bind_parts(nb::module_& module) {
  nb::class_<NumaNode>(module, "NumaNode", "A NUMA node that this process may use.")
      .def_ro("node_id", &NumaNode::node_id)
      .def_ro("cpus", &NumaNode::cpus, "Allowed CPUs; empty for a node of memory only.")
      .def_ro("memory_total_bytes", &NumaNode::memory_total_bytes)
      .def_ro("memory_free_bytes", &NumaNode::memory_free_bytes);
  nb::class_<HugepagePool>(module, "HugepagePool", "One size of preallocated huge pages.")
      .def_ro("page_size_bytes", &HugepagePool::page_size_bytes)
      .def_ro("num_pages", &HugepagePool::num_pages)
      .def_ro("num_free", &HugepagePool::num_free);
  nb::class_<HugepageState>(module, "HugepageState", "Huge pages of this machine.")
      .def_ro("transparent", &HugepageState::transparent,
              "`always`, `madvise`, `never`, or empty where the kernel has none.")
      .def_ro("pools", &HugepageState::pools);
  nb::class_<CacheSizes>(module, "CacheSizes",
                         "Cache sizes of the first allowed CPU; 0 = unknown.")
      .def_ro("l1d_bytes", &CacheSizes::l1d_bytes)
      .def_ro("l2_bytes", &CacheSizes::l2_bytes)
      .def_ro("l3_bytes", &CacheSizes::l3_bytes);
  nb::class_<CgroupLimits>(module, "CgroupLimits",
                           "The tightest limits of the control groups of this process.")
      .def_ro("cpu_quota", &CgroupLimits::cpu_quota, "In CPUs; None = no quota.")
      .def_ro("cpu_quota_source", &CgroupLimits::cpu_quota_source)
      .def_ro("memory_limit_bytes", &CgroupLimits::memory_limit_bytes)
      .def_ro("memory_limit_source", &CgroupLimits::memory_limit_source)
      .def_ro("memory_left_bytes", &CgroupLimits::memory_left_bytes,
              "Left of the limits, reclaimable file pages included; None = no limit.");
}

}  // namespace

void bind_topology(nb::module_& module) {
  bind_cpu_features(module);
  bind_parts(module);
  nb::class_<Topology>(module, "Topology", "The machine as this process may use it.")
      .def_ro("num_online_cpus", &Topology::num_online_cpus)
      .def_ro("allowed_cpus", &Topology::allowed_cpus)
      .def_ro("cores", &Topology::cores, "Allowed CPUs grouped by physical core.")
      .def_ro("numa_nodes", &Topology::numa_nodes)
      .def_ro("num_packages", &Topology::num_packages, "Sockets with an allowed CPU.")
      .def_ro("caches", &Topology::caches)
      .def_ro("hugepages", &Topology::hugepages)
      .def_ro("memory_total_bytes", &Topology::memory_total_bytes)
      .def_ro("memory_available_bytes", &Topology::memory_available_bytes)
      .def_ro("limits", &Topology::limits);
  nb::class_<ThreadAdvice>(module, "ThreadAdvice", "A number of compute threads and why.")
      .def_ro("threads", &ThreadAdvice::threads)
      .def_ro("reason", &ThreadAdvice::reason);
  module.def(
      "read_topology", [](const std::string& root) { return read_topology(Root(root)); },
      "root"_a = "", nb::call_guard<nb::gil_scoped_release>(),
      "Read /proc and /sys below `root` (empty = this machine). Never fails: what is missing has "
      "its plainest value.");
  module.def(
      "read_free_memory", [](const std::string& root) { return read_free_memory(Root(root)); },
      "root"_a = "", nb::call_guard<nb::gil_scoped_release>(),
      "Bytes that this process can have now, by the machine and by its control groups; None if "
      "neither says. Reads a dozen small files.");
  module.def("recommend_threads", &recommend_threads, "topology"_a,
             "One thread per allowed physical core, at most the whole CPUs of the quota, at "
             "least 1.");
}

}  // namespace tandem::bindings
