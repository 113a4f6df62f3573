#include "transfer/connections/peer.h"

#include <algorithm>
#include <chrono>

#include "base/threads/idle_spin.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

std::chrono::steady_clock::time_point at(int64_t ns) {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(ns)};
}

// Registers a thread that waits for an answer without leading an event loop.
class Following {
 public:
  explicit Following(const std::vector<EventLoop*>& loops) : loops_(loops) {
    for (EventLoop* loop : loops_) loop->begin_follow();
  }
  ~Following() {
    for (EventLoop* loop : loops_) loop->end_follow();
  }
  Following(const Following&) = delete;
  Following& operator=(const Following&) = delete;

 private:
  const std::vector<EventLoop*>& loops_;
};

}  // namespace

Peer::Peer(PeerOptions options, SocketAddress address, std::vector<EventLoop*> loops, Owner owner)
    : options_(std::move(options)),
      address_(address),
      loops_(std::move(loops)),
      owner_(std::move(owner)),
      session_(random_bytes(kSessionBytes)),
      heard_ns_(now_ns()),
      control_health_(options_.spray.health),
      calls_health_(options_.spray.health),
      rail_set_(options_.spray) {}

Peer::~Peer() {
  if (control_) control_->shut({Code::kCancelled, "transfer.close", "the segment was closed", ""});
  if (calls_connection_)
    calls_connection_->shut({Code::kCancelled, "transfer.close", "the segment was closed", ""});
  for (Rail& rail : rails_)
    if (rail.connection)
      rail.connection->shut({Code::kCancelled, "transfer.close", "the segment was closed", ""});
}

Status Peer::open(int64_t deadline_ns) {
  Work work;
  {
    const MutexLock lock(mutex_);
    if (state_ != State::kOpening) return lost_reason_;  // The engine was closed meanwhile.
    connect_control(now_ns(), work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
  const Following following(loops_);
  MutexLock lock(mutex_);
  changed_.wait_until(lock, at(deadline_ns), [&] { return state_ != State::kOpening; });
  if (state_ == State::kOpen) return {};
  Status status = lost_reason_;
  if (state_ == State::kOpening)
    status = {Code::kDeadline, "transfer.open", address_.text() + " did not answer in time", ""};
  lock.unlock();
  close();
  return status;
}

void Peer::close() {
  Work work;
  std::shared_ptr<ClientConnection> control;
  const Error error{Code::kCancelled, "transfer.close", "the segment was closed", ""};
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kClosed) return;
    control = std::move(control_);
    if (state_ == State::kLost) {
      state_ = State::kClosed;
      lost_reason_ = error;
      calls_.close(error);
    } else {
      give_up(State::kClosed, error, work);
    }
  }
  // Stop all of this process's writes to the peer's memory before the good-bye.
  finish(std::move(work));
  if (!control) return;
  if (control->is_ready()) {
    control->send({.type = FrameType::kBye});
    control->flush();
  }
  control->shut(error);
}

Result<Description> Peer::describe(int64_t deadline_ns) {
  const Following following(loops_);
  MutexLock lock(mutex_);
  const uint64_t wanted = num_descriptions_ + 1;
  begin_work();
  const auto control = control_;
  lock.unlock();
  if (control && control->is_ready()) {
    control->send({.type = FrameType::kDescribe});
    control->flush();
  }
  owner_.schedule(now_ns());
  lock.lock();
  changed_.wait_until(lock, at(deadline_ns), [&] {
    return num_descriptions_ >= wanted || state_ == State::kLost || state_ == State::kClosed;
  });
  if (state_ == State::kLost || state_ == State::kClosed) return lost_reason_;
  if (num_descriptions_ < wanted)
    return Error{Code::kDeadline, "transfer.describe",
                 address_.text() + " did not answer in time", ""};
  return description_;
}

Status Peer::notify(const std::string& name, const std::string& payload, int64_t deadline_ns) {
  const MutexLock one_at_a_time(notify_mutex_);
  const Following following(loops_);
  PayloadWriter out;
  out.put_text(name);
  out.put_bytes(payload);
  MutexLock lock(mutex_);
  if (state_ != State::kOpen) return lost_reason_;
  begin_work();
  notice_ = {notice_.sequence + 1, out.take(), false, 0};
  const auto control = control_;
  const Frame frame{.type = FrameType::kNotify, .id = notice_.sequence};
  const std::string bytes = notice_.payload;
  lock.unlock();
  if (control && control->is_ready()) {
    control->send(frame, bytes);
    control->flush();
  }
  owner_.schedule(now_ns());
  lock.lock();
  changed_.wait_until(lock, at(deadline_ns),
                      [&] { return notice_.is_answered || state_ != State::kOpen; });
  if (notice_.is_answered) {
    if (notice_.outcome == 0) return {};
    const Code code = static_cast<Code>(notice_.outcome - 1);
    return {code, "transfer.notify",
            code == Code::kCapacity ? "the peer has too many unread notifications: try again"
                                    : "the peer refused the notification", ""};
  }
  notice_.is_answered = true;  // Not sent again: whether it came is unknown.
  if (state_ != State::kOpen) return lost_reason_;
  return {Code::kDeadline, "transfer.notify",
          "no confirmation in time: it was delivered once or not at all", ""};
}

Result<std::shared_ptr<PendingCall>> Peer::begin_call(std::string payload,
                                                      std::shared_ptr<CallInbox> inbox,
                                                      uint64_t tag) {
  if (payload.size() > kMaxCallBytes)
    return Error{Code::kConfig, "transfer.call",
                 std::to_string(payload.size()) + " bytes, at most " +
                     std::to_string(kMaxCallBytes) + ": bulk bytes are transfers", "payload"};
  const bool is_awaited = inbox != nullptr;
  auto call = std::make_shared<PendingCall>(std::move(inbox), tag);
  if (is_awaited) call->completion().follow(loops_);
  const CallClient::Begun begun = calls_.begin(call, std::move(payload));
  if (!begun.status.is_ok()) return begun.status.error();
  if (begun.connection) {
    begun.connection->flush();
    // An answer is owed from now on, so the timer must check whether the peer is silent.
    if (begun.was_idle) owner_.schedule(now_ns() + options_.lease_ns / 3);
    return call;
  }
  Work work;
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kOpen && version_ < kCallsVersion) {
      calls_.abandon(call, {});
      return Error{Code::kUnsupported, "transfer.call",
                   "the peer speaks version " + std::to_string(version_) + ", which has no calls",
                   ""};
    }
    const int64_t now = now_ns();
    if (state_ == State::kOpen && is_calls_connect_due(now)) connect_calls(now);
    work.due_ns = next_due();
  }
  finish(std::move(work));
  return call;
}

void Peer::on_ready(const std::shared_ptr<ClientConnection>& connection) {
  Work work;
  {
    const MutexLock lock(mutex_);
    const int64_t now = now_ns();
    heard_ns_ = std::max(heard_ns_, now);
    if (connection == control_) {
      control_health_.on_connect(now);
      control_health_.on_success();
      control_->send({.type = FrameType::kDescribe});
      if (!notice_.is_answered)
        control_->send({.type = FrameType::kNotify, .id = notice_.sequence}, notice_.payload);
      for (const auto& [key, waiting] : awaiting_grant_)
        control_->send({.type = FrameType::kGrant, .offset = key});
      version_ = control_->version();
      send_fences(*control_);
      resume_copies(work);
      work.flush(control_);
    } else if (connection == calls_connection_) {
      calls_health_.on_connect(now);
      calls_health_.on_success();
      // Send fences first: a call that was given up must not be executed after those that follow.
      send_fences(*calls_connection_);
      calls_.attach(calls_connection_);
      work.flush(calls_connection_);
    } else if (connection->role() == Role::kRail &&
               rails_[connection->rail()].connection == connection) {
      rail_set_.on_connect(connection->rail(), now,
                           connection->connected_ns() - connection->begin_ns());
      dispatch(work);
    }
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

Status Peer::on_frame(const std::shared_ptr<ClientConnection>& connection, const Frame& frame,
                      std::string payload, bool is_intact) {
  Work work;
  std::vector<std::shared_ptr<Mapping>> revoked;
  Status status;
  {
    const MutexLock lock(mutex_);
    switch (frame.type) {
      case FrameType::kWriteDone:
      case FrameType::kReadDone:
        status = check_order(connection, frame.id);
        if (!status.is_ok()) break;
        on_slice_done(frame, payload, is_intact, work);
        dispatch(work);
        break;
      case FrameType::kFenced: {
        PayloadReader in(payload);
        std::vector<FenceDebt> debts;
        for (size_t i = 0; i < payload.size() / 4; ++i) debts.push_back({session_, in.get_u32()});
        settle_fences(std::move(debts), work);
        break;
      }
      case FrameType::kDebtsFenced: {
        Result<std::vector<FenceDebt>> debts = decode_debts(payload);
        if (debts.is_ok())
          settle_fences(std::move(debts.value()), work);
        else
          status = debts.error();
        break;
      }
      case FrameType::kDescription: {
        Result<Description> description = decode_description(payload);
        if (!description.is_ok()) {
          status = description.error();
          break;
        }
        description_ = std::move(description.value());
        ++num_descriptions_;
        if (state_ == State::kOpening) {
          make_rails();
          state_ = State::kOpen;
          for (uint32_t r = 0; r < rails_.size(); ++r) connect_rail(r, now_ns());
        }
        changed_.notify_all();
        break;
      }
      case FrameType::kGranted:
        on_granted(*connection, frame, payload, work);
        dispatch(work);
        break;
      case FrameType::kRevoke: {
        Direct& direct = directs_[frame.offset];
        revoked = std::exchange(direct.mappings, {});
        direct.length = std::max<uint64_t>(direct.length, 1);
        break;
      }
      case FrameType::kNotified:
        if (frame.id == notice_.sequence && !notice_.is_answered) {
          notice_.is_answered = true;
          notice_.outcome = frame.code;
          changed_.notify_all();
        }
        break;
      case FrameType::kPong:
        break;
      default:
        status = {Code::kCorruption, "transfer.io", "a frame that only clients send", ""};
    }
    work.due_ns = next_due();
  }
  // This connection is flushed after all that it has read is handled, so that many requests go out
  // in one system call.
  std::erase(work.to_flush, connection);
  finish(std::move(work));
  if (frame.type == FrameType::kRevoke && status.is_ok()) {
    // Confirm only when no copy runs any more, since the peer reuses the memory after that.
    for (const auto& mapping : revoked) mapping->revoke();
    revoked.clear();
    connection->send({.type = FrameType::kRevoked, .offset = frame.offset});
    connection->flush();
  }
  return status;
}

void Peer::on_granted(const ClientConnection& connection, const Frame& frame,
                      const std::string& payload, Work& work) {
  const auto found = awaiting_grant_.find(frame.offset);
  if (found == awaiting_grant_.end()) return;
  std::vector<Piece> waiting = std::move(found->second);
  awaiting_grant_.erase(found);
  Result<Grant> grant = frame.code == 0 ? decode_grant(payload, connection.version())
                                        : Result<Grant>(decode_error(frame.code, payload));
  Direct direct{1, {}};
  uint64_t base = frame.offset;
  if (grant.is_ok()) {
    base = grant.value().base;
    direct.length = grant.value().length;
    for (const TransportKind kind : options_.transports) {
      const std::string name(transport_name(kind));
      const bool is_direct = kind == TransportKind::kShm || kind == TransportKind::kCma;
      if (!is_direct || refusals_.contains(name)) continue;
      Result<std::shared_ptr<Mapping>> mapping = kind == TransportKind::kShm
                                                     ? make_shm_mapping(grant.value(),
                                                                        *options_.mapped_files)
                                                     : make_cma_mapping(grant.value());
      if (mapping.is_ok())
        direct.mappings.push_back(mapping.value());
      else if (mapping.error().code == Code::kPermissionDenied)
        refusals_[name] = mapping.error().message();
    }
    if (direct.mappings.empty() && control_) {
      // This process keeps no mapping, so the peer need not wait for it when the buffer is
      // unregistered.
      control_->send({.type = FrameType::kRevoked, .offset = base});
      work.flush(control_);
    }
  } else if (grant.error().code == Code::kUnsupported) {
    for (const TransportKind kind : {TransportKind::kShm, TransportKind::kCma})
      refusals_[std::string(transport_name(kind))] = grant.error().message();
  }
  directs_[base] = std::move(direct);
  for (Piece& piece : waiting) route(std::move(piece), work);
  leave_rails(work);
}

void Peer::on_closed(const std::shared_ptr<ClientConnection>& connection, const Error& reason) {
  Work work;
  {
    const MutexLock lock(mutex_);
    lose_connection(connection, reason, work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

// Takes the connection by value, since losing it resets the member that the caller may have passed.
void Peer::take_back(std::shared_ptr<ClientConnection> connection, Error reason, Work& work) {
  if (connection->shut(reason)) lose_connection(connection, reason, work);
}

// REQUIRES: the connection is shut, so that no byte of a slice is touched over it any more.
void Peer::lose_connection(const std::shared_ptr<ClientConnection>& connection,
                           const Error& reason, Work& work) {
  if (state_ == State::kLost || state_ == State::kClosed) return;
  const int64_t now = now_ns();
  heard_ns_ = std::max(heard_ns_, connection->heard_ns());
  if (connection == control_) {
    // Frames that arrive late on this connection must not undo grants that the next one reports.
    if (connection->is_ready()) owe_fence(*connection, false);
    control_.reset();
    control_health_.on_disconnect(now);
  } else if (connection == calls_connection_) {
    if (calls_.owed_since_ns() > 0) owe_fence(*connection, false);
    calls_connection_.reset();
    calls_health_.on_disconnect(now);
    calls_.detach(connection.get(), reason);
  } else if (connection->role() == Role::kRail &&
             rails_[connection->rail()].connection == connection) {
    if (rails_[connection->rail()].has_unconfirmed_writes()) owe_fence(*connection, true);
    rails_[connection->rail()].connection.reset();
    rails_[connection->rail()].sent.clear();
    for (const uint64_t ticket : rail_set_.on_disconnect(connection->rail(), now)) {
      const auto slice = slices_.find(ticket);
      if (slice == slices_.end()) continue;
      ++rails_[connection->rail()].num_resent;
      pending_.push_front(std::move(slice->second.piece));
      slices_.erase(slice);
    }
  }
  if (connection->is_barred()) {
    // The answer at the control address decides about the peer. A rail's address that now leads to
    // another process costs only that rail.
    if (connection->role() != Role::kRail) return give_up(State::kLost, reason, work);
    rail_set_.terminate(connection->rail());
  }
  // Nobody listens at the control address and no other path is left: the process has ended.
  if (connection->was_refused() && connection->role() == Role::kControl && !has_ready_connection())
    return give_up(State::kLost,
                   {Code::kPeerLost, "transfer.connect", address_.text() + ": " + reason.what, ""},
                   work);
  leave_rails(work);
  dispatch(work);
}

void Peer::give_up(State state, const Error& error, Work& work) {
  state_ = state;
  lost_reason_ = error;
  const auto abort = [&](const Piece& piece) {
    for (const auto& [batch, reason] : work.to_abort)
      if (batch == piece.batch) return;
    work.to_abort.emplace_back(piece.batch, error);
  };
  if (control_) control_->shut(error);
  control_.reset();
  if (calls_connection_ && calls_.owed_since_ns() > 0) owe_fence(*calls_connection_, false);
  if (calls_connection_) calls_connection_->shut(error);
  calls_connection_.reset();
  calls_.close(error);
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    // Record the debt before a batch ends, so that operations after its end see it.
    if (rails_[r].connection && rails_[r].has_unconfirmed_writes())
      owe_fence(*rails_[r].connection, true);
    if (rails_[r].connection) rails_[r].connection->shut(error);
    rails_[r].connection.reset();
    rails_[r].sent.clear();
    rail_set_.on_disconnect(r, now_ns());
    rail_set_.terminate(r);
  }
  for (const Piece& piece : pending_) abort(piece);
  for (const auto& [ticket, slice] : slices_) abort(slice.piece);
  for (const auto& [key, waiting] : awaiting_grant_)
    for (const Piece& piece : waiting) abort(piece);
  for (const Held& held : awaiting_fence_) abort(held.piece);
  awaiting_fence_.clear();
  pending_.clear();
  slices_.clear();
  awaiting_grant_.clear();
  for (auto& [base, direct] : directs_)
    for (auto& mapping : direct.mappings) work.to_revoke.push_back(std::move(mapping));
  directs_.clear();
  changed_.notify_all();
}

void Peer::finish(Work work) {
  for (const auto& mapping : work.to_revoke) mapping->revoke();
  for (const auto& connection : work.to_flush) connection->flush();
  for (auto& [pieces, mapping] : work.to_copy) owner_.copy(std::move(pieces), std::move(mapping));
  for (auto& [batch, error] : work.to_abort) owner_.abort(batch, std::move(error));
  if (work.due_ns != kNever) owner_.schedule(work.due_ns);
}

}  // namespace tandem::transfer
