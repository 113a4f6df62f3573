// The end of something that threads wait for: a batch, a call. It comes once.
//
// Threads: any. Lock order: the mutex, then those of a loop.
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

  // Sequentially consistent: a sleeper says that it sleeps before it looks, see EventLoop::sleep_until.
  bool is_done() const { return is_done_.load(); }

  // Runs `fill`, so that whoever sees the end sees what it wrote, and lets the waiters go. False, and
  // nothing is run, if it came before.
  template <class Fill>
  bool complete(Fill fill) {
    const MutexLock lock(mutex_);
    if (is_done()) return false;
    fill();
    // The loops may go once somebody has seen the end; a leader's stays until set_leader.
    end_follow();
    is_done_.store(true);
    changed_.notify_all();
    if (leader_ != nullptr) leader_->wake_leader();
    return true;
  }
  // Runs `act` while the end cannot come; returns what it returns.
  template <class Act>
  auto hold(Act act) {
    const MutexLock lock(mutex_);
    return act();
  }
  // True once it has come; false at the deadline (monotonic nanoseconds).
  bool wait(int64_t deadline_ns) {
    if (is_done()) return true;
    MutexLock lock(mutex_);
    const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
    return changed_.wait_until(lock, deadline, [&] { return is_done(); });
  }
  // Somebody waits for the end who will not call `wait`. The loops live until it has come.
  void follow(const std::vector<EventLoop*>& loops) {
    const MutexLock lock(mutex_);
    if (is_done() || !followed_.empty()) return;
    followed_ = loops;
    for (EventLoop* loop : loops) loop->begin_follow();
  }
  // The loop in which somebody sleeps until the end; nullptr: nobody does any more.
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
