// A peer's connecting and its periodic work: it reconnects, gives up silent rails and checks the
// peer's lease (how long a peer may be silent).
#include <algorithm>

#include "base/threads/idle_spin.h"
#include "transfer/connections/peer.h"

namespace tandem::transfer {

Result<std::shared_ptr<ClientConnection>> Peer::make_connection(Role role, uint32_t rail,
                                                                const SocketAddress& remote,
                                                                const SocketAddress& local) {
  Result<int> fd = begin_connect(remote, local);
  if (!fd.is_ok()) return fd.error();
  tune_stream(fd.value(), remote, options_.socket_buffer_bytes);
  // A rail has nothing to deliver when it is closed; a good-bye goes over the control connection.
  if (role == Role::kRail) abort_on_close(fd.value());
  const uint32_t id = next_connection_id_++;
  EventLoop* loop = loops_[id % loops_.size()];
  auto connection =
      std::make_shared<ClientConnection>(weak_from_this(), loop, fd.value(), role, rail, id,
                                         options_.fences->next_carrier());
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

int64_t Peer::connect_due(uint32_t index) const {
  const ClientConnection& connection = *rails_[index].connection;
  // A kernel answers at once, a process only when it gets a core, so the handshake has a longer
  // limit.
  const int64_t limit_ns = connection.connected_ns() > 0
                               ? options_.handshake_timeout_ns
                               : std::min(options_.handshake_timeout_ns, rail_set_.patience_ns(index));
  return connection.begin_ns() + limit_ns;
}

void Peer::connect_calls(int64_t now) {
  calls_health_.begin_connect();
  auto made = make_connection(Role::kCalls, 0, address_, {});
  if (made.is_ok())
    calls_connection_ = std::move(made.value());
  else
    calls_health_.on_disconnect(now);
}

bool Peer::is_calls_connect_due(int64_t now) const {
  return !calls_connection_ && calls_.has_unsent() && calls_health_.is_connect_due(now);
}

// The peer may be alive while its connection for calls is dead. A silent one is given up after the
// lease, so that its calls end and later ones use a new connection.
void Peer::check_calls(int64_t now, Work& work) {
  const int64_t since_ns = calls_.owed_since_ns();
  if (since_ns == 0 || !calls_connection_ || !calls_connection_->is_ready()) return;
  const int64_t silent_ns =
      now - std::max({since_ns, calls_connection_->heard_ns(), awake_since_ns_});
  const int64_t ping_ns = options_.lease_ns / 3;
  if (silent_ns >= options_.lease_ns)
    return take_back(calls_connection_,
                     {Code::kPeerLost, "transfer.watch", "it was silent for the lease", ""}, work);
  if (silent_ns >= ping_ns && now - calls_pinged_ns_ >= ping_ns) {
    calls_pinged_ns_ = now;
    calls_connection_->send({.type = FrameType::kPing});
    work.flush(calls_connection_);
  }
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
  // With equal numbers, pair local and remote addresses in the order that the user listed them.
  // Else pair each address of the longer list with the nearest of the shorter one, in turn among
  // equally near ones.
  const auto partner = [&](const std::vector<SocketAddress>& from, size_t i,
                           const std::vector<SocketAddress>& to) {
    if (to.size() == num_pairs) return i;
    size_t best = i % to.size();
    for (size_t k = 0; k < to.size(); ++k)
      if (from[i].common_bits(to[k]) > from[i].common_bits(to[best])) best = k;
    return best;
  };
  for (size_t i = 0; i < num_pairs; ++i) {
    const size_t nic = partner(remotes, i, locals);
    for (int lane = 0; lane < options_.lanes; ++lane) {
      const SocketAddress& local = locals[nic];
      const SocketAddress& remote = remotes[partner(locals, i, remotes)];
      const bool is_one_family =
          local.size == 0 || local.storage.ss_family == remote.storage.ss_family;
      Rail& rail = rails_.emplace_back();
      rail.local = is_one_family ? local : SocketAddress{};
      rail.remote = remote;
      if (nic < options_.quotas.size()) rail.quota = options_.quotas[nic];
      PredictorOptions predictor;
      // Speeds may be given for each local address or for each rail.
      const std::vector<double>& speeds = options_.bandwidths_bytes_per_s;
      const size_t speed = speeds.size() == locals.size() ? nic : i;
      if (speed < speeds.size())
        predictor.bandwidth_bytes_per_s = speeds[speed] / options_.lanes;
      const uint32_t index = rail_set_.add_rail(predictor);
      for (size_t location = 1; location < options_.penalties.size(); ++location)
        if (nic < options_.penalties[location].size())
          rail_set_.set_penalty(index, location, options_.penalties[location][nic]);
    }
  }
}

bool Peer::has_work() const {
  return !pending_.empty() || !slices_.empty() || !notice_.is_answered ||
         !awaiting_grant_.empty() || !awaiting_fence_.empty();
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
  if (calls_connection_) heard_ns_ = std::max(heard_ns_, calls_connection_->heard_ns());
  const int64_t owed_since_ns = calls_.owed_since_ns();
  if (!has_work() && owed_since_ns == 0 && has_ready_connection()) return;
  const int64_t silent_ns = now - (has_work() ? heard_ns_ : std::max(heard_ns_, owed_since_ns));
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
    work.flush(control_);
  }
}

int64_t Peer::next_due() const {
  if (state_ == State::kLost || state_ == State::kClosed) return kNever;
  int64_t due = control_ ? kNever : control_health_.due_ns();
  if (control_ && !control_->is_ready())
    due = std::min(due, control_->begin_ns() + options_.handshake_timeout_ns);
  for (uint32_t r = 0; r < rails_.size(); ++r)
    if (rails_[r].connection && !rails_[r].connection->is_ready())
      due = std::min(due, connect_due(r));
  due = std::min(due, rail_set_.next_event_ns(!pending_.empty()));
  const int64_t owed_since_ns = calls_.owed_since_ns();
  if (calls_connection_ && !calls_connection_->is_ready())
    due = std::min(due, calls_connection_->begin_ns() + options_.handshake_timeout_ns);
  else if (!calls_connection_ && calls_.has_unsent())
    due = std::min(due, calls_health_.due_ns());
  const int64_t ping_ns = options_.lease_ns / 3;
  if (calls_connection_ && calls_connection_->is_ready() && owed_since_ns > 0) {
    const int64_t heard_ns =
        std::max({owed_since_ns, calls_connection_->heard_ns(), awake_since_ns_});
    due = std::min({due, std::max(heard_ns, calls_pinged_ns_) + ping_ns,
                    heard_ns + options_.lease_ns});
  }
  if (has_work() || owed_since_ns > 0 || !has_ready_connection()) {
    const int64_t heard_ns = has_work() ? heard_ns_ : std::max(heard_ns_, owed_since_ns);
    if (control_ && control_->is_ready())
      due = std::min(due, std::max(heard_ns, pinged_ns_) + ping_ns);
    due = std::min(due, heard_ns + options_.lease_ns);
  }
  return due;
}

int64_t Peer::tick(int64_t now, int64_t late_ns) {
  Work work;
  int64_t due;
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kLost || state_ == State::kClosed) return kNever;
    // After a long delay of this timer the whole machine may have stood still, and the peer with
    // it: give the peer time to speak.
    if (late_ns > options_.lease_ns / 2) heard_ns_ = awake_since_ns_ = now;
    const Error late{Code::kDeadline, "transfer.connect", "no handshake in time", ""};
    if (!control_ && control_health_.is_connect_due(now)) connect_control(now, work);
    if (control_ && !control_->is_ready() &&
        now >= control_->begin_ns() + options_.handshake_timeout_ns)
      take_back(control_, late, work);
    if (is_calls_connect_due(now)) connect_calls(now);
    if (calls_connection_ && !calls_connection_->is_ready() &&
        now >= calls_connection_->begin_ns() + options_.handshake_timeout_ns)
      take_back(calls_connection_, late, work);
    for (uint32_t r = 0; r < rails_.size() && state_ == State::kOpen; ++r) {
      // Copy the pointer, since take_back resets the member.
      const std::shared_ptr<ClientConnection> connection = rails_[r].connection;
      if (!connection) {
        if (rail_set_.is_connect_due(r, now)) connect_rail(r, now);
      } else if (!connection->is_ready()) {
        if (now >= connect_due(r)) take_back(connection, late, work);
      } else {
        rail_set_.on_progress(r, connection->progress_ns());
        if (rail_set_.is_look_due(r, now)) {
          const HostLife life = connection->host_life(now);
          rail_set_.on_look(r, now, life.owes, life.heard_ns);
        }
        if (rail_set_.is_stalled(r, now))
          take_back(connection,
                    {Code::kDeadline, "transfer.watch", "the rail is silent", ""}, work);
      }
    }
    if (state_ == State::kOpening || state_ == State::kOpen) check_liveness(now, work);
    if (state_ == State::kOpen) check_calls(now, work);
    if (state_ == State::kOpen) dispatch(work);
    due = next_due();
  }
  finish(std::move(work));
  return due;
}

std::vector<RailStatus> Peer::rails() const {
  const MutexLock lock(mutex_);
  std::vector<RailStatus> statuses;
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    const Rail& rail = rails_[r];
    const RailPredictor& predictor = rail_set_.predictor(r);
    statuses.push_back({
        .local = rail.local.size > 0 ? rail.local.text() : "",
        .remote = rail.remote.text(),
        .state = rail_set_.health(r).state(),
        .bytes_moved = rail.bytes_moved,
        .num_resent = rail.num_resent,
        .in_flight_bytes = predictor.in_flight_bytes(),
        .bandwidth_bytes_per_s = predictor.effective_bandwidth(),
        .predicted_s = predictor.predict_s(0),
        .latencies = rail.latencies,
        .tags = rail.connection ? rail.connection->tag_kind() : TagKind::kNone});
  }
  return statuses;
}

void Peer::on_link(const std::vector<SocketAddress>& addresses, bool is_up) {
  Work work;
  {
    const MutexLock lock(mutex_);
    if (state_ != State::kOpening && state_ != State::kOpen) return;
    const auto is_on_it = [&](const SocketAddress& local) {
      return local.size > 0 && std::any_of(addresses.begin(), addresses.end(),
                                           [&](const auto& one) { return one.is_same_host(local); });
    };
    const Error down{Code::kPeerLost, "transfer.watch", "the network interface went down", ""};
    if (control_ && !is_up && is_on_it(control_->local_address())) take_back(control_, down, work);
    if (calls_connection_ && !is_up && is_on_it(calls_connection_->local_address()))
      take_back(calls_connection_, down, work);
    const int64_t now = now_ns();
    for (uint32_t r = 0; r < rails_.size(); ++r) {
      const std::shared_ptr<ClientConnection> connection = rails_[r].connection;
      const bool is_its = connection ? is_on_it(connection->local_address())
                                     : is_on_it(rails_[r].local);
      if (!is_its) continue;
      // Restart an attempt that began while the link was down, since it may hang for long.
      if (connection && (!is_up || !connection->is_ready())) take_back(connection, down, work);
      if (is_up) rail_set_.retry_now(r, now);
    }
    if (is_up && !control_) control_health_.retry_now(now);
    if (is_up && !calls_connection_) calls_health_.retry_now(now);
    work.due_ns = is_up ? now : next_due();
  }
  finish(std::move(work));
}

void Peer::use_round_robin() {
  const MutexLock lock(mutex_);
  rail_set_.use_round_robin();
}

std::map<std::string, std::string> Peer::refusals() const {
  const MutexLock lock(mutex_);
  return refusals_;
}

}  // namespace tandem::transfer
