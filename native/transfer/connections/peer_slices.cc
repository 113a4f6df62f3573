// A peer's handling of pieces: the choice of a transport, the cutting into slices, and the return
// of all work when a batch ends.
#include <algorithm>

#include "base/threads/idle_spin.h"
#include "transfer/connections/peer.h"

namespace tandem::transfer {

void Peer::begin_work() {
  // Begin to measure silence when an answer is owed.
  if (!has_work()) heard_ns_ = std::max(heard_ns_, now_ns());
}

void Peer::submit(std::vector<Piece> pieces) {
  Work work;
  {
    const MutexLock lock(mutex_);
    begin_work();
    for (Piece& piece : pieces) route(std::move(piece), work);
    dispatch(work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

void Peer::fall_back(Piece piece, TransportKind failed, Error error) {
  {
    const MutexLock lock(mutex_);
    // The copy failed because the segment ended during it, so report that reason.
    if (state_ != State::kOpen) error = lost_reason_;
  }
  const bool is_final = error.code == Code::kConfig || error.code == Code::kPermissionDenied ||
                        error.code == Code::kCancelled || piece.batch->only().has_value();
  if (is_final) return owner_.abort(piece.batch, std::move(error));
  counters_.add_failover(failed);
  Work work;
  {
    const MutexLock lock(mutex_);
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
  if (version_ < kDebtsVersion && options_.fences->owes_of_others(epoch_, session_)) {
    work.to_abort.emplace_back(
        piece.batch,
        Error{Code::kUnsupported, "transfer.route",
              "a WRITE over an earlier segment of this peer ended unconfirmed, and the peer speaks "
              "version " + std::to_string(version_) + ", which cannot fence it: restart the peer",
              ""});
    return;
  }
  if (route_direct(piece, work, failed, true)) return;
  const std::optional<TransportKind>& only = piece.batch->only();
  if (is_allowed(TransportKind::kTcp) && (!only || *only == TransportKind::kTcp) &&
      failed != TransportKind::kTcp) {
    pending_.push_back(std::move(piece));
    return;
  }
  if (route_direct(piece, work, failed, false)) return;
  std::string reasons;
  for (const auto& [name, reason] : refusals_) reasons += " " + name + ": " + reason + ";";
  work.to_abort.emplace_back(
      piece.batch, Error{Code::kUnsupported, "transfer.route",
                         "no transport that is allowed reaches the buffer;" + reasons, ""});
}

// Rank of a transport in the order of preference.
size_t Peer::rank(TransportKind kind) const {
  const auto& order = options_.transports;
  return static_cast<size_t>(std::find(order.begin(), order.end(), kind) - order.begin());
}

bool Peer::is_wanted(const Piece& piece, TransportKind kind, std::optional<TransportKind> failed,
                     bool is_before_tcp) const {
  const std::optional<TransportKind>& only = piece.batch->only();
  return is_allowed(kind) && (!only || *only == kind) && (!failed || rank(kind) > rank(*failed)) &&
         is_before_tcp == (rank(kind) < rank(TransportKind::kTcp)) &&
         !refusals_.contains(std::string(transport_name(kind)));
}

// If no rail is left, give the waiting pieces to a transport that comes after tcp, if there is one.
void Peer::leave_rails(Work& work) {
  const bool has_rail = std::any_of(rails_.begin(), rails_.end(),
                                    [](const Rail& rail) { return rail.connection != nullptr; });
  if (has_rail || rank(TransportKind::kTcp) + 1 >= options_.transports.size()) return;
  std::deque<Piece> waiting = std::exchange(pending_, {});
  for (Piece& piece : waiting) {
    if (!piece.batch->is_open()) continue;
    if (route_direct(piece, work, TransportKind::kTcp, false))
      counters_.add_failover(TransportKind::kTcp);
    else
      pending_.push_back(std::move(piece));
  }
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

bool Peer::route_direct(const Piece& piece, Work& work, std::optional<TransportKind> failed,
                        bool is_before_tcp) {
  const auto is_wanted = [&](TransportKind kind) {
    return this->is_wanted(piece, kind, failed, is_before_tcp);
  };
  if (!is_wanted(TransportKind::kShm) && !is_wanted(TransportKind::kCma)) return false;
  const uint64_t offset = piece.offset();
  if (const Direct* direct = find_direct(offset)) {
    for (const auto& mapping : direct->mappings) {
      if (!is_wanted(mapping->kind())) continue;
      if (!is_copy_held(piece, work, failed)) work.copy(piece, mapping);
      return true;
    }
    return false;
  }
  const uint64_t key = grant_key(offset);
  std::vector<Piece>& waiting = awaiting_grant_[key];
  waiting.push_back(piece);
  // Ask for the grant now if there is a control connection; else it is asked for when there is one.
  if (waiting.size() == 1 && control_ && control_->is_ready()) {
    control_->send({.type = FrameType::kGrant, .offset = key});
    work.flush(control_);
  }
  return true;
}

void Peer::drop(const Batch& batch) {
  Work work;
  {
    const MutexLock lock(mutex_);
    const auto is_its = [&](const Piece& piece) { return piece.batch.get() == &batch; };
    std::erase_if(pending_, is_its);
    for (auto& [key, waiting] : awaiting_grant_) std::erase_if(waiting, is_its);
    std::erase_if(awaiting_fence_, [&](const Held& held) { return is_its(held.piece); });
    std::set<std::shared_ptr<ClientConnection>> to_close;
    for (auto slice = slices_.begin(); slice != slices_.end();) {
      if (!is_its(slice->second.piece)) {
        ++slice;
        continue;
      }
      Rail& rail = rails_[slice->second.rail];
      const auto connection = rail.connection;
      if (slice->second.piece.transfer().op == Op::kRead) {
        connection->drop_read(slice->first);
        rail_set_.forget(slice->first);
      } else if (connection->drop_write(slice->first)) {
        rail_set_.forget(slice->first);
        std::erase_if(rail.sent, [&](const auto& one) { return one.ticket == slice->first; });
      } else {
        // Part of the slice is sent, and the peer must not apply it after the batch has failed.
        // Record the debt here, because another thread may have shut the connection and not
        // reported it yet.
        owe_fence(*connection, true);
        to_close.insert(connection);
      }
      slice = slices_.erase(slice);
    }
    for (const auto& connection : to_close)
      take_back(connection, {Code::kCancelled, "transfer.cancel", "a slice was cancelled", ""},
                work);
    if (!to_close.empty() && control_ && control_->is_ready()) {
      send_fences(*control_);
      work.flush(control_);
    }
    dispatch(work);
    work.due_ns = next_due();
  }
  finish(std::move(work));
}

void Peer::owe_fence(const ClientConnection& connection, bool may_write) {
  options_.fences->add(epoch_, {session_, connection.id()}, may_write);
}

bool Peer::send_fences(ClientConnection& connection) {
  if (options_.fences->is_empty()) return false;
  const bool takes_all = connection.version() >= kDebtsVersion;
  const FenceLedger::Due due = options_.fences->take_due(
      epoch_, connection.carrier(), takes_all ? std::string() : session_);
  if (due.debts.empty()) return due.may_write;
  if (takes_all) {
    connection.send({.type = FrameType::kFenceDebts}, encode_debts(due.debts));
  } else {
    PayloadWriter out;
    for (const FenceDebt& debt : due.debts) out.put_u32(debt.connection);
    connection.send({.type = FrameType::kFence}, out.take());
  }
  return due.may_write;
}

// A copy through shared memory uses no connection, so that a fence cannot be sent ahead of it on
// the same stream: the copy waits for the peer's answer to the fence.
bool Peer::is_copy_held(const Piece& piece, Work& work, std::optional<TransportKind> failed) {
  if (options_.fences->is_empty() || !options_.fences->owes(epoch_)) return false;
  if (control_ && control_->is_ready()) {
    if (!send_fences(*control_)) return false;
    work.flush(control_);
  }
  awaiting_fence_.push_back({piece, failed});
  return true;
}

void Peer::settle_fences(std::vector<FenceDebt> debts, Work& work) {
  options_.fences->settle(epoch_, debts);
  resume_copies(work);
}

void Peer::resume_copies(Work& work) {
  for (Held& held : std::exchange(awaiting_fence_, {}))
    route(std::move(held.piece), work, held.failed);
}

void Peer::dispatch(Work& work) {
  const int64_t now = now_ns();
  while (!pending_.empty()) {
    Piece& front = pending_.front();
    if (!front.batch->is_open()) {
      pending_.pop_front();
      continue;
    }
    const std::optional<SliceChoice> choice =
        rail_set_.choose(now, front.length, front.total, front.transfer().location);
    if (!choice) {
      for (const Rail& rail : rails_)
        if (rail.quota) rail.quota->note_backlog(now);
      return;
    }
    Piece piece = front;
    piece.length = choice->bytes;
    front.begin += choice->bytes;
    front.length -= choice->bytes;
    if (front.length == 0) pending_.pop_front();
    Rail& rail = rails_[choice->rail];
    const std::shared_ptr<ClientConnection>& connection = rail.connection;
    rail.sent.push_back({choice->ticket, piece.transfer().op == Op::kWrite});
    if (rail.quota) rail_set_.hold(choice->rail, rail.quota->spend(choice->bytes, now));
    send_fences(*connection);
    if (piece.transfer().op == Op::kWrite)
      connection->send_write(choice->ticket, piece.offset(), piece.local(), piece.length,
                             options_.has_checksum);
    else
      connection->send_read(choice->ticket, piece.offset(), piece.local(), piece.length,
                            options_.has_checksum);
    slices_.emplace(choice->ticket, Slice{std::move(piece), choice->rail, now});
    work.flush(connection);
  }
}

// The peer answers slices of a connection in the order of their arrival. An answer that skips one
// means a lost request or answer, a repeated one a duplicate. No stream does that, so the path is
// broken, and the connection is closed.
Status Peer::check_order(const std::shared_ptr<ClientConnection>& connection, uint64_t ticket) {
  if (connection->role() != Role::kRail || rails_[connection->rail()].connection != connection)
    return {Code::kCorruption, "transfer.io", "an answer over a connection that asked nothing", ""};
  std::deque<Rail::Sent>& sent = rails_[connection->rail()].sent;
  while (!sent.empty() && sent.front().ticket < ticket) {
    // A dropped slice may get no answer.
    if (slices_.contains(sent.front().ticket))
      return {Code::kCorruption, "transfer.io", "an answer is missing", ""};
    sent.pop_front();
  }
  if (sent.empty() || sent.front().ticket != ticket)
    return {Code::kCorruption, "transfer.io", "an answer that nobody waits for", ""};
  sent.pop_front();
  return {};
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
    ++rails_[slice.rail].num_resent;
    pending_.push_front(slice.piece);
  } else if (frame.code != 0) {
    // The peer's refusal of a slice does not count against the rail.
    rail_set_.forget(frame.id);
    work.to_abort.emplace_back(slice.piece.batch, decode_error(frame.code, payload));
  } else {
    rail_set_.complete(frame.id, now_ns());
    rails_[slice.rail].bytes_moved += slice.piece.length;
    const int64_t now = now_ns();
    rails_[slice.rail].latencies.add(now - slice.begin_ns);
    if (rails_[slice.rail].quota) rails_[slice.rail].quota->add_moved(slice.piece.length, now);
    slice.piece.batch->add_done(slice.piece, TransportKind::kTcp);
  }
}

}  // namespace tandem::transfer
