// Polling that stops where it does harm, and lasts longer where that would have paid. On a machine
// with more work than cores, a thread that polls and yields is scheduled behind the others for
// milliseconds, while a sleeping thread is woken at once: there a thread must sleep. So an
// interrupted poll bars polling, for longer each time, until one succeeds. And if an event comes
// just after a poll gave up, the next poll is longer: processes that work in turn have steps of
// about the same length.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/threads/idle_spin.h"

namespace tandem::transfer {

template <class Time>
class BasicAdaptiveSpin {
 public:
  explicit BasicAdaptiveSpin(int64_t limit_ns) : limit_ns_(limit_ns), spin_(limit_ns, kInterruptedNs) {}

  int64_t limit_ns() const { return limit_ns_; }
  // Duration limit of the next poll.
  int64_t reach_ns() const { return is_stretched_ ? kStretch * limit_ns_ : limit_ns_; }

  // Polls `is_done` for at most `reach_ns`. Returns true if it became true.
  template <class Predicate>
  bool wait(Predicate is_done) {
    const int64_t begin = Time::now();
    given_up_since_ns_ = 0;
    if (limit_ns_ == 0 || begin < barred_until_ns_) return is_done();
    spin_.set_limit_ns(reach_ns());
    const bool is_success = spin_.wait(is_done);
    const int64_t end = Time::now();
    if (end - begin > reach_ns() + kInterruptedNs) {
      barred_until_ns_ = end + bar_ns_;
      bar_ns_ = std::min(2 * bar_ns_, kMaxBarNs);
    } else if (is_success) {
      bar_ns_ = kMinBarNs;
    }
    if (!is_success) given_up_since_ns_ = begin;
    return is_success;
  }

  // Notes that the event came now, after its waiter had stopped polling and slept.
  void came() {
    if (given_up_since_ns_ == 0) return;
    is_stretched_ = Time::now() - given_up_since_ns_ < kStretch * limit_ns_;
    given_up_since_ns_ = 0;
  }

 private:
  // A shorter interruption is probably the process that works on the answer: with fewer cores than
  // processes it has only this core.
  static constexpr int64_t kInterruptedNs = 500'000;
  static constexpr int64_t kMinBarNs = 5'000'000;
  static constexpr int64_t kMaxBarNs = 320'000'000;
  static constexpr int64_t kStretch = 3;

  int64_t limit_ns_;
  BasicIdleSpin<Time> spin_;
  bool is_stretched_ = false;
  int64_t given_up_since_ns_ = 0;
  int64_t barred_until_ns_ = 0;
  int64_t bar_ns_ = kMinBarNs;
};

using AdaptiveSpin = BasicAdaptiveSpin<SystemTime>;

}  // namespace tandem::transfer
