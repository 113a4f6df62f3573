// The client side of calls: small requests that each wait for an answer, many at a time, over a
// connection of their own. A call with an answer was executed exactly once. A call that ended in
// kPeerLost, kDeadline or kCancelled after it was sent was executed once or not at all, and never
// after a call that was begun later.
//
// Lock order: Peer::mutex_, then CallClient::mutex_, then Connection::mutex_. Calls are ended
// without the latter two.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/engine/completion.h"
#include "transfer/connections/connection.h"

namespace tandem::transfer {

class PendingCall;

// Collects ended calls for one thread, which sleeps on a descriptor.
class CallInbox {
 public:
  static Result<std::shared_ptr<CallInbox>> create();
  ~CallInbox();
  CallInbox(const CallInbox&) = delete;
  CallInbox& operator=(const CallInbox&) = delete;

  // Descriptor that is readable while the inbox has ended calls.
  int fd() const { return fd_; }
  void put(uint64_t tag);
  std::vector<uint64_t> take();

 private:
  explicit CallInbox(int fd) : fd_(fd) {}
  const int fd_;
  Mutex mutex_;             // Leaf.
  std::vector<uint64_t> ended_ GUARDED_BY(mutex_);
};

// One call. It ends once.
class PendingCall {
 public:
  PendingCall() = default;
  PendingCall(std::shared_ptr<CallInbox> inbox, uint64_t tag) : inbox_(std::move(inbox)), tag_(tag) {}

  bool is_done() const { return completion_.is_done(); }
  // For waiting for the call's end.
  Completion& completion() { return completion_; }
  // REQUIRES: is_done(). The answer can be taken once; kConflict after that.
  Result<std::string> take_answer();

 private:
  friend class CallClient;
  void finish(Result<std::string> answer);

  const std::shared_ptr<CallInbox> inbox_;
  const uint64_t tag_ = 0;
  uint64_t id_ = 0;  // 0 until it is sent. Under CallClient::mutex_, which cannot be named here.
  Completion completion_;
  Result<std::string> answer_{std::string()};  // While completion_ is held.
};

class CallClient {
 public:
  struct Begun {
    Status status;
    // The connection that the call was queued on, to be flushed; null if the call waits for a
    // connection.
    std::shared_ptr<Connection> connection;
    bool was_idle = false;  // No answer was owed before this one.
  };

  // Begins a call. Errors: kCapacity (too many unanswered calls), or the reason of `close`.
  Begun begin(const std::shared_ptr<PendingCall>& call, std::string payload);
  // Ends a call with `error`, unless it has ended, because its caller waits no longer.
  void abandon(const std::shared_ptr<PendingCall>& call, Error error);

  // Sends the waiting calls over a new connection, in order. The caller flushes it.
  void attach(const std::shared_ptr<Connection>& connection);
  // Ends the calls that were sent over a lost connection with kPeerLost. Unsent calls wait for the
  // next connection.
  void detach(const Connection* connection, const Error& reason);
  // Ends all present and later calls with `reason`.
  void close(const Error& reason);
  // Takes an answer. Errors: kCorruption (an answer to no call, or a repeated one).
  Status on_reply(const Connection* connection, const Frame& frame, std::string payload);

  bool has_unsent() const;
  // Time since which a call, sent or not, has been without an answer while others may have been
  // answered; 0 without unanswered calls.
  int64_t owed_since_ns() const;

 private:
  struct Owed {
    std::shared_ptr<PendingCall> call;  // None: its caller has left.
    size_t size = 0;
  };
  struct Unsent {
    std::shared_ptr<PendingCall> call;
    std::string payload;
  };

  // Sends a call. REQUIRES: a connection.
  void send(const std::shared_ptr<PendingCall>& call, std::string payload) REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::shared_ptr<Connection> connection_ GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Owed> owed_ GUARDED_BY(mutex_);  // Sent and unanswered, by id.
  std::deque<Unsent> unsent_ GUARDED_BY(mutex_);
  size_t num_bytes_ GUARDED_BY(mutex_) = 0;  // Of the requests in both.
  uint64_t next_id_ GUARDED_BY(mutex_) = 1;
  int64_t owed_since_ns_ GUARDED_BY(mutex_) = 0;
  Status closed_ GUARDED_BY(mutex_);
};

}  // namespace tandem::transfer
