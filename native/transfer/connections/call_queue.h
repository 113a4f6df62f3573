// The server side of calls: peers' calls in order of arrival, until the serving thread (which
// sleeps here) or event loop (which watches a descriptor) takes them. Limited: calls beyond the
// limit are refused at once.
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

// One call of a peer. It is answered once. If it is destroyed without an answer, it is answered
// with kInternal, so that its caller does not wait.
class IncomingCall {
 public:
  IncomingCall(std::shared_ptr<CallQueue> queue, std::weak_ptr<Connection> connection, uint64_t id,
               std::string peer, std::string payload);
  ~IncomingCall();
  IncomingCall(const IncomingCall&) = delete;
  IncomingCall& operator=(const IncomingCall&) = delete;

  // The name that the peer gave itself; proved only by knowledge of the secret.
  const std::string& peer() const { return peer_; }
  const std::string& payload() const { return payload_; }
  // True if the caller's connection is gone, so that nobody will see the answer.
  bool is_void() const;
  // Queues the answer, and returns the connection to flush; null if the call was answered before or
  // the caller is gone. REQUIRES: at most kMaxCallBytes.
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
  // Begins to accept calls, for a thread that sleeps in `wait`. Errors: kConflict (served already,
  // closed).
  Status begin_serving();
  // Begins to accept calls, and returns a descriptor that is readable while `take` has something to
  // return. The queue owns it. Errors: as begin_serving; kCapacity (no descriptor).
  Result<int> begin_serving_on_fd();
  // Refuses later calls and those in the queue. `take` returns nothing from now on.
  void close();

  // Adds a call; called by connections. Errors: kUnsupported (no server), kCapacity.
  Status push(std::weak_ptr<Connection> connection, uint64_t id, const std::string& peer,
              std::string payload);
  // Returns when there is a call, or the queue is closed.
  void wait();
  // Returns up to `max` queued calls; nullopt if the queue is closed.
  std::optional<std::vector<std::shared_ptr<IncomingCall>>> take(size_t max);
  bool is_closed();
  // True if `wait` would return at once.
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
