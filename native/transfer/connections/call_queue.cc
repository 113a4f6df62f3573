#include "transfer/connections/call_queue.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

namespace tandem::transfer {

IncomingCall::IncomingCall(std::shared_ptr<CallQueue> queue, std::weak_ptr<Connection> connection,
                           uint64_t id, std::string peer, std::string payload)
    : queue_(std::move(queue)),
      connection_(std::move(connection)),
      id_(id),
      peer_(std::move(peer)),
      payload_(std::move(payload)) {}

IncomingCall::~IncomingCall() {
  const Error error =
      queue_->is_closed()
          ? Error{Code::kPeerLost, "transfer.serve_calls", "the engine that serves is closing", ""}
          : Error{Code::kInternal, "transfer.serve_calls", "the handler gave no answer", ""};
  const auto connection = refuse(error);
  if (connection) connection->flush();
}

bool IncomingCall::is_void() const {
  const std::shared_ptr<Connection> connection = connection_.lock();
  return !connection || connection->is_shut();
}

std::shared_ptr<Connection> IncomingCall::answer(std::string reply) {
  return send(0, std::move(reply));
}

std::shared_ptr<Connection> IncomingCall::refuse(const Error& error) {
  if (is_answered_.load(std::memory_order_relaxed)) return nullptr;
  return send(wire_code(error.code), encode_error(error));
}

std::shared_ptr<Connection> IncomingCall::send(uint8_t code, std::string payload) {
  if (is_answered_.exchange(true)) return nullptr;
  queue_->release(payload_.size());
  std::shared_ptr<Connection> connection = connection_.lock();
  if (!connection || connection->is_shut()) return nullptr;
  connection->send({.type = FrameType::kReply, .code = code, .id = id_}, std::move(payload));
  return connection;
}

Status CallQueue::admit_server() {
  if (is_closed_) return {Code::kConflict, "transfer.serve_calls", "the engine is closed", ""};
  if (is_served_)
    return {Code::kConflict, "transfer.serve_calls", "calls have a handler already", "handler"};
  is_served_ = true;
  return {};
}

Status CallQueue::begin_serving() {
  const MutexLock lock(mutex_);
  return admit_server();
}

Result<int> CallQueue::begin_serving_on_fd() {
  OwnedFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (fd.get() < 0)
    return Error{Code::kCapacity, "transfer.serve_calls", describe_errno("eventfd", errno), ""};
  const MutexLock lock(mutex_);
  if (Status status = admit_server(); !status.is_ok()) return status.error();
  return fd_.emplace(fd.take()).get();
}

void CallQueue::signal() {
  is_ready_.store(true, std::memory_order_release);
  if (!fd_) {
    changed_.notify_all();
  } else if (!is_signalled_) {
    is_signalled_ = true;
    eventfd_write(fd_->get(), 1);
  }
}

void CallQueue::close() {
  std::deque<std::shared_ptr<IncomingCall>> calls;  // They hold the queue, and end without its mutex.
  const MutexLock lock(mutex_);
  is_closed_ = true;
  calls.swap(calls_);
  signal();
}

Status CallQueue::push(std::weak_ptr<Connection> connection, uint64_t id, const std::string& peer,
                       std::string payload) {
  const size_t size = payload.size();
  const MutexLock lock(mutex_);
  if (!is_served_ || is_closed_)
    return {Code::kUnsupported, "transfer.serve_calls", "this engine serves no calls", ""};
  if (num_open_ >= kMaxCallsInFlight || num_bytes_ + size > kMaxCallBytesInFlight)
    return {Code::kCapacity, "transfer.serve_calls",
            std::to_string(num_open_) + " calls are unanswered here: try again later", ""};
  ++num_open_;
  num_bytes_ += size;
  calls_.push_back(std::make_shared<IncomingCall>(shared_from_this(), std::move(connection), id,
                                                  peer, std::move(payload)));
  signal();
  return {};
}

void CallQueue::wait() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [&]() REQUIRES(mutex_) { return is_closed_ || !calls_.empty(); });
}

std::optional<std::vector<std::shared_ptr<IncomingCall>>> CallQueue::take(size_t max) {
  // Drop calls whose callers are gone, without holding the mutex. Such a call must not be executed:
  // its caller was told that it failed, and may have sent another one over a new connection.
  std::vector<std::shared_ptr<IncomingCall>> taken, dropped;
  const MutexLock lock(mutex_);
  if (is_closed_) return std::nullopt;
  while (!calls_.empty() && taken.size() < max) {
    (calls_.front()->is_void() ? dropped : taken).push_back(std::move(calls_.front()));
    calls_.pop_front();
  }
  if (calls_.empty()) {
    is_ready_.store(false, std::memory_order_release);
    eventfd_t count;
    if (is_signalled_) eventfd_read(fd_->get(), &count);
    is_signalled_ = false;
  }
  return taken;
}

bool CallQueue::is_closed() {
  const MutexLock lock(mutex_);
  return is_closed_;
}

void CallQueue::release(size_t size) {
  const MutexLock lock(mutex_);
  --num_open_;
  num_bytes_ -= size;
}

}  // namespace tandem::transfer
