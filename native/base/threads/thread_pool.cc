#include "base/threads/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/threads/futex.h"
#include "base/threads/idle_spin.h"

namespace tandem {
namespace {

// The gate: [epoch:32][open:1][counted:1][waiting:1][stop:1][inside:28]. One word, so that a worker
// learns which job it joined in the very operation that keeps the job from ending.
constexpr uint64_t kOpen = uint64_t{1} << 31;     // Workers may join by adding 1 to `inside`.
constexpr uint64_t kCounted = uint64_t{1} << 30;  // Every worker is inside already, once.
constexpr uint64_t kWaiting = uint64_t{1} << 29;  // The submitter sleeps until `inside` is 0.
constexpr uint64_t kStop = uint64_t{1} << 28;
constexpr uint64_t kInside = kStop - 1;

constexpr uint32_t epoch_of(uint64_t gate) { return static_cast<uint32_t>(gate >> 32); }
constexpr uint64_t next_gate(uint64_t gate, uint64_t low) {
  return (uint64_t{epoch_of(gate) + 1} << 32) | low;
}

constexpr int kMaxThreads = 4096;
constexpr size_t kMaxTasks = size_t{1} << 48;  // Cursors overshoot by a chunk per thread.
// Largest number of workers that each woken worker wakes in turn. Waking a thread costs the waker
// about a microsecond, and the woken thread five to twenty: with eight, one level of this tree
// costs as much as the wake-ups that it saves.
constexpr int kWakeFan = 8;

std::atomic<uint32_t> fork_generation{0};

// The job that the current thread runs, if it is inside a task.
struct TaskScope {
  const ThreadPool* pool = nullptr;
  int thread_id = 0;
};
thread_local TaskScope current_scope;

uint32_t current_fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  static_cast<void>(registered);
  return fork_generation.load(std::memory_order_relaxed);
}

// Binds the thread to CPUs as best effort: a refused affinity costs speed, not correctness.
void bind_current_thread(const std::vector<int>& cpus) {
  const int count = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(count);
  if (set == nullptr) return;
  CPU_ZERO_S(CPU_ALLOC_SIZE(count), set);
  for (const int cpu : cpus) CPU_SET_S(cpu, CPU_ALLOC_SIZE(count), set);
  pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(count), set);
  CPU_FREE(set);
}

void name_current_thread(int thread_id) {
  char name[16];
  std::snprintf(name, sizeof name, "tandem-%d", thread_id);
  pthread_setname_np(pthread_self(), name);
}

std::pair<size_t, size_t> fixed_range(size_t num_tasks, int index, int count) {
  const size_t share = num_tasks / static_cast<size_t>(count);
  const size_t rest = num_tasks % static_cast<size_t>(count);
  const size_t i = static_cast<size_t>(index);
  const size_t begin = i * share + std::min(i, rest);
  return {begin, begin + share + (i < rest ? 1 : 0)};
}

// Wakes some sleeping workers of a sub-pool, as its part in waking all of them; see kWakeFan.
void spread_wakes(std::atomic<uint64_t>& gate, std::atomic<int>& wakes_left) {
  int left = wakes_left.load();
  while (left > 0) {
    const int take = std::min(left, kWakeFan);
    if (!wakes_left.compare_exchange_weak(left, left - take)) continue;
    futex_wake(high_half(gate), take);
    return;
  }
}

}  // namespace

ThreadPool::Options ThreadPool::plan(const Topology& topology, int num_threads) {
  Options options;
  std::vector<int> num_cores;
  for (const NumaNode& node : topology.numa_nodes) {
    if (node.cpus.empty()) continue;
    // List the first CPUs of all cores before their SMT siblings: threads share a core only if
    // there are more threads than cores.
    std::vector<int> first, siblings;
    for (const std::vector<int>& core : topology.cores) {
      bool is_first = true;
      for (const int cpu : core) {
        if (!std::binary_search(node.cpus.begin(), node.cpus.end(), cpu)) continue;
        (is_first ? first : siblings).push_back(cpu);
        is_first = false;
      }
    }
    num_cores.push_back(static_cast<int>(first.size()));
    first.insert(first.end(), siblings.begin(), siblings.end());
    options.nodes.push_back({node.node_id, 0, std::move(first)});
  }
  if (options.nodes.empty()) {
    options.nodes.push_back({0, 0, topology.allowed_cpus});
    num_cores.push_back(1);
  }
  for (int thread = 0; thread < num_threads; ++thread) {
    size_t emptiest = 0;
    for (size_t n = 1; n < options.nodes.size(); ++n)
      if ((options.nodes[n].num_threads + 1) * num_cores[emptiest] <
          (options.nodes[emptiest].num_threads + 1) * num_cores[n])
        emptiest = n;
    ++options.nodes[emptiest].num_threads;
  }
  std::erase_if(options.nodes, [](const Options::Node& node) { return node.num_threads == 0; });
  return options;
}

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(const Options& options) {
  int num_threads = 0;
  for (const Options::Node& node : options.nodes) {
    if (node.num_threads < 1 || node.num_threads > kMaxThreads - num_threads)
      return Error{Code::kConfig, "pool.create",
                   std::to_string(node.num_threads) + " threads for a node: give 1 to " +
                       std::to_string(kMaxThreads) + " in all",
                   "threads"};
    num_threads += node.num_threads;
  }
  if (num_threads == 0) return Error{Code::kConfig, "pool.create", "no thread given", "threads"};
  std::unique_ptr<ThreadPool> pool(new ThreadPool(options));
  if (Status status = pool->start_workers(options); !status.is_ok()) return status.error();
  return pool;
}

ThreadPool::ThreadPool(const Options& options)
    : fork_generation_(current_fork_generation()), owner_pid_(getpid()) {
  size_t num_cpus = 0;
  for (const Options::Node& node : options.nodes) {
    auto sub_pool = std::make_unique<SubPool>();
    sub_pool->node_id = node.node_id;
    sub_pool->first_thread = num_threads_;
    sub_pool->num_threads = node.num_threads;
    sub_pool->num_workers = node.num_threads - (num_threads_ == 0 ? 1 : 0);
    num_threads_ += node.num_threads;
    num_cpus += node.cpus.size();
    sub_pools_.push_back(std::move(sub_pool));
  }
  // With more threads than CPUs a poll always takes the core from a thread that has work.
  const bool is_oversubscribed = static_cast<size_t>(num_threads_) > num_cpus;
  spin_ns_ = is_oversubscribed ? 0 : int64_t{1000} * std::max(options.spin_us, 0);
}

Status ThreadPool::start_workers(const Options& options) {
  // Signals belong to the threads of the application: workers inherit a mask that blocks all.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    for (size_t n = 0; n < options.nodes.size(); ++n) {
      SubPool& sub_pool = *sub_pools_[n];
      const std::vector<int>& cpus = options.nodes[n].cpus;
      for (int i = sub_pool.num_threads - sub_pool.num_workers; i < sub_pool.num_threads; ++i) {
        std::vector<int> allowed;
        if (options.pin && !cpus.empty())
          allowed = {cpus[static_cast<size_t>(i) % cpus.size()]};
        else if (options.nodes.size() > 1)
          allowed = cpus;
        const int thread_id = sub_pool.first_thread + i;
        workers_.emplace_back([this, &sub_pool, thread_id, allowed] {
          name_current_thread(thread_id);
          if (!allowed.empty()) bind_current_thread(allowed);
          work(sub_pool, thread_id);
        });
      }
    }
  } catch (const std::system_error& error) {
    status = Status(Code::kCapacity, "pool.create",
                    "thread " + std::to_string(workers_.size() + 1) + " of " +
                        std::to_string(num_threads_) + " refused (" + error.what() +
                        "): use fewer threads or raise the limit of processes",
                    "threads");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

ThreadPool::~ThreadPool() {
  if (is_forked()) {
    // In a forked child the handles name threads of the parent process: neither join nor detach is
    // defined for them, so they are leaked.
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  for (auto& sub_pool : sub_pools_) {
    sub_pool->gate.store(next_gate(sub_pool->gate.load(), kStop));
    futex_wake(high_half(sub_pool->gate), INT_MAX);
  }
  for (std::thread& worker : workers_) worker.join();
}

int ThreadPool::num_threads_of(int node_index) const {
  return sub_pools_[static_cast<size_t>(node_index)]->num_threads;
}

int ThreadPool::node_id_of(int node_index) const {
  return sub_pools_[static_cast<size_t>(node_index)]->node_id;
}

bool ThreadPool::is_forked() const { return fork_generation_ != current_fork_generation(); }

Status ThreadPool::parallel_for(size_t num_tasks, size_t chunk, Body body) {
  return submit({Schedule::kDynamic, num_tasks, std::max<size_t>(chunk, 1), &body});
}

Status ThreadPool::parallel_for_fixed(size_t num_tasks, Body body) {
  return submit({Schedule::kFixed, num_tasks, 1, &body});
}

Status ThreadPool::parallel_for_nodes(size_t tasks_per_node, size_t chunk, Body body) {
  if (tasks_per_node > kMaxTasks) tasks_per_node = kMaxTasks;  // Refused by submit().
  return submit({Schedule::kNodes, tasks_per_node * sub_pools_.size(), std::max<size_t>(chunk, 1),
                 &body});
}

Status ThreadPool::submit(const Job& job) {
  if (job.num_tasks == 0) return {};
  if (job.num_tasks >= kMaxTasks)
    return Status(Code::kConfig, "pool.submit",
                  std::to_string(job.num_tasks) + " tasks: give fewer than 2^48", "num_tasks");
  if (is_forked())
    return Status(Code::kConflict, "pool.submit",
                  "the pool's threads belong to process " + std::to_string(owner_pid_) +
                      " and do not exist in its fork " + std::to_string(getpid()) +
                      ": make a pool here, or start processes by spawn");
  const bool is_nested = current_scope.pool == this;
  if (current_scope.pool != nullptr && !is_nested)
    return Status(Code::kConflict, "pool.submit",
                  "called from a task of another pool: finish that job first, or share the pool");
  if (is_nested) {
    // A nested call runs in place. If it fails, its task of the outer job has failed, and the outer
    // job reports the failure.
    (*job.body)(0, job.num_tasks, current_scope.thread_id);
    return {};
  }
  const MutexLock lock(submit_mutex_);
  job_ = job;
  job_.chunk = std::min(job.chunk, job.num_tasks);
  has_failed_.store(false, std::memory_order_relaxed);
  const bool is_small = job.schedule == Schedule::kDynamic && job.num_tasks <= job_.chunk;
  if (num_threads_ == 1 || is_small) {
    run_range(0, job.num_tasks, 0);
  } else {
    split_tasks();
    publish();
    run_share(*sub_pools_[0], 0);
    for (auto& sub_pool : sub_pools_) sub_pool->gate.fetch_and(~kOpen);
    for (auto& sub_pool : sub_pools_) wait_drained(*sub_pool);
  }
  if (!has_failed_.load(std::memory_order_relaxed)) return {};
  const MutexLock reading(failure_mutex_);
  return std::exchange(failure_, Error{});
}

// Gives each sub-pool the range of tasks that its threads claim first.
void ThreadPool::split_tasks() {
  for (size_t n = 0; n < sub_pools_.size(); ++n) {
    SubPool& sub_pool = *sub_pools_[n];
    size_t begin = 0, end = 0;
    if (job_.schedule == Schedule::kNodes) {
      const size_t per_node = job_.num_tasks / sub_pools_.size();
      begin = n * per_node;
      end = begin + per_node;
    } else {
      begin = fixed_range(job_.num_tasks, sub_pool.first_thread, num_threads_).first;
      end = fixed_range(job_.num_tasks, sub_pool.first_thread + sub_pool.num_threads - 1,
                        num_threads_).second;
    }
    sub_pool.next_task.store(begin, std::memory_order_relaxed);
    sub_pool.end_task = end;
  }
}

void ThreadPool::publish() {
  published_ns_.store(now_ns(), std::memory_order_relaxed);
  for (size_t n = 0; n < sub_pools_.size(); ++n) {
    SubPool& sub_pool = *sub_pools_[n];
    // With a fixed schedule each share has one taker, and a node's tasks have takers on that node
    // only: there every worker is expected and counted. (The submitter serves its own node in any
    // case.)
    const bool is_counted = job_.schedule == Schedule::kFixed ||
                            (job_.schedule == Schedule::kNodes && n > 0);
    const uint64_t low = is_counted
                             ? kCounted | static_cast<uint64_t>(sub_pool.num_workers)
                             : kOpen;
    // Sequentially consistent with the worker's `num_sleeping` and re-read of the gate: either it
    // sees this epoch before it sleeps, or this thread sees it among the sleepers.
    sub_pool.gate.store(next_gate(sub_pool.gate.load(std::memory_order_relaxed), low));
    const int sleeping = sub_pool.num_sleeping.load();
    const size_t num_chunks =
        (sub_pool.end_task - sub_pool.next_task.load(std::memory_order_relaxed) + job_.chunk - 1) /
        job_.chunk;
    // The submitter takes the first chunk of its own node; workers that poll need no wake.
    const size_t open_chunks = num_chunks - (n == 0 && num_chunks > 0 ? 1 : 0);
    const int takers = static_cast<int>(
        std::min(open_chunks, static_cast<size_t>(sub_pool.num_workers)));
    const int polling = sub_pool.num_workers - sleeping;
    const int wakes = is_counted ? sleeping : std::min(sleeping, takers - polling);
    if (wakes <= 0) continue;
    sub_pool.wakes_left.store(wakes);
    spread_wakes(sub_pool.gate, sub_pool.wakes_left);
  }
}

void ThreadPool::work(SubPool& sub_pool, int thread_id) {
  IdleSpin spin(spin_ns_);
  IdleGap gap;
  uint32_t seen = 0;
  while (true) {
    const int64_t idle_since_ns = now_ns();
    const auto has_news = [&] {
      return epoch_of(sub_pool.gate.load(std::memory_order_acquire)) != seen;
    };
    if (gap.expected_ns() > spin_ns_ || !spin.wait(has_news)) {
      sub_pool.num_sleeping.fetch_add(1);
      while (epoch_of(sub_pool.gate.load()) == seen) futex_wait(high_half(sub_pool.gate), seen);
      sub_pool.num_sleeping.fetch_sub(1);
      spread_wakes(sub_pool.gate, sub_pool.wakes_left);
    }
    gap.record(published_ns_.load(std::memory_order_relaxed) - idle_since_ns);

    uint64_t gate = sub_pool.gate.load(std::memory_order_acquire);
    while ((gate & kOpen) != 0 &&
           !sub_pool.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
    }
    if ((gate & kStop) != 0) return;
    // The gate is neither open nor counted: the job ended before this worker woke.
    const bool is_counted = (gate & kCounted) != 0 && epoch_of(gate) != seen;
    const bool is_inside = (gate & kOpen) != 0 || is_counted;
    seen = epoch_of(gate);
    if (!is_inside) continue;
    run_share(sub_pool, thread_id);
    const uint64_t before = sub_pool.gate.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kInside) == 1 && (before & kWaiting) != 0)
      futex_wake(low_half(sub_pool.gate), 1);
  }
}

void ThreadPool::run_share(SubPool& sub_pool, int thread_id) {
  if (job_.schedule == Schedule::kFixed) {
    const auto [begin, end] = fixed_range(job_.num_tasks, thread_id, num_threads_);
    if (begin < end) run_range(begin, end, thread_id);
    return;
  }
  claim_chunks(sub_pool, thread_id);
  if (job_.schedule == Schedule::kNodes) return;
  for (auto& other : sub_pools_)
    if (other.get() != &sub_pool) claim_chunks(*other, thread_id);
}

void ThreadPool::claim_chunks(SubPool& sub_pool, int thread_id) {
  while (!has_failed_.load(std::memory_order_relaxed)) {
    const size_t begin = sub_pool.next_task.fetch_add(job_.chunk, std::memory_order_relaxed);
    if (begin >= sub_pool.end_task) return;
    run_range(begin, std::min(begin + job_.chunk, sub_pool.end_task), thread_id);
  }
}

void ThreadPool::run_range(size_t begin, size_t end, int thread_id) noexcept {
  current_scope = {this, thread_id};
  try {
    (*job_.body)(begin, end, thread_id);
  } catch (const std::bad_alloc&) {
    record_failure({Code::kCapacity, "pool.run", "a task ran out of memory", ""});
  } catch (const std::exception& error) {
    record_failure({Code::kInternal, "pool.run", std::string("a task threw: ") + error.what(), ""});
  } catch (...) {
    record_failure({Code::kInternal, "pool.run", "a task threw something unknown", ""});
  }
  current_scope = {};
}

void ThreadPool::record_failure(Error error) noexcept {
  const MutexLock lock(failure_mutex_);
  if (has_failed_.load(std::memory_order_relaxed)) return;
  failure_ = std::move(error);
  has_failed_.store(true, std::memory_order_relaxed);
}

void ThreadPool::wait_drained(SubPool& sub_pool) const {
  std::atomic<uint64_t>& gate = sub_pool.gate;
  const auto is_empty = [&] { return (gate.load(std::memory_order_acquire) & kInside) == 0; };
  IdleSpin spin(spin_ns_);
  if (is_empty() || spin.wait(is_empty)) return;
  gate.fetch_or(kWaiting);
  while (true) {
    const uint64_t now = gate.load(std::memory_order_acquire);
    if ((now & kInside) == 0) return;
    futex_wait(low_half(gate), static_cast<uint32_t>(now));
  }
}

}  // namespace tandem
