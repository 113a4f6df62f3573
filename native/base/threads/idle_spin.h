// The rule for polling instead of sleeping. A thread polls only for a bounded time and only while
// this takes the core from nobody: it yields while it polls, and if a poll was interrupted long
// enough for another thread to have run, polling is barred for a while.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace tandem {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The clock that polling reads and the operation by which it yields the core; tests substitute
// their own.
struct SystemTime {
  static int64_t now() { return now_ns(); }
  static void yield() { sched_yield(); }
};

template <class Time>
class BasicIdleSpin {
 public:
  // A poll that does not run for `interrupted_ns` is taken to have let another thread run. An
  // undisturbed round of polling takes 1 to 3 us.
  explicit BasicIdleSpin(int64_t limit_ns, int64_t interrupted_ns = 15'000)
      : limit_ns_(limit_ns), interrupted_ns_(interrupted_ns) {}

  void set_limit_ns(int64_t limit_ns) { limit_ns_ = limit_ns; }

  // Polls `is_done` for at most the limit. Returns true if it became true.
  template <class Predicate>
  bool wait(Predicate is_done) {
    int64_t last = Time::now();
    if (limit_ns_ == 0 || last < barred_until_ns_) return is_done();
    const int64_t deadline = last + limit_ns_;
    while (true) {
      for (int i = 0; i < kPollsPerYield; ++i) {
        if (is_done()) return true;
        pause_cpu();
      }
      Time::yield();
      const int64_t now = Time::now();
      if (now - last > interrupted_ns_) {
        barred_until_ns_ = now + kBarredNs;
        return is_done();
      }
      if (now > deadline) return is_done();
      last = now;
    }
  }

 private:
  // Polls between two yields: about a microsecond, as a pause instruction takes 40 to 140 cycles.
  static constexpr int kPollsPerYield = 24;
  static constexpr int64_t kBarredNs = 5'000'000;

  int64_t limit_ns_;
  int64_t interrupted_ns_;
  int64_t barred_until_ns_ = 0;
};

using IdleSpin = BasicIdleSpin<SystemTime>;

// A running estimate of how long a worker is idle between jobs. If jobs come slowly, a worker need
// not poll at the end of each, because the poll would always be in vain.
class IdleGap {
 public:
  int64_t expected_ns() const { return expected_ns_; }
  void record(int64_t gap_ns) {
    // Bound the gap: one long pause (the end of a request) must not prevent polling in the next
    // burst.
    const int64_t bounded = std::clamp<int64_t>(gap_ns, 0, kMaxNs);
    expected_ns_ += (bounded - expected_ns_) / 4;
  }

 private:
  static constexpr int64_t kMaxNs = 200'000;
  int64_t expected_ns_ = 0;
};

}  // namespace tandem
