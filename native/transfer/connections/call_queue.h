// Calls, the answering side: what peers ask, in the order in which it came, until the one that
// serves takes it: a thread that sleeps here, or an event loop that watches a descriptor. Bounded:
// beyond, a call is refused at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/connections/connection.h"
#include "transfer/memory/owned_fd.h"

namespace tandem::transfer {

class CallQueue;

// One call. Answered once; one that is destroyed without an answer is answered with kInternal, so
// that no caller waits in vain.
class IncomingCall {
 public:
  IncomingCall(std::shared_ptr<CallQueue> queue, std::weak_ptr<Connection> connection, uint64_t id,
               std::string peer, std::string payload);
  ~IncomingCall();
  IncomingCall(const IncomingCall&) = delete;
  IncomingCall& operator=(const IncomingCall&) = delete;

  // As the peer named itself; not proved beyond the knowledge of the secret.
  const std::string& peer() const { return peer_; }
  const std::string& payload() const { return payload_; }
  // Whether the caller's connection is gone: nobody will see the answer.
  bool is_void() const;
  // Queues the answer; returns the connection, which must be flushed. None: answered before, or the
  // caller is gone. REQUIRES: at most kMaxCallBytes.
  std::shared_ptr<Connection> answer(std::string reply);
  std::shared_ptr<Connection> refuse(const Error& error);

 private:
  std::shared_ptr<Connection> send(uint8_t code, std::string payload);

  const std::shared_ptr<CallQueue> queue_;
  const std::weak_ptr<Connection> connection_;
  const uint64_t id_;
  const std::string peer_;
  const std::string payload_;
  std::atomic<bool> is_answered_{false};
};

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  // Whoever takes calls sleeps in `wait`. Errors: kConflict (served already, closed).
  Status begin_serving();
  // Returns a descriptor that is readable while `take` has something to return. The queue owns it.
  // Errors: as begin_serving; kCapacity (no descriptor).
  Result<int> begin_serving_on_fd();
  // Later calls are refused, those in the queue are given up, `take` returns nothing.
  void close();

  // Errors: kUnsupported (nobody serves), kCapacity. Called by connections.
  Status push(std::weak_ptr<Connection> connection, uint64_t id, const std::string& peer,
              std::string payload);
  // Returns when there is a call, or the queue is closed.
  void wait();
  // At most `max` calls of those that are here. nullopt: the queue is closed.
  std::optional<std::vector<std::shared_ptr<IncomingCall>>> take(size_t max);
  bool is_closed();
  // Whether `wait` would return at once.
  bool is_ready() const { return is_ready_.load(std::memory_order_acquire); }

 private:
  friend class IncomingCall;
  void release(size_t size);
  Status admit_server() REQUIRES(mutex_);
  void signal() REQUIRES(mutex_);

  Mutex mutex_;  // Leaf.
  CondVar changed_;
  std::deque<std::shared_ptr<IncomingCall>> calls_ GUARDED_BY(mutex_);
  std::atomic<bool> is_ready_{false};                // Written under mutex_.
  bool is_served_ GUARDED_BY(mutex_) = false;
  bool is_closed_ GUARDED_BY(mutex_) = false;
  bool is_signalled_ GUARDED_BY(mutex_) = false;  // fd_ is readable.
  std::optional<OwnedFd> fd_ GUARDED_BY(mutex_);  // An eventfd, if an event loop serves.
  size_t num_open_ GUARDED_BY(mutex_) = 0;  // Here, or taken and not answered.
  size_t num_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem::transfer
