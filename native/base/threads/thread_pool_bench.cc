#include "base/threads/thread_pool_bench.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "base/threads/idle_spin.h"
#include "base/threads/thread_annotations.h"

namespace tandem {
namespace {

// The two alternate in bursts, not job by job: the baseline's threads would take the cores of our
// polling ones each time, which then stop polling, and the polling path would never be measured.
constexpr int kNumBursts = 8;

// The baseline: a counter behind a lock, workers and submitter each waiting on a condition.
class CondvarThreads {
 public:
  explicit CondvarThreads(int num_workers) {
    for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { work(); });
  }
  ~CondvarThreads() {
    {
      const MutexLock lock(mutex_);
      is_stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run_empty_job() {
    MutexLock lock(mutex_);
    num_running_ = workers_.size();
    ++epoch_;
    start_.notify_all();
    done_.wait(lock, [this]() REQUIRES(mutex_) { return num_running_ == 0; });
  }

 private:
  void work() {
    uint64_t seen = 0;
    MutexLock lock(mutex_);
    while (true) {
      start_.wait(lock, [&]() REQUIRES(mutex_) { return is_stopping_ || epoch_ != seen; });
      if (is_stopping_) return;
      seen = epoch_;
      if (--num_running_ == 0) done_.notify_one();
    }
  }

  Mutex mutex_;
  CondVar start_;
  CondVar done_;
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;
  size_t num_running_ GUARDED_BY(mutex_) = 0;
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

// Sleeps for long gaps, polls for short ones, as the caller of a decode step would.
void rest(int gap_us) {
  if (gap_us >= 200) {
    std::this_thread::sleep_for(std::chrono::microseconds(gap_us));
    return;
  }
  const int64_t end = now_ns() + int64_t{1000} * gap_us;
  while (now_ns() < end) pause_cpu();
}

template <class Job>
int64_t time_after_rest(int gap_us, Job job) {
  rest(gap_us);
  const int64_t start = now_ns();
  job();
  return now_ns() - start;
}

template <class T>
T median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Result<WakeupTimes> measure_wakeup(ThreadPool& pool, int rounds, int gap_us) {
  if (rounds < 1 || rounds > 1'000'000)
    return Error{Code::kConfig, "pool.bench", std::to_string(rounds) + " rounds: give 1 to 1000000",
                 "rounds"};
  if (gap_us < 0 || gap_us > 1'000'000)
    return Error{Code::kConfig, "pool.bench", std::to_string(gap_us) + " us: give 0 to 1000000",
                 "gap_us"};
  if (pool.num_threads() < 2)
    return Error{Code::kConfig, "pool.bench", "one thread wakes nobody: give 2 or more", "threads"};
  CondvarThreads baseline(pool.num_threads() - 1);
  const size_t num_tasks = static_cast<size_t>(pool.num_threads());
  const int num_bursts = std::min(kNumBursts, rounds);
  std::vector<int64_t> ours, theirs;
  std::vector<double> ratios;
  for (int burst = 0; burst < num_bursts; ++burst) {
    std::vector<int64_t> our_burst, their_burst;
    for (int round = burst; round < rounds; round += num_bursts) {
      Status status;
      our_burst.push_back(time_after_rest(gap_us, [&] {
        status = pool.parallel_for_fixed(num_tasks, [](size_t, size_t, int) {});
      }));
      if (!status.is_ok()) return status.error();
    }
    for (int round = burst; round < rounds; round += num_bursts)
      their_burst.push_back(time_after_rest(gap_us, [&] { baseline.run_empty_job(); }));
    ratios.push_back(static_cast<double>(median(their_burst)) /
                     static_cast<double>(std::max<int64_t>(median(our_burst), 1)));
    ours.insert(ours.end(), our_burst.begin(), our_burst.end());
    theirs.insert(theirs.end(), their_burst.begin(), their_burst.end());
  }
  return WakeupTimes{median(ours), median(theirs), median(ratios)};
}

}  // namespace tandem
