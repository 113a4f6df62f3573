// Goal: every task runs exactly once, on a thread it may run on, whatever the pool's size, the
// schedule, the number of submitters and the state (polling, asleep, just waking) of the workers.
// Method: count per task; more threads than cores, so that every interleaving of late wakes occurs.
// The same file runs under ThreadSanitizer.
#include "base/threads/thread_pool.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/test.h"
#include "base/threads/thread_pool_bench.h"

#if defined(__SANITIZE_THREAD__)
#define TANDEM_TSAN 1
#else
#define TANDEM_TSAN 0
#endif

namespace tandem {
namespace {

// `counts[n]` threads on sub-pool n. CPU lists are claimed as wide as asked, so that polling is on.
std::unique_ptr<ThreadPool> make_pool(std::vector<int> counts, int spin_us = 30) {
  ThreadPool::Options options;
  options.spin_us = spin_us;
  for (size_t n = 0; n < counts.size(); ++n) {
    std::vector<int> cpus(static_cast<size_t>(counts[n]), 0);
    options.nodes.push_back({static_cast<int>(n), counts[n], cpus});
  }
  auto pool = ThreadPool::create(options);
  CHECK(pool.is_ok());
  return std::move(pool.value());
}

bool is_each_once(const std::vector<std::atomic<int>>& counts) {
  return std::all_of(counts.begin(), counts.end(), [](const auto& c) { return c.load() == 1; });
}

TEST(pool_runs_each_task_once) {
  const std::vector<std::vector<int>> shapes = {{1}, {2}, {5}, {1, 1}, {3, 2}, {1, 2, 4}};
  for (const auto& shape : shapes) {
    auto pool = make_pool(shape);
    for (const size_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      for (const size_t chunk : {0, 1, 3, 5000}) {
        for (int repeat = 0; repeat < 5; ++repeat) {
          std::vector<std::atomic<int>> counts(num_tasks);
          CHECK(pool->parallel_for(num_tasks, chunk, [&](size_t begin, size_t end, int thread_id) {
                      CHECK(thread_id >= 0 && thread_id < pool->num_threads());
                      for (size_t t = begin; t < end; ++t) counts[t].fetch_add(1);
                    }).is_ok());
          CHECK(is_each_once(counts));
        }
      }
    }
  }
}

TEST(pool_fixed_schedule_gives_each_thread_the_same_tasks) {
  auto pool = make_pool({2, 3});
  for (const size_t num_tasks : {1, 4, 5, 13}) {
    std::vector<int> first;
    for (int repeat = 0; repeat < 50; ++repeat) {
      std::vector<int> owner(num_tasks, -1);
      CHECK(pool->parallel_for_fixed(num_tasks, [&](size_t begin, size_t end, int thread_id) {
                  for (size_t t = begin; t < end; ++t) owner[t] = thread_id;
                }).is_ok());
      CHECK(std::is_sorted(owner.begin(), owner.end()));
      if (first.empty()) first = owner;
      CHECK(owner == first);
    }
    CHECK_EQ(first.front(), 0);
    CHECK_EQ(first.back(), static_cast<int>(std::min<size_t>(num_tasks, 5)) - 1);
  }
}

TEST(pool_node_tasks_stay_on_their_node) {
  auto pool = make_pool({2, 3, 1});
  for (int repeat = 0; repeat < 100; ++repeat) {
    std::vector<std::atomic<int>> counts(3 * 8);
    CHECK(pool->parallel_for_nodes(8, 1, [&](size_t begin, size_t end, int thread_id) {
                const size_t node = thread_id < 2 ? 0 : thread_id < 5 ? 1 : 2;
                for (size_t t = begin; t < end; ++t) {
                  CHECK_EQ(t / 8, node);
                  counts[t].fetch_add(1);
                }
              }).is_ok());
    CHECK(is_each_once(counts));
  }
}

// Mixes the schedules, because a worker that wakes late for one job finds another.
TEST(pool_survives_changes_of_schedule) {
  for (const int spin_us : {0, 30}) {
    auto pool = make_pool({2, 2}, spin_us);
    std::atomic<size_t> total{0};
    const auto add = [&](size_t begin, size_t end, int) { total.fetch_add(end - begin); };
    const size_t rounds = TANDEM_TSAN ? 300 : 3000;
    for (size_t i = 0; i < rounds; ++i) {
      CHECK(pool->parallel_for(3, 1, add).is_ok());
      CHECK(pool->parallel_for_fixed(4, add).is_ok());
      CHECK(pool->parallel_for_nodes(2, 1, add).is_ok());
    }
    CHECK_EQ(total.load(), rounds * 11);
  }
}

TEST(pool_serves_several_submitters_in_turn) {
  auto pool = make_pool({3});
  std::atomic<int> inside{0};
  std::atomic<size_t> total{0};
  std::vector<std::thread> submitters;
  for (int s = 0; s < 3; ++s)
    submitters.emplace_back([&] {
      for (int i = 0; i < 200; ++i)
        CHECK(pool->parallel_for(4, 1, [&](size_t begin, size_t end, int) {
                    CHECK(inside.fetch_add(1) < 3);
                    total.fetch_add(end - begin);
                    inside.fetch_sub(1);
                  }).is_ok());
    });
  for (auto& submitter : submitters) submitter.join();
  CHECK_EQ(total.load(), 3u * 200 * 4);
}

TEST(pool_runs_nested_calls_in_place) {
  auto pool = make_pool({3});
  std::atomic<size_t> total{0};
  CHECK(pool->parallel_for(6, 1, [&](size_t, size_t, int outer_id) {
              CHECK(pool->parallel_for(5, 1, [&](size_t begin, size_t end, int inner_id) {
                          CHECK_EQ(inner_id, outer_id);
                          total.fetch_add(end - begin);
                        }).is_ok());
            }).is_ok());
  CHECK_EQ(total.load(), 30u);
}

TEST(pool_refuses_calls_from_another_pools_task) {
  auto outer = make_pool({2});
  auto inner = make_pool({2});
  CHECK(outer->parallel_for(2, 1, [&](size_t, size_t, int) {
               const Status status = inner->parallel_for(2, 1, [](size_t, size_t, int) {});
               CHECK(!status.is_ok() && status.error().code == Code::kConflict);
             }).is_ok());
  CHECK(inner->parallel_for(2, 1, [](size_t, size_t, int) {}).is_ok());
}

TEST(pool_reports_an_exception_and_goes_on) {
  auto pool = make_pool({2, 2});
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto fail_at_7 = [](size_t begin, size_t, int) {
      if (begin == 7) throw std::runtime_error("seven");
    };
    const Status status = pool->parallel_for(50, 1, fail_at_7);
    CHECK(!status.is_ok() && status.error().code == Code::kInternal);
    CHECK(!status.is_ok() && status.error().what.find("seven") != std::string::npos);
    const Status fixed = pool->parallel_for_fixed(4, [](size_t, size_t, int) {
      throw std::bad_alloc();
    });
    CHECK(!fixed.is_ok() && fixed.error().code == Code::kCapacity);
    CHECK(pool->parallel_for(50, 1, [](size_t, size_t, int) {}).is_ok());
  }
}

TEST(pool_refuses_absurd_sizes) {
  CHECK(ThreadPool::create({}).error().code == Code::kConfig);
  for (const int threads : {0, -1, 5000}) {
    ThreadPool::Options options;
    options.nodes.push_back({0, threads, {0}});
    CHECK(ThreadPool::create(options).error().code == Code::kConfig);
  }
  auto pool = make_pool({2});
  CHECK(!pool->parallel_for(SIZE_MAX, 1, [](size_t, size_t, int) {}).is_ok());
  CHECK(!pool->parallel_for_nodes(SIZE_MAX, 1, [](size_t, size_t, int) {}).is_ok());
}

TEST(pool_dies_cleanly_in_any_state) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    auto pool = make_pool({4}, repeat % 2 == 0 ? 0 : 30);
    if (repeat % 3 != 0) CHECK(pool->parallel_for(8, 1, [](size_t, size_t, int) {}).is_ok());
  }
}

TEST(plan_spreads_threads_over_nodes_by_cores) {
  Topology topology;
  topology.allowed_cpus = {0, 1, 2, 3, 4, 5, 6, 7};
  topology.cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  topology.numa_nodes = {{0, {0, 1, 2, 4, 5, 6}, 1, 1}, {1, {3, 7}, 1, 1}, {2, {}, 1, 1}};
  auto options = ThreadPool::plan(topology, 4);
  CHECK_EQ(options.nodes.size(), 2u);
  CHECK_EQ(options.nodes[0].num_threads, 3);
  CHECK((options.nodes[0].cpus == std::vector<int>{0, 1, 2, 4, 5, 6}));
  CHECK_EQ(options.nodes[1].num_threads, 1);
  options = ThreadPool::plan(topology, 1);
  CHECK_EQ(options.nodes.size(), 1u);
}

TEST(pool_does_not_poll_with_more_threads_than_cpus) {
  ThreadPool::Options options;
  options.nodes.push_back({0, 3, {0, 1}});
  CHECK_EQ(ThreadPool::create(options).value()->spin_us(), 0);
}

TEST(wakeup_benchmark_checks_its_arguments) {
  auto pool = make_pool({2});
  CHECK(!measure_wakeup(*pool, 0, 0).is_ok());
  CHECK(!measure_wakeup(*pool, 1, -1).is_ok());
  CHECK(!measure_wakeup(*make_pool({1}), 1, 0).is_ok());
  CHECK(measure_wakeup(*pool, 20, 0).value().pool_ns > 0);
}

}  // namespace
}  // namespace tandem
