// The end of an operation that threads wait for: a batch or a call. It comes once.
//
// Threads: any. Lock order: this mutex, then those of an event loop.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/loop/event_loop.h"

namespace tandem::transfer {

class Completion {
 public:
  Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  ~Completion() { end_follow(); }

  // Sequentially consistent: a thread announces its sleep before it checks this, see
  // EventLoop::sleep_until.
  bool is_done() const { return is_done_.load(); }

  // Runs `fill`, whose writes are visible to all that see the end, and wakes the waiters. Returns
  // false without running `fill` if the end came before.
  template <class Fill>
  bool complete(Fill fill) {
    const MutexLock lock(mutex_);
    if (is_done()) return false;
    fill();
    // The followed loops may be destroyed once somebody has seen the end; a leader's loop stays
    // until set_leader.
    end_follow();
    is_done_.store(true);
    changed_.notify_all();
    if (leader_ != nullptr) leader_->wake_leader();
    return true;
  }
  // Runs `act` while the end cannot come, and returns its result.
  template <class Act>
  auto hold(Act act) {
    const MutexLock lock(mutex_);
    return act();
  }
  // Waits for the end. Returns false at the deadline (monotonic nanoseconds).
  bool wait(int64_t deadline_ns) {
    if (is_done()) return true;
    MutexLock lock(mutex_);
    const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
    return changed_.wait_until(lock, deadline, [&] { return is_done(); });
  }
  // Notes a waiter that will not call `wait`. The loops must live until the end.
  void follow(const std::vector<EventLoop*>& loops) {
    const MutexLock lock(mutex_);
    if (is_done() || !followed_.empty()) return;
    followed_ = loops;
    for (EventLoop* loop : loops) loop->begin_follow();
  }
  // Sets the event loop in which a thread sleeps until the end; nullptr for none.
  void set_leader(EventLoop* loop) {
    const MutexLock lock(mutex_);
    leader_ = loop;
  }

 private:
  void end_follow() REQUIRES(mutex_) {
    for (EventLoop* loop : followed_) loop->end_follow();
    followed_.clear();
  }

  std::atomic<bool> is_done_{false};  // Written under mutex_.
  Mutex mutex_;
  CondVar changed_;
  EventLoop* leader_ GUARDED_BY(mutex_) = nullptr;
  std::vector<EventLoop*> followed_ GUARDED_BY(mutex_);
};

}  // namespace tandem::transfer
