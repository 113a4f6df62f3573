// The compute threads of a process: persistent workers, one sub-pool per NUMA node, woken in
// microseconds, asleep soon after the last job.
//
// A job is published by advancing each sub-pool's gate. A worker that finds the gate open joins and
// claims chunks; the submitting thread works too, and when the chunks are gone it closes the gate
// and waits only for those that joined. So a job never waits for a worker that is still asleep or
// has lost its core to another program, which is what makes the pool usable on shared cores.
//
// Idle workers poll for at most `spin_us`, and only if the recent jobs came that fast, if the pool
// fits its CPUs, and if nobody else wanted the core in the meantime; then they sleep in the kernel.
//
// Threads: any thread may submit; jobs of several submitters run one after the other. A call from
// inside a task of the same pool runs in place, on the calling thread; from a task of another pool
// it is refused (kConflict). Lock order: (1) submit_mutex_, never taken by a worker; (2)
// failure_mutex_.
// Fork: the child has no workers; calls there fail with kConflict, and destruction is safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/threads/function_ref.h"
#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "base/machine/topology.h"

namespace tandem {

class ThreadPool {
 public:
  // The function of a job: runs tasks [begin, end). `thread_id` in [0, num_threads()) identifies
  // the calling thread, for scratch memory; 0 is the submitter. It should not throw: the first
  // exception ends the job, which then fails with kCapacity (bad_alloc) or kInternal (the
  // exception's text).
  using Body = FunctionRef<void(size_t begin, size_t end, int thread_id)>;

  struct Options {
    // One sub-pool of threads, usually one per NUMA node: its number of threads, at least 1 (the
    // submitting thread counts in one of the first sub-pools), and its CPUs in the order in which
    // to use them.
    struct Node {
      int node_id = 0;
      int num_threads = 1;
      std::vector<int> cpus;
    };
    std::vector<Node> nodes;
    // If true, each worker is tied to one CPU. Otherwise, if there are several nodes, workers are
    // only kept on the CPUs of their node.
    bool pin = false;
    // Longest time in microseconds that an idle worker polls before it sleeps: about the cost of a
    // sleep and a wake-up.
    int spin_us = 30;
  };

  // Returns options with `num_threads` spread over the NUMA nodes in proportion to their physical
  // cores; nodes that get no thread are left out. REQUIRES: num_threads >= 1.
  static Options plan(const Topology& topology, int num_threads);

  // Errors: kConfig (no node, a count below 1, more than 4096 threads), kCapacity (the kernel
  // refused a thread).
  static Result<std::unique_ptr<ThreadPool>> create(const Options& options);

  // REQUIRES: no call is in progress.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs tasks [0, num_tasks) in chunks, each claimed by whichever thread is free; threads prefer
  // the chunks of their own node. Which thread runs which task differs from call to call.
  Status parallel_for(size_t num_tasks, size_t chunk, Body body);

  // Runs the i-th of num_threads() equal ranges of tasks on thread i, the same in every call: for
  // data that should stay in a thread's cache, or that the thread touched first. Waits for every
  // thread.
  Status parallel_for_fixed(size_t num_tasks, Body body);

  // Runs tasks [n * tasks_per_node, (n + 1) * tasks_per_node) on threads of sub-pool n only.
  Status parallel_for_nodes(size_t tasks_per_node, size_t chunk, Body body);

  int num_threads() const { return num_threads_; }
  int num_nodes() const { return static_cast<int>(sub_pools_.size()); }
  int num_threads_of(int node_index) const;
  // NUMA node of a sub-pool.
  int node_id_of(int node_index) const;
  int spin_us() const { return static_cast<int>(spin_ns_ / 1000); }

 private:
  // State of a sub-pool. Threads that join a job write one cache line, threads that claim chunks
  // another, so that they do not disturb each other.
  struct SubPool {
    alignas(64) std::atomic<uint64_t> gate{0};  // Epoch and state; see thread_pool.cc.
    alignas(64) std::atomic<size_t> next_task{0};
    size_t end_task = 0;  // Written while the gate is closed and nobody is inside.
    alignas(64) std::atomic<int> num_sleeping{0};
    std::atomic<int> wakes_left{0};
    int node_id = 0;
    int first_thread = 0;
    int num_threads = 0;
    int num_workers = 0;
  };
  enum class Schedule { kDynamic, kFixed, kNodes };
  struct Job {
    Schedule schedule = Schedule::kDynamic;
    size_t num_tasks = 0;
    size_t chunk = 1;
    const Body* body = nullptr;
  };

  explicit ThreadPool(const Options& options);
  Status start_workers(const Options& options);
  Status submit(const Job& job);
  void split_tasks();
  void publish();
  void work(SubPool& sub_pool, int thread_id);
  void run_share(SubPool& sub_pool, int thread_id);
  void claim_chunks(SubPool& sub_pool, int thread_id);
  void run_range(size_t begin, size_t end, int thread_id) noexcept;
  void record_failure(Error error) noexcept;
  void wait_drained(SubPool& sub_pool) const;
  bool is_forked() const;

  int num_threads_ = 0;
  int64_t spin_ns_ = 0;
  uint32_t fork_generation_ = 0;
  int owner_pid_ = 0;
  std::vector<std::unique_ptr<SubPool>> sub_pools_;
  std::vector<std::thread> workers_;

  Mutex submit_mutex_;
  // The running job. The submitter writes it while no worker is inside a job; workers inside read
  // it.
  Job job_;
  std::atomic<int64_t> published_ns_{0};
  std::atomic<bool> has_failed_{false};
  Mutex failure_mutex_;
  Error failure_ GUARDED_BY(failure_mutex_);
};

}  // namespace tandem
