// An epoll thread. Handlers are called without any lock of the loop, by the thread or by a waiter
// in its place; a handler serialises its own work.
//
// After an event the thread polls for at most `spin_ns`, since the next event often comes before a
// wake-up would, then it sleeps in the kernel. A loop without events uses no CPU.
//
// Leading. Descriptors that bring answers to this process's requests are in an epoll set of their
// own, inside that of the thread. A thread that waits for an answer leads: it takes over the set,
// polls and then sleeps on it, so that nobody has to wake it. Meanwhile the set is removed from the
// loop thread's (the gate is shut), since two threads on one socket wake and hinder each other,
// which costs as much as a small transfer. If waits follow each other the gate stays shut between
// them, or an answer that arrives before its waiter would wake the thread; the thread then checks
// the clock, and opens the gate kHoldNs after the last wait. Waiters that do not lead (followers)
// keep it open.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_map>

#include "base/threads/idle_spin.h"
#include "base/status.h"
#include "base/threads/thread_annotations.h"

namespace tandem::transfer {

class EventHandler {
 public:
  virtual ~EventHandler() = default;
  virtual void on_events(uint32_t events) = 0;
};

class EventLoop {
 public:
  // The events of a descriptor: requests of peers, or answers to this process.
  enum class Kind { kRequests, kAnswers };
  static constexpr int64_t kHoldNs = 500'000;

  static Result<std::unique_ptr<EventLoop>> start(int64_t spin_ns);
  // Ends the thread. REQUIRES: called by another thread.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Calls the handler on events while it lives; holds no reference. Returns the key for the other
  // calls.
  Result<uint64_t> add(int fd, uint32_t events, std::weak_ptr<EventHandler> handler, Kind kind);
  void modify(uint64_t key, int fd, uint32_t events);
  void remove(uint64_t key, int fd);

  // Handles the requests that have arrived, for a waiter that would otherwise sleep until this
  // thread woke.
  bool poll_requests() { return run_once(requests_fd_, 0, Role::kHelper); }

  // Makes this thread the leader; returns false if another thread leads.
  bool begin_lead();
  void end_lead();
  // Handles the answers that have arrived. REQUIRES: this thread leads, also for the next method.
  bool poll_answers() { return run_once(answers_fd_, 0, Role::kLeader); }
  // Handles answers until `is_done` or the deadline (monotonic nanoseconds). REQUIRES: the thread
  // that makes `is_done` true calls wake_leader after it.
  template <class Predicate>
  void sleep_until(Predicate is_done, int64_t deadline_ns);
  void wake_leader();
  // Called before and after a thread waits for an answer without leading.
  void begin_follow();
  void end_follow() { num_followers_.fetch_sub(1); }

 private:
  explicit EventLoop(int64_t spin_ns);
  void run();
  // The thread that handles events: the loop's own, the leader, or a helper that polls in the loop
  // thread's place. A bell is for one of them: if another took it, that thread would sleep on.
  enum class Role { kThread, kLeader, kHelper };
  bool run_once(int epoll_fd, int timeout_ms, Role role);
  // Handles one event; returns false if it was not for this role.
  bool dispatch(uint64_t key, uint32_t events, Role role);
  int epoll_fd_of(uint64_t key) const;
  void open_gate() REQUIRES(gate_mutex_);
  // Opens the gate if it is time. Returns how long the thread may sleep, milliseconds; -1 for ever.
  int watch_gate();
  static int to_timeout_ms(int64_t ns);

  const int requests_fd_;  // The set of the thread; holds the bell and answers_fd_.
  const int answers_fd_;
  const int bell_fd_;         // Wakes the thread.
  const int leader_bell_fd_;  // Wakes who leads.
  const int64_t spin_ns_;
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> is_led_{false};
  std::atomic<bool> is_leader_asleep_{false};
  std::atomic<int> num_followers_{0};
  Mutex gate_mutex_;  // Leaf.
  bool is_gate_open_ GUARDED_BY(gate_mutex_) = true;
  bool is_gate_watched_ GUARDED_BY(gate_mutex_) = false;  // The thread wakes by itself to open it.
  int64_t led_since_ns_ GUARDED_BY(gate_mutex_) = 0;
  int64_t led_until_ns_ GUARDED_BY(gate_mutex_) = 0;
  Mutex mutex_;  // Leaf.
  std::unordered_map<uint64_t, std::weak_ptr<EventHandler>> handlers_ GUARDED_BY(mutex_);
  uint64_t next_key_ GUARDED_BY(mutex_);
  std::thread thread_;
};

template <class Predicate>
void EventLoop::sleep_until(Predicate is_done, int64_t deadline_ns) {
  for (int64_t now; !is_done() && (now = now_ns()) < deadline_ns;) {
    is_leader_asleep_.store(true);
    // Either this check sees the end, or the thread that ends the wait sees that a leader sleeps.
    if (is_done()) break;
    run_once(answers_fd_, to_timeout_ms(deadline_ns - now), Role::kLeader);
  }
  is_leader_asleep_.store(false);
}

}  // namespace tandem::transfer
