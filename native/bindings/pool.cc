#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "base/threads/thread_pool.h"
#include "base/threads/thread_pool_bench.h"
#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

// Any array is taken and then checked, so that a wrong one is a ShapeError with the reason and not
// silently converted.
using AnyArray = nb::ndarray<nb::ro>;

// Numbers per partial sum. The blocks are fixed, so the result does not depend on the threads.
constexpr size_t kSumBlock = 8192;
constexpr int kMaxThreads = 4096;

std::unique_ptr<ThreadPool> make_pool(std::optional<int> threads, bool pin, bool oversubscribe,
                                      int spin_us) {
  const Topology topology = read_topology();
  const int num_allowed = static_cast<int>(topology.allowed_cpus.size());
  int count = threads ? *threads : recommend_threads(topology).threads;
  if (count < 1 || count > kMaxThreads)
    raise({Code::kConfig, "pool.create",
           std::to_string(count) + " threads: give 1 to " + std::to_string(kMaxThreads),
           "threads"});
  if (spin_us < 0 || spin_us > 1000)
    raise({Code::kConfig, "pool.create", std::to_string(spin_us) + " us: give 0 to 1000",
           "spin_us"});
  if (count > num_allowed && !oversubscribe) {
    const std::string text = "[pool.create] " + std::to_string(count) +
                             " threads asked, this process may use " + std::to_string(num_allowed) +
                             " CPUs: using " + std::to_string(num_allowed);
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) < 0) throw nb::python_error();
    count = num_allowed;
  }
  ThreadPool::Options options = ThreadPool::plan(topology, count);
  options.pin = pin;
  options.spin_us = spin_us;
  return take(ThreadPool::create(options));
}

size_t run_noop(ThreadPool& pool, size_t num_tasks, size_t chunk) {
  std::atomic<size_t> num_run{0};
  run_released([&] {
    return pool.parallel_for(num_tasks, chunk, [&](size_t begin, size_t end, int) {
      num_run.fetch_add(end - begin, std::memory_order_relaxed);
    });
  });
  return num_run.load();
}

std::vector<int> trace_fixed(ThreadPool& pool, size_t num_tasks) {
  std::vector<int> owner(num_tasks, -1);
  run_released([&] {
    return pool.parallel_for_fixed(num_tasks, [&](size_t begin, size_t end, int thread_id) {
      std::fill(owner.data() + begin, owner.data() + end, thread_id);
    });
  });
  return owner;
}

void check_float_vector(const AnyArray& values) {
  const bool is_float = values.dtype() == nb::dtype<float>();
  const bool is_on_cpu = values.device_type() == nb::device::cpu::value;
  if (is_float && is_on_cpu && values.ndim() == 1 && (values.size() < 2 || values.stride(0) == 1))
    return;
  raise({Code::kShape, "pool.parallel_sum",
         "a contiguous float32 vector on the CPU is needed, not " + std::to_string(values.ndim()) +
             " dimensions of " + std::to_string(values.dtype().bits) + "-bit items of type code " +
             std::to_string(values.dtype().code) + ": convert it first",
         "values"});
}

double parallel_sum(ThreadPool& pool, const AnyArray& values) {
  check_float_vector(values);
  const size_t size = values.size();
  const float* data = static_cast<const float*>(values.data());
  std::vector<double> partials((size + kSumBlock - 1) / kSumBlock, 0.0);
  run_released([&] {
    return pool.parallel_for(partials.size(), 1, [&](size_t begin, size_t end, int) {
      for (size_t block = begin; block < end; ++block) {
        double sum = 0;
        const size_t stop = std::min(size, (block + 1) * kSumBlock);
        for (size_t i = block * kSumBlock; i < stop; ++i) sum += data[i];
        partials[block] = sum;
      }
    });
  });
  double total = 0;
  for (const double partial : partials) total += partial;
  return total;
}

WakeupTimes benchmark_wakeup(ThreadPool& pool, int rounds, int gap_us) {
  std::optional<Result<WakeupTimes>> result;
  {
    const nb::gil_scoped_release release;
    result.emplace(measure_wakeup(pool, rounds, gap_us));
  }
  return take(std::move(*result));
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::class_<WakeupTimes>(module, "WakeupTimes",
                          "Medians of an empty job on all threads, from call to return.")
      .def_ro("pool_ns", &WakeupTimes::pool_ns)
      .def_ro("condvar_ns", &WakeupTimes::condvar_ns,
              "The same by std::thread and CondVar, in alternating bursts.")
      .def_ro("ratio", &WakeupTimes::ratio, "Median of condvar / pool; above 1, ours is faster.");
  nb::class_<ThreadPool>(module, "ThreadPool",
                         "The compute threads of a process; kernels run on them.\n\n"
                         "Any Python thread may call; calls run one after the other and release "
                         "the GIL. In a forked child every call raises ConflictError.")
      .def(nb::new_(&make_pool), "threads"_a = nb::none(), nb::kw_only(), "pin"_a = false,
           "oversubscribe"_a = false, "spin_us"_a = 30,
           "Start the threads.\n\n"
           "Args:\n"
           "    threads: the calling thread included; None = `recommend_threads`. More than the\n"
           "        allowed CPUs are clamped to them with a RuntimeWarning.\n"
           "    pin: tie each worker to one CPU.\n"
           "    oversubscribe: keep more threads than CPUs (they never poll).\n"
           "    spin_us: the longest that an idle worker polls before it sleeps.\n"
           "Raises: ConfigError (range); CapacityError (the kernel refused a thread).")
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def_prop_ro(
          "threads_per_node",
          [](const ThreadPool& pool) {
            std::vector<int> counts;
            for (int n = 0; n < pool.num_nodes(); ++n) counts.push_back(pool.num_threads_of(n));
            return counts;
          },
          "Threads of each sub-pool, one sub-pool per NUMA node.")
      .def_prop_ro(
          "node_ids",
          [](const ThreadPool& pool) {
            std::vector<int> ids;
            for (int n = 0; n < pool.num_nodes(); ++n) ids.push_back(pool.node_id_of(n));
            return ids;
          },
          "NUMA node of each sub-pool.")
      .def_prop_ro("spin_us", &ThreadPool::spin_us, "0 where polling is off.")
      .def("run_noop", &run_noop, "num_tasks"_a, "chunk"_a = 1,
           "Run empty tasks; returns how many ran. For measuring the cost of a task.")
      .def("trace_fixed", &trace_fixed, "num_tasks"_a,
           "The thread that runs each task under the fixed schedule.")
      .def("parallel_sum", &parallel_sum, "values"_a,
           "Sum of a contiguous float32 vector in float64; bitwise independent of the threads.\n\n"
           "Raises: ShapeError (dtype, device, dimensions, stride).")
      .def("benchmark_wakeup", &benchmark_wakeup, "rounds"_a = 1000, "gap_us"_a = 0,
           "Time the start and end of a job, with `gap_us` of rest before each.");
}

}  // namespace tandem::bindings
