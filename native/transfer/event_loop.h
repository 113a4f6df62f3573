// An epoll thread. Handlers are called without any lock of the loop, from the thread or from a
// waiter that polls in its stead; a handler serialises itself.
//
// After an event the thread polls for at most `spin_ns`, since a wake-up costs more than that, then
// it sleeps in the kernel. A loop without events uses no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/status.h"

namespace tandem::transfer {

class EventHandler {
 public:
  virtual ~EventHandler() = default;
  virtual void on_events(uint32_t events) = 0;
};

class EventLoop {
 public:
  static Result<std::unique_ptr<EventLoop>> start(int64_t spin_ns);
  // Ends the thread. REQUIRES: called by another thread.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Calls the handler while it lives; holds no reference. Returns the key for the other calls.
  Result<uint64_t> add(int fd, uint32_t events, std::weak_ptr<EventHandler> handler);
  void modify(uint64_t key, int fd, uint32_t events);
  void remove(uint64_t key, int fd);

  // Handles what is ready now. For a waiter that would otherwise sleep until this thread woke.
  bool poll() { return run_once(0); }
  int64_t spin_ns() const { return spin_ns_; }
  // While a waiter polls, the thread need not.
  void begin_help() { num_helpers_.fetch_add(1, std::memory_order_relaxed); }
  void end_help() { num_helpers_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  EventLoop(int epoll_fd, int stop_fd, int64_t spin_ns);
  void run();
  bool run_once(int timeout_ms);

  int epoll_fd_;
  int stop_fd_;
  int64_t spin_ns_;
  std::atomic<bool> is_stopping_{false};
  std::atomic<int> num_helpers_{0};
  std::mutex mutex_;  // Leaf.
  std::unordered_map<uint64_t, std::weak_ptr<EventHandler>> handlers_;  // GUARDED_BY(mutex_)
  uint64_t next_key_ = 1;                                               // GUARDED_BY(mutex_)
  std::thread thread_;
};

}  // namespace tandem::transfer
