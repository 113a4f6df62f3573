#include "transfer/peer.h"

#include <algorithm>
#include <chrono>

#include "base/idle_spin.h"
#include "transfer/process_id.h"

namespace tandem::transfer {
namespace {

std::chrono::steady_clock::time_point at(int64_t ns) {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(ns)};
}

template <class T>
void add_once(std::vector<T>& list, const T& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

}  // namespace

Peer::Peer(PeerOptions options, SocketAddress address, std::vector<EventLoop*> loops, Owner owner)
    : options_(std::move(options)),
      address_(address),
      loops_(std::move(loops)),
      owner_(std::move(owner)),
      session_(random_bytes(kSessionBytes)),
      heard_ns_(now_ns()),
      control_health_(options_.spray.health),
      rail_set_(options_.spray) {}

Peer::~Peer() {
  if (control_) control_->shut({Code::kCancelled, "transfer.close", "the segment was closed", ""});
  for (Rail& rail : rails_)
    if (rail.connection)
      rail.connection->shut({Code::kCancelled, "transfer.close", "the segment was closed", ""});
}

// --- Opening, describing, closing ---------------------------------------------------------------

Status Peer::open(int64_t deadline_ns) {
  Work work;
  {
    const std::lock_guard lock(mutex_);
    connect_control(now_ns(), work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
  std::unique_lock lock(mutex_);
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
    const std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) return;
    control = std::move(control_);
    if (state_ == State::kLost) {
      state_ = State::kClosed;
      lost_reason_ = error;
    } else {
      give_up(State::kClosed, error, work);
    }
  }
  // First nothing of ours reaches the peer's memory any more, then we say so.
  finish(std::move(work));
  if (!control) return;
  if (control->is_ready()) {
    control->send({.type = FrameType::kBye});
    control->flush();
  }
  control->shut(error);
}

Result<Description> Peer::describe(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
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
  const std::lock_guard one_at_a_time(notify_mutex_);
  PayloadWriter out;
  out.put_text(name);
  out.put_bytes(payload);
  std::unique_lock lock(mutex_);
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

// --- Work from above ------------------------------------------------------------------------------

void Peer::begin_work() {
  // Silence counts from the moment an answer is owed.
  if (!has_work()) heard_ns_ = std::max(heard_ns_, now_ns());
}

void Peer::submit(std::vector<Piece> pieces) {
  Work work;
  {
    const std::lock_guard lock(mutex_);
    begin_work();
    for (Piece& piece : pieces) route(std::move(piece), work);
    dispatch(work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

void Peer::fall_back(Piece piece, TransportKind failed, Error error) {
  const bool is_final = error.code == Code::kConfig || error.code == Code::kPermissionDenied ||
                        piece.batch->only().has_value();
  if (is_final) return owner_.abort(piece.batch, std::move(error));
  Work work;
  {
    const std::lock_guard lock(mutex_);
    begin_work();
    route(std::move(piece), work, failed);
    dispatch(work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

bool Peer::is_allowed(TransportKind kind) const {
  return std::find(options_.transports.begin(), options_.transports.end(), kind) !=
         options_.transports.end();
}

void Peer::route(Piece piece, Work& work, std::optional<TransportKind> failed) {
  if (!piece.batch->is_open()) return;
  if (state_ != State::kOpen) {
    work.to_abort.emplace_back(piece.batch, lost_reason_);
    return;
  }
  if (!route_direct(piece, work, failed)) queue_tcp(std::move(piece), work);
}

uint64_t Peer::grant_key(uint64_t offset) const {
  for (const BufferInfo& buffer : description_.buffers)
    if (offset >= buffer.offset && offset - buffer.offset < buffer.length) return buffer.offset;
  return offset;
}

const Peer::Direct* Peer::find_direct(uint64_t offset) const {
  auto after = directs_.upper_bound(offset);
  if (after == directs_.begin()) return nullptr;
  const auto& [base, direct] = *std::prev(after);
  return offset - base < direct.length ? &direct : nullptr;
}

bool Peer::route_direct(const Piece& piece, Work& work, std::optional<TransportKind> failed) {
  const std::optional<TransportKind>& only = piece.batch->only();
  const auto is_wanted = [&](TransportKind kind) {
    return is_allowed(kind) && (!only || *only == kind) && (!failed || kind > *failed) &&
           !refusals_.contains(std::string(transport_name(kind)));
  };
  if (!is_wanted(TransportKind::kShm) && !is_wanted(TransportKind::kCma)) return false;
  const uint64_t offset = piece.transfer().offset;
  if (const Direct* direct = find_direct(offset)) {
    for (const auto& mapping : direct->mappings) {
      if (!is_wanted(mapping->kind())) continue;
      work.to_copy.emplace_back(piece, mapping);
      return true;
    }
    return false;
  }
  const uint64_t key = grant_key(offset);
  std::vector<Piece>& waiting = awaiting_grant_[key];
  waiting.push_back(piece);
  // Without a control connection it is asked for once there is one.
  if (waiting.size() == 1 && control_ && control_->is_ready()) {
    control_->send({.type = FrameType::kGrant, .offset = key});
    add_once(work.to_flush, control_);
  }
  return true;
}

void Peer::queue_tcp(Piece piece, Work& work) {
  const std::optional<TransportKind>& only = piece.batch->only();
  if (is_allowed(TransportKind::kTcp) && (!only || *only == TransportKind::kTcp)) {
    pending_.push_back(std::move(piece));
    return;
  }
  std::string reasons;
  for (const auto& [name, reason] : refusals_) reasons += " " + name + ": " + reason + ";";
  work.to_abort.emplace_back(
      piece.batch, Error{Code::kUnsupported, "transfer.route",
                         "no transport that is allowed reaches the buffer;" + reasons, ""});
}

void Peer::drop(const Batch& batch) {
  Work work;
  {
    const std::lock_guard lock(mutex_);
    const auto is_its = [&](const Piece& piece) { return piece.batch.get() == &batch; };
    std::erase_if(pending_, is_its);
    for (auto& [key, waiting] : awaiting_grant_) std::erase_if(waiting, is_its);
    std::vector<std::shared_ptr<ClientConnection>> to_close;
    for (auto slice = slices_.begin(); slice != slices_.end();) {
      if (!is_its(slice->second.piece)) {
        ++slice;
        continue;
      }
      const auto connection = rails_[slice->second.rail].connection;
      if (slice->second.piece.transfer().op == Op::kRead) {
        connection->drop_read(slice->first);
        rail_set_.forget(slice->first);
      } else if (connection->drop_write(slice->first)) {
        rail_set_.forget(slice->first);
      } else {
        // Part of it is under way; the peer must not apply it after we have said that it failed.
        add_once(to_close, connection);
      }
      slice = slices_.erase(slice);
    }
    for (const auto& connection : to_close)
      take_back(connection, {Code::kCancelled, "transfer.cancel", "a slice was cancelled", ""},
                work);
    if (!to_close.empty() && control_ && control_->is_ready()) {
      send_fences(*control_);
      add_once(work.to_flush, control_);
    }
    dispatch(work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

// --- Spraying -------------------------------------------------------------------------------------

void Peer::send_fences(ClientConnection& connection) {
  PayloadWriter out;
  bool has_any = false;
  for (const uint32_t id : fences_) {
    if (!connection.fences_sent.insert(id).second) continue;
    out.put_u32(id);
    has_any = true;
  }
  if (has_any) connection.send({.type = FrameType::kFence}, out.take());
}

void Peer::dispatch(Work& work) {
  const int64_t now = now_ns();
  while (!pending_.empty()) {
    Piece& front = pending_.front();
    if (!front.batch->is_open()) {
      pending_.pop_front();
      continue;
    }
    const uint64_t total = front.transfer().length;
    const std::optional<SliceChoice> choice = rail_set_.choose(now, front.length, total);
    if (!choice) return;
    Piece piece = front;
    piece.length = choice->bytes;
    front.begin += choice->bytes;
    front.length -= choice->bytes;
    if (front.length == 0) pending_.pop_front();
    const std::shared_ptr<ClientConnection>& connection = rails_[choice->rail].connection;
    send_fences(*connection);
    const TransferItem& item = piece.transfer();
    uint8_t* local = item.local + piece.begin;
    const uint64_t offset = item.offset + piece.begin;
    if (item.op == Op::kWrite)
      connection->send_write(choice->ticket, offset, local, piece.length, options_.has_checksum);
    else
      connection->send_read(choice->ticket, offset, local, piece.length, options_.has_checksum);
    slices_.emplace(choice->ticket, Slice{std::move(piece), choice->rail});
    add_once(work.to_flush, connection);
  }
}

void Peer::on_slice_done(const Frame& frame, const std::string& payload, bool is_intact,
                         Work& work) {
  const auto found = slices_.find(frame.id);
  if (found == slices_.end()) return;  // Dropped.
  const Slice slice = std::move(found->second);
  slices_.erase(found);
  const bool is_damaged = !is_intact || frame.code == wire_code(Code::kCorruption);
  if (is_damaged) {
    rail_set_.fail(frame.id, now_ns());
    pending_.push_front(slice.piece);
  } else if (frame.code != 0) {
    // The peer's refusal says nothing against the rail.
    rail_set_.forget(frame.id);
    work.to_abort.emplace_back(slice.piece.batch, decode_error(frame.code, payload));
  } else {
    rail_set_.complete(frame.id, now_ns());
    rails_[slice.rail].bytes_moved += slice.piece.length;
    slice.piece.batch->add_done(slice.piece.item, slice.piece.length);
  }
}

// --- From connections -----------------------------------------------------------------------------

void Peer::on_ready(const std::shared_ptr<ClientConnection>& connection) {
  Work work;
  {
    const std::lock_guard lock(mutex_);
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
      send_fences(*control_);
      add_once(work.to_flush, control_);
    } else if (connection->role() == Role::kRail &&
               rails_[connection->rail()].connection == connection) {
      rail_set_.on_connect(connection->rail(), now);
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
    const std::lock_guard lock(mutex_);
    switch (frame.type) {
      case FrameType::kWriteDone:
      case FrameType::kReadDone:
        on_slice_done(frame, payload, is_intact, work);
        dispatch(work);
        break;
      case FrameType::kFenced: {
        PayloadReader in(payload);
        for (size_t i = 0; i < payload.size() / 4; ++i) fences_.erase(in.get_u32());
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
        on_granted(frame, payload, work);
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
  finish(std::move(work));
  if (frame.type == FrameType::kRevoke && status.is_ok()) {
    // Only when no copy runs any more may the peer have its memory back.
    for (const auto& mapping : revoked) mapping->revoke();
    connection->send({.type = FrameType::kRevoked, .offset = frame.offset});
    connection->flush();
  }
  return status;
}

void Peer::on_granted(const Frame& frame, const std::string& payload, Work& work) {
  const auto found = awaiting_grant_.find(frame.offset);
  if (found == awaiting_grant_.end()) return;
  std::vector<Piece> waiting = std::move(found->second);
  awaiting_grant_.erase(found);
  Result<Grant> grant = frame.code == 0 ? decode_grant(payload)
                                        : Result<Grant>(decode_error(frame.code, payload));
  Direct direct{1, {}};
  uint64_t base = frame.offset;
  if (grant.is_ok()) {
    base = grant.value().base;
    direct.length = grant.value().length;
    for (const TransportKind kind : {TransportKind::kShm, TransportKind::kCma}) {
      const std::string name(transport_name(kind));
      if (!is_allowed(kind) || refusals_.contains(name)) continue;
      Result<std::shared_ptr<Mapping>> mapping = kind == TransportKind::kShm
                                                     ? make_shm_mapping(grant.value())
                                                     : make_cma_mapping(grant.value());
      if (mapping.is_ok())
        direct.mappings.push_back(mapping.value());
      else if (mapping.error().code == Code::kPermissionDenied)
        refusals_[name] = mapping.error().message();
    }
    if (direct.mappings.empty() && control_) {
      // We hold nothing, so the peer need not ask us when it takes the buffer back.
      control_->send({.type = FrameType::kRevoked, .offset = base});
      add_once(work.to_flush, control_);
    }
  } else if (grant.error().code == Code::kUnsupported) {
    for (const TransportKind kind : {TransportKind::kShm, TransportKind::kCma})
      refusals_[std::string(transport_name(kind))] = grant.error().message();
  }
  directs_[base] = std::move(direct);
  for (Piece& piece : waiting) route(std::move(piece), work);
}

void Peer::on_closed(const std::shared_ptr<ClientConnection>& connection, const Error& reason) {
  Work work;
  {
    const std::lock_guard lock(mutex_);
    lose_connection(connection, reason, work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

// The connection is taken by value: losing it resets the member that the caller may have named.
void Peer::take_back(std::shared_ptr<ClientConnection> connection, Error reason, Work& work) {
  if (connection->shut(reason)) lose_connection(connection, reason, work);
}

// REQUIRES: the connection is shut, so that nothing of a slice is touched over it any more.
void Peer::lose_connection(const std::shared_ptr<ClientConnection>& connection,
                           const Error& reason, Work& work) {
  if (state_ == State::kLost || state_ == State::kClosed) return;
  const int64_t now = now_ns();
  heard_ns_ = std::max(heard_ns_, connection->heard_ns());
  if (connection->is_ready()) fences_.insert(connection->id());
  if (connection == control_) {
    control_.reset();
    control_health_.on_disconnect(now);
  } else if (connection->role() == Role::kRail &&
             rails_[connection->rail()].connection == connection) {
    rails_[connection->rail()].connection.reset();
    for (const uint64_t ticket : rail_set_.on_disconnect(connection->rail(), now)) {
      const auto slice = slices_.find(ticket);
      if (slice == slices_.end()) continue;
      pending_.push_front(std::move(slice->second.piece));
      slices_.erase(slice);
    }
  }
  if (connection->is_barred()) return give_up(State::kLost, reason, work);
  // Nobody listens at that address any more, and no other path is left: the process has ended.
  if (connection->was_refused() && connection->role() == Role::kControl && !has_ready_connection())
    return give_up(State::kLost,
                   {Code::kPeerLost, "transfer.connect", address_.text() + ": " + reason.what, ""},
                   work);
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
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    if (rails_[r].connection) rails_[r].connection->shut(error);
    rails_[r].connection.reset();
    rail_set_.on_disconnect(r, now_ns());
    rail_set_.terminate(r);
  }
  for (const Piece& piece : pending_) abort(piece);
  for (const auto& [ticket, slice] : slices_) abort(slice.piece);
  for (const auto& [key, waiting] : awaiting_grant_)
    for (const Piece& piece : waiting) abort(piece);
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
  for (auto& [piece, mapping] : work.to_copy) owner_.copy(std::move(piece), std::move(mapping));
  for (auto& [batch, error] : work.to_abort) owner_.abort(batch, std::move(error));
  if (work.due_ns != kNever) owner_.schedule(work.due_ns);
}

// --- Connecting and time --------------------------------------------------------------------------

Result<std::shared_ptr<ClientConnection>> Peer::make_connection(Role role, uint32_t rail,
                                                                const SocketAddress& remote,
                                                                const SocketAddress& local) {
  Result<int> fd = begin_connect(remote, local);
  if (!fd.is_ok()) return fd.error();
  tune_stream(fd.value(), options_.socket_buffer_bytes);
  const uint32_t id = next_connection_id_++;
  EventLoop* loop = loops_[id % loops_.size()];
  auto connection =
      std::make_shared<ClientConnection>(weak_from_this(), loop, fd.value(), role, rail, id);
  if (Status status = connection->attach(); !status.is_ok()) return status.error();
  return connection;
}

void Peer::connect_control(int64_t now, Work& work) {
  control_health_.begin_connect();
  auto made = make_connection(Role::kControl, 0, address_, {});
  if (made.is_ok()) {
    control_ = std::move(made.value());
    return;
  }
  control_health_.on_disconnect(now);
  if (state_ == State::kOpening) give_up(State::kLost, made.error(), work);
}

void Peer::connect_rail(uint32_t index, int64_t now) {
  Rail& rail = rails_[index];
  rail_set_.begin_connect(index);
  auto made = make_connection(Role::kRail, index, rail.remote, rail.local);
  if (made.is_ok())
    rail.connection = std::move(made.value());
  else
    rail_set_.on_disconnect(index, now);
}

void Peer::make_rails() {
  std::vector<SocketAddress> remotes, locals;
  for (const std::string& text : description_.addresses)
    if (Result<SocketAddress> address = parse_address(text); address.is_ok())
      remotes.push_back(address.value());
  if (remotes.empty()) remotes.push_back(address_);
  for (const std::string& text : options_.local_addresses)
    if (Result<SocketAddress> address = parse_host(text); address.is_ok())
      locals.push_back(address.value());
  if (locals.empty()) locals.push_back({});
  const size_t num_pairs = std::max(remotes.size(), locals.size());
  for (size_t i = 0; i < num_pairs; ++i) {
    for (int lane = 0; lane < options_.lanes; ++lane) {
      const SocketAddress& local = locals[i % locals.size()];
      const SocketAddress& remote = remotes[i % remotes.size()];
      const bool is_one_family =
          local.size == 0 || local.storage.ss_family == remote.storage.ss_family;
      rails_.push_back({is_one_family ? local : SocketAddress{}, remote, nullptr, 0});
      PredictorOptions predictor;
      if (i < options_.bandwidths_bytes_per_s.size())
        predictor.bandwidth_bytes_per_s = options_.bandwidths_bytes_per_s[i] / options_.lanes;
      rail_set_.add_rail(predictor);
    }
  }
}

bool Peer::has_work() const {
  return !pending_.empty() || !slices_.empty() || !notice_.is_answered || !awaiting_grant_.empty();
}

bool Peer::has_ready_connection() const {
  if (control_ && control_->is_ready()) return true;
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.connection && rail.connection->is_ready();
  });
}

void Peer::check_liveness(int64_t now, Work& work) {
  if (control_) heard_ns_ = std::max(heard_ns_, control_->heard_ns());
  for (const Rail& rail : rails_)
    if (rail.connection) heard_ns_ = std::max(heard_ns_, rail.connection->heard_ns());
  if (!has_work() && has_ready_connection()) return;
  const int64_t silent_ns = now - heard_ns_;
  if (silent_ns >= options_.lease_ns)
    return give_up(State::kLost,
                   {Code::kPeerLost, "transfer.watch",
                    address_.text() + " was silent for " +
                        std::to_string(options_.lease_ns / 1'000'000) + " ms", ""},
                   work);
  const int64_t ping_ns = options_.lease_ns / 3;
  if (silent_ns >= ping_ns && now - pinged_ns_ >= ping_ns && control_ && control_->is_ready()) {
    pinged_ns_ = now;
    control_->send({.type = FrameType::kPing});
    add_once(work.to_flush, control_);
  }
}

int64_t Peer::next_due() const {
  if (state_ == State::kLost || state_ == State::kClosed) return kNever;
  int64_t due = control_ ? kNever : control_health_.due_ns();
  if (control_ && !control_->is_ready())
    due = std::min(due, control_->begin_ns() + options_.handshake_timeout_ns);
  for (const Rail& rail : rails_)
    if (rail.connection && !rail.connection->is_ready())
      due = std::min(due, rail.connection->begin_ns() + options_.handshake_timeout_ns);
  due = std::min(due, rail_set_.next_event_ns(!pending_.empty()));
  if (has_work() || !has_ready_connection()) {
    const int64_t ping_ns = options_.lease_ns / 3;
    if (control_ && control_->is_ready())
      due = std::min(due, std::max(heard_ns_, pinged_ns_) + ping_ns);
    due = std::min(due, heard_ns_ + options_.lease_ns);
  }
  return due;
}

int64_t Peer::tick(int64_t now) {
  Work work;
  int64_t due;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kLost || state_ == State::kClosed) return kNever;
    const Error late{Code::kDeadline, "transfer.connect", "no handshake in time", ""};
    if (!control_ && control_health_.is_connect_due(now)) connect_control(now, work);
    if (control_ && !control_->is_ready() &&
        now >= control_->begin_ns() + options_.handshake_timeout_ns)
      take_back(control_, late, work);
    for (uint32_t r = 0; r < rails_.size() && state_ == State::kOpen; ++r) {
      // A copy: take_back resets the member.
      const std::shared_ptr<ClientConnection> connection = rails_[r].connection;
      if (!connection) {
        if (rail_set_.is_connect_due(r, now)) connect_rail(r, now);
      } else if (!connection->is_ready()) {
        if (now >= connection->begin_ns() + options_.handshake_timeout_ns)
          take_back(connection, late, work);
      } else {
        rail_set_.on_progress(r, connection->progress_ns());
        if (rail_set_.is_stalled(r, now))
          take_back(connection,
                    {Code::kDeadline, "transfer.watch", "the rail is silent", ""}, work);
      }
    }
    if (state_ == State::kOpening || state_ == State::kOpen) check_liveness(now, work);
    if (state_ == State::kOpen) dispatch(work);
    due = next_due();
  }
  finish(std::move(work));
  return due;
}

std::vector<RailStatus> Peer::rails() const {
  const std::lock_guard lock(mutex_);
  std::vector<RailStatus> statuses;
  for (uint32_t r = 0; r < rails_.size(); ++r)
    statuses.push_back({rails_[r].local.size > 0 ? rails_[r].local.text() : "",
                        rails_[r].remote.text(), rail_set_.health(r).state(),
                        rails_[r].bytes_moved, rail_set_.predictor(r).effective_bandwidth()});
  return statuses;
}

std::map<std::string, std::string> Peer::refusals() const {
  const std::lock_guard lock(mutex_);
  return refusals_;
}

}  // namespace tandem::transfer
