#include "transfer/connections/call_client.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/threads/idle_spin.h"

namespace tandem::transfer {
namespace {

Error lost(const Error& reason) {
  return {Code::kPeerLost, "transfer.call",
          "the connection broke (" + reason.what + "): the call was executed once or not at all",
          ""};
}

}  // namespace

Result<std::shared_ptr<CallInbox>> CallInbox::create() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) return Error{Code::kCapacity, "transfer.call", describe_errno("eventfd", errno), ""};
  return std::shared_ptr<CallInbox>(new CallInbox(fd));
}

CallInbox::~CallInbox() { close(fd_); }

void CallInbox::put(uint64_t tag) {
  const MutexLock lock(mutex_);
  if (ended_.empty()) eventfd_write(fd_, 1);
  ended_.push_back(tag);
}

std::vector<uint64_t> CallInbox::take() {
  const MutexLock lock(mutex_);
  eventfd_t count;
  eventfd_read(fd_, &count);
  return std::exchange(ended_, {});
}

Result<std::string> PendingCall::take_answer() {
  return completion_.hold([&] {
    // Leave an error in the place of the answer, for a caller that takes it twice.
    return std::exchange(answer_, Error{Code::kConflict, "transfer.call",
                                        "the answer of this call was taken before", ""});
  });
}

void PendingCall::finish(Result<std::string> answer) {
  const bool is_first = completion_.complete([&] { answer_ = std::move(answer); });
  if (is_first && inbox_) inbox_->put(tag_);
}

CallClient::Begun CallClient::begin(const std::shared_ptr<PendingCall>& call,
                                    std::string payload) {
  const MutexLock lock(mutex_);
  if (!closed_.is_ok()) return {closed_, nullptr, false};
  const size_t count = owed_.size() + unsent_.size();
  if (count >= kMaxCallsInFlight || num_bytes_ + payload.size() > kMaxCallBytesInFlight)
    return {Error{Code::kCapacity, "transfer.call",
                  std::to_string(count) + " calls of " + std::to_string(num_bytes_) +
                      " bytes are unanswered: wait for some",
                  ""},
            nullptr, false};
  num_bytes_ += payload.size();
  const bool was_idle = count == 0;
  if (was_idle) owed_since_ns_ = now_ns();
  if (!connection_) {
    unsent_.push_back({call, std::move(payload)});
    return {{}, nullptr, false};
  }
  send(call, std::move(payload));
  return {{}, connection_, was_idle};
}

void CallClient::send(const std::shared_ptr<PendingCall>& call, std::string payload) {
  call->id_ = next_id_++;
  owed_.emplace(call->id_, Owed{call, payload.size()});
  connection_->send({.type = FrameType::kCall, .id = call->id_}, std::move(payload));
}

void CallClient::abandon(const std::shared_ptr<PendingCall>& call, Error error) {
  {
    const MutexLock lock(mutex_);
    if (const auto owed = owed_.find(call->id_); owed != owed_.end()) {
      // Keep the entry without its call: the peer still owes the answer, so it stays watched and
      // the call still counts.
      if (owed->second.call == call) owed->second.call.reset();
    } else {
      const auto unsent = std::find_if(unsent_.begin(), unsent_.end(),
                                       [&](const Unsent& one) { return one.call == call; });
      if (unsent != unsent_.end()) {
        num_bytes_ -= unsent->payload.size();
        unsent_.erase(unsent);
      }
    }
  }
  call->finish(std::move(error));
}

void CallClient::attach(const std::shared_ptr<Connection>& connection) {
  const MutexLock lock(mutex_);
  if (!closed_.is_ok()) return;
  connection_ = connection;
  for (Unsent& one : std::exchange(unsent_, {})) send(one.call, std::move(one.payload));
}

void CallClient::detach(const Connection* connection, const Error& reason) {
  std::unordered_map<uint64_t, Owed> owed;
  {
    const MutexLock lock(mutex_);
    if (connection_.get() != connection) return;
    connection_.reset();
    owed.swap(owed_);
    for (const auto& [id, one] : owed) num_bytes_ -= one.size;
  }
  for (const auto& [id, one] : owed)
    if (one.call) one.call->finish(lost(reason));
}

void CallClient::close(const Error& reason) {
  std::unordered_map<uint64_t, Owed> owed;
  std::deque<Unsent> unsent;
  {
    const MutexLock lock(mutex_);
    closed_ = reason;
    connection_.reset();
    owed.swap(owed_);
    unsent.swap(unsent_);
    num_bytes_ = 0;
  }
  for (const auto& [id, one] : owed)
    if (one.call) one.call->finish(reason);
  for (const Unsent& one : unsent) one.call->finish(reason);
}

Status CallClient::on_reply(const Connection* connection, const Frame& frame,
                            std::string payload) {
  std::shared_ptr<PendingCall> call;
  {
    const MutexLock lock(mutex_);
    if (connection_.get() != connection) return {};  // Given up: its calls have ended.
    const auto found = owed_.find(frame.id);
    if (found == owed_.end())
      return {Code::kCorruption, "transfer.call", "an answer that is not owed", ""};
    call = std::move(found->second.call);
    num_bytes_ -= found->second.size;
    owed_.erase(found);
  }
  if (!call) return {};
  if (frame.code == 0)
    call->finish(std::move(payload));
  else
    call->finish(decode_error(frame.code, payload));
  return {};
}

bool CallClient::has_unsent() const {
  const MutexLock lock(mutex_);
  return !unsent_.empty();
}

int64_t CallClient::owed_since_ns() const {
  const MutexLock lock(mutex_);
  return owed_.empty() && unsent_.empty() ? 0 : owed_since_ns_;
}

}  // namespace tandem::transfer
