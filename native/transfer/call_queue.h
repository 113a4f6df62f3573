// Calls, the answering side: what peers ask, in the order in which it came, until the one that
// serves takes it. Bounded: beyond, a call is refused at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "transfer/connection.h"

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
  // Errors: kConflict (served already, closed).
  Status begin_serving();
  // Later calls are refused, those in the queue are given up, `take` returns nothing.
  void close();

  // Errors: kUnsupported (nobody serves), kCapacity. Called by connections.
  Status push(std::weak_ptr<Connection> connection, uint64_t id, const std::string& peer,
              std::string payload);
  // At most `max` calls; waits for the first, or for `interrupt`. nullopt: the queue is closed.
  std::optional<std::vector<std::shared_ptr<IncomingCall>>> take(size_t max);
  // Lets `take` return: its caller has something else to look at.
  void interrupt();
  bool is_closed();
  // Whether `take` would return at once.
  bool is_ready() const { return is_ready_.load(std::memory_order_acquire); }

 private:
  friend class IncomingCall;
  void release(size_t size);

  std::mutex mutex_;  // Leaf.
  std::condition_variable changed_;
  std::deque<std::shared_ptr<IncomingCall>> calls_;  // GUARDED_BY(mutex_)
  std::atomic<bool> is_ready_{false};                // Written under mutex_.
  bool is_served_ = false;                           // GUARDED_BY(mutex_), with all below
  bool is_closed_ = false;
  bool is_interrupted_ = false;
  size_t num_open_ = 0;  // Here, or taken and not answered.
  size_t num_bytes_ = 0;
};

}  // namespace tandem::transfer
