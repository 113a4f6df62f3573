#include "transfer/rails/rail_set.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace tandem::transfer {
namespace {

constexpr double kNsPerS = 1e9;
constexpr double kMaxTravelNs = 50e6;
// Limits of the slices in flight on one rail (one connection). A server closes a connection that
// leaves much more of its answers unread.
constexpr uint64_t kMaxInFlightBytes = 512 << 20;
constexpr uint32_t kMaxInFlightSlices = 16384;
// Number of slices below which a rail's speed counts as unknown, since the first slices measure the
// connection's slow start.
constexpr uint64_t kFewSlices = 8;

}  // namespace

uint32_t RailSet::add_rail(const PredictorOptions& options) {
  rails_.emplace_back(RailPredictor(options), RailHealth(options_.health));
  return static_cast<uint32_t>(rails_.size() - 1);
}

bool RailSet::has_healthy() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& r) { return r.health.may_carry(); });
}

bool RailSet::is_terminated() const {
  return std::all_of(rails_.begin(), rails_.end(),
                     [](const Rail& r) { return r.health.state() == RailState::kTerminated; });
}

uint64_t RailSet::cut(const Rail& rail, uint64_t remaining, uint64_t total,
                      double all_bandwidth) const {
  const double bandwidth = rail.predictor.effective_bandwidth();
  const double steady = bandwidth * static_cast<double>(options_.slice_ns) / kNsPerS;
  // Split a transfer that is too short for a full slice on every rail by the rails' speeds.
  const double share = static_cast<double>(total) * bandwidth / all_bandwidth;
  const double wish = std::clamp(std::min(steady, share),
                                 static_cast<double>(options_.min_slice_bytes),
                                 static_cast<double>(options_.max_slice_bytes));
  // Round to whole pages, so that the copies at both ends stay aligned.
  constexpr uint64_t kPage = 4096;
  const uint64_t bytes = (static_cast<uint64_t>(wish) + kPage - 1) / kPage * kPage;
  // Add a small remainder to the last slice, since it would cost as much as a slice.
  return remaining < bytes + options_.min_slice_bytes / 2 ? remaining : bytes;
}

std::optional<uint32_t> RailSet::find_idlest(int64_t now_ns, bool is_little_known) const {
  std::optional<uint32_t> idlest;
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    const Rail& rail = rails_[r];
    if (!rail.health.may_carry() || rail.num_in_flight > 0 || rail.held_until_ns > now_ns) continue;
    if (is_little_known ? rail.num_completed >= kFewSlices
                        : now_ns - rail.used_ns < options_.window_ns)
      continue;
    if (!idlest || rail.used_ns < rails_[*idlest].used_ns) idlest = r;
  }
  return idlest;
}

// Returns the next healthy rail in turn. REQUIRES: a rail is healthy.
uint32_t RailSet::find_next_in_turn() {
  do {
    next_in_turn_ = (next_in_turn_ + 1) % static_cast<uint32_t>(rails_.size());
  } while (!rails_[next_in_turn_].health.may_carry());
  return next_in_turn_;
}

void RailSet::set_penalty(uint32_t index, size_t location, double penalty) {
  Rail& rail = rails_[index];
  if (rail.penalties.size() <= location) rail.penalties.resize(location + 1, rail.predictor.penalty());
  rail.penalties[location] = penalty;
}

std::optional<SliceChoice> RailSet::choose(int64_t now_ns, uint64_t remaining, uint64_t total,
                                           size_t location) {
  assert(1 <= remaining && remaining <= total);
  chosen_ns_ = now_ns;
  const uint64_t probe_bytes = std::min(remaining, options_.min_slice_bytes);
  double all_bandwidth = 0;
  for (const Rail& rail : rails_)
    if (rail.health.may_carry()) all_bandwidth += rail.predictor.effective_bandwidth();
  // A probe that ends after everything else would delay the end of the transfer.
  const double rest_s = all_bandwidth == 0 ? std::numeric_limits<double>::infinity()
                                           : static_cast<double>(remaining) / all_bandwidth;
  const auto is_cheap = [&](const Rail& rail) {
    return rail.predictor.predict_s(probe_bytes) <= rest_s;
  };
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    Rail& rail = rails_[r];
    if (!rail.health.is_probe_due(now_ns)) continue;
    if (!is_cheap(rail) && now_ns - rail.health.due_ns() < options_.probe_anyway_ns) continue;
    rail.health.begin_probe();
    return take(r, probe_bytes, now_ns);
  }
  if (all_bandwidth == 0) return std::nullopt;
  ++num_choices_;
  if (num_choices_ % options_.choices_per_probe == 0) {
    const std::optional<uint32_t> idlest = find_idlest(now_ns, false);
    // Probe a long unused rail anyway: if all transfers are short, a rail that once looked slow
    // would never be cheap enough.
    const auto is_long_idle = [&](const Rail& rail) {
      return now_ns - rail.used_ns >= options_.probe_anyway_ns;
    };
    if (idlest && (is_cheap(rails_[*idlest]) || is_long_idle(rails_[*idlest])))
      return take(*idlest, probe_bytes, now_ns);
  } else if (num_choices_ % options_.choices_per_trial == 0) {
    const std::optional<uint32_t> newest = find_idlest(now_ns, true);
    if (newest) return take(*newest, probe_bytes, now_ns);
  }

  if (is_round_robin_) {
    const uint32_t r = find_next_in_turn();
    return take(r, cut(rails_[r], remaining, total, all_bandwidth), now_ns);
  }
  struct Offer {
    uint32_t rail = 0;
    uint64_t bytes = 0;
    double predicted_s = std::numeric_limits<double>::infinity();
  };
  Offer best, best_free;
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    const Rail& rail = rails_[r];
    if (!rail.health.may_carry() || rail.held_until_ns > now_ns) continue;
    const uint64_t bytes = cut(rail, remaining, total, all_bandwidth);
    const Offer offer{r, bytes, rail.predictor.predict_s(bytes, rail.penalty(location))};
    if (offer.predicted_s < best.predicted_s) best = offer;
    if (offer.predicted_s < best_free.predicted_s && !is_full(rail, offer.predicted_s))
      best_free = offer;
  }
  // The best rail is full. Another one would end this slice later, which is harmless only if the
  // rest of the transfer takes even longer on all rails.
  if (best_free.predicted_s > best.predicted_s && best_free.predicted_s > rest_s)
    return std::nullopt;
  if (best_free.bytes == 0) return std::nullopt;
  return take(best_free.rail, best_free.bytes, now_ns);
}

bool RailSet::is_full(const Rail& rail, double predicted_s) const {
  constexpr uint32_t kAlwaysInFlight = 2;
  if (rail.num_in_flight < kAlwaysInFlight) return false;
  const RailPredictor& predictor = rail.predictor;
  const double queue_ns = (predicted_s - predictor.beta0_s()) * kNsPerS;
  // Allow for twice the fixed latency, or the rail would run out of work while an answer travels.
  const double travel_ns = std::min(2 * predictor.beta0_s() * kNsPerS, kMaxTravelNs);
  return queue_ns > static_cast<double>(options_.window_ns) + travel_ns ||
         predictor.in_flight_bytes() >= kMaxInFlightBytes ||
         rail.num_in_flight >= kMaxInFlightSlices;
}

SliceChoice RailSet::take(uint32_t index, uint64_t bytes, int64_t now_ns) {
  Rail& rail = rails_[index];
  const uint64_t ticket = next_ticket_++;
  // Estimate from the load without the penalty, which is only a preference: in the load it would
  // make the rail look faster by the same factor.
  tickets_[ticket] = {index, bytes, rail.predictor.load_s(bytes, 1.0),
                      rail.predictor.predict_s(bytes, 1.0), now_ns};
  rail.predictor.reserve(bytes);
  // Silence is measured from the moment an answer is owed.
  if (rail.num_in_flight++ == 0) {
    rail.progress_ns = rail.heard_ns = now_ns;
    rail.is_owing = false;
    rail.num_quiet_looks = 0;
  }
  rail.used_ns = now_ns;
  return {ticket, index, bytes};
}

RailSet::Ticket RailSet::end(uint64_t id) {
  const auto found = tickets_.find(id);
  assert(found != tickets_.end());
  const Ticket ticket = found->second;
  tickets_.erase(found);
  Rail& rail = rails_[ticket.rail];
  rail.predictor.release(ticket.bytes);
  --rail.num_in_flight;
  return ticket;
}

void RailSet::complete(uint64_t id, int64_t now_ns) {
  assert(has_ticket(id));
  on_progress(tickets_[id].rail, now_ns);
  const Ticket ticket = end(id);
  Rail& rail = rails_[ticket.rail];
  ++rail.num_completed;
  const double latency_s = static_cast<double>(now_ns - ticket.begin_ns) / kNsPerS;
  rail.predictor.observe(ticket.load_s, latency_s);
  const double slow_s = std::max(options_.slow_factor * ticket.predicted_s,
                                 static_cast<double>(options_.slow_floor_ns) / kNsPerS);
  // Slowness bars a rail only if another one can take its share.
  bool has_other = false;
  for (uint32_t r = 0; r < rails_.size(); ++r)
    has_other |= r != ticket.rail && rails_[r].health.may_carry();
  if (latency_s > slow_s && has_other && !is_round_robin_)
    rail.health.on_slow(now_ns);
  else
    rail.health.on_success();
}

void RailSet::on_progress(uint32_t index, int64_t now_ns) {
  Rail& rail = rails_[index];
  // The silence of a rail without slices in flight means nothing.
  if (rail.num_in_flight == 0 || now_ns <= rail.progress_ns) return;
  const int64_t gap_ns = now_ns - rail.progress_ns;
  constexpr int64_t kForget = 64;
  rail.usual_gap_ns = std::max(gap_ns, rail.usual_gap_ns - (rail.usual_gap_ns - gap_ns) / kForget);
  rail.progress_ns = now_ns;
}

void RailSet::fail(uint64_t id, int64_t now_ns) {
  const Ticket ticket = end(id);
  rails_[ticket.rail].health.on_error(now_ns);
}

void RailSet::forget(uint64_t id) {
  const Ticket ticket = end(id);
  rails_[ticket.rail].health.drop_probe();
}

void RailSet::on_connect(uint32_t index, int64_t now_ns, int64_t answer_ns) {
  Rail& rail = rails_[index];
  // A rail that reconnects at once was not cut off, so that its silence counts as usual.
  if (now_ns - rail.left_ns < options_.stall_floor_ns)
    rail.usual_quiet_ns = std::max(rail.usual_quiet_ns, rail.left_quiet_ns);
  rail.health.on_connect(now_ns, answer_ns);
}

std::vector<uint64_t> RailSet::on_disconnect(uint32_t rail, int64_t now_ns) {
  std::vector<uint64_t> lost;
  for (const auto& [id, ticket] : tickets_)
    if (ticket.rail == rail) lost.push_back(id);
  Rail& left = rails_[rail];
  left.left_ns = now_ns;
  left.left_quiet_ns = is_quiet(rail, now_ns) ? now_ns - left.heard_ns : 0;
  left.is_owing = false;
  left.num_quiet_looks = 0;
  for (const uint64_t id : lost) end(id);
  left.health.on_disconnect(now_ns);
  return lost;
}

int64_t RailSet::stall_due_ns(uint32_t index) const {
  const Rail& rail = rails_[index];
  if (rail.num_in_flight == 0) return kNever;
  const double predicted_s = rail.predictor.predict_s(0);
  const int64_t floor_ns = rail.num_completed < kFewSlices
                               ? options_.stall_floor_ns
                               : std::min(options_.stall_floor_ns,
                                          std::max(options_.known_stall_floor_ns,
                                                   2 * rail.usual_gap_ns));
  const double predicted_ns = options_.slow_factor * predicted_s * kNsPerS;
  const auto due_ns = [&](int64_t least_ns) {
    return rail.progress_ns + std::max(least_ns, static_cast<int64_t>(predicted_ns));
  };
  // The other host is alive: only its process gets no core, so that the longer limit applies.
  if (rail.is_owing)
    return std::clamp(rail.heard_ns + quiet_limit_ns(index), due_ns(floor_ns),
                      due_ns(std::max(floor_ns, options_.stall_floor_ns)));
  return due_ns(floor_ns);
}

// Use the oldest slice's prediction, since slices queued behind it do not delay it.
int64_t RailSet::quiet_limit_ns(uint32_t index) const {
  const auto oldest = std::find_if(tickets_.begin(), tickets_.end(),
                                   [&](const auto& one) { return one.second.rail == index; });
  const double predicted_s = oldest == tickets_.end() ? 0 : oldest->second.predicted_s;
  const double limit_ns = options_.quiet_factor * predicted_s * kNsPerS;
  return std::max({options_.quiet_floor_ns, static_cast<int64_t>(limit_ns),
                   2 * rails_[index].usual_quiet_ns});
}

// Check at half the limit after a sign of life, then at every quarter.
int64_t RailSet::look_due_ns(uint32_t index) const {
  const Rail& rail = rails_[index];
  if (rail.num_in_flight == 0 || rail.num_completed < kFewSlices) return kNever;
  const int64_t quarter_ns = quiet_limit_ns(index) / 4;
  return std::max(rail.heard_ns + 2 * quarter_ns, rail.looked_ns + quarter_ns);
}

void RailSet::on_look(uint32_t index, int64_t now_ns, bool owes, int64_t heard_ns) {
  Rail& rail = rails_[index];
  rail.looked_ns = now_ns;
  if (rail.is_owing && owes && heard_ns <= rail.heard_ns) {
    ++rail.num_quiet_looks;
    return;
  }
  constexpr int64_t kForget = 256;
  const int64_t quiet_ns = rail.is_owing && owes ? heard_ns - rail.heard_ns : 0;
  rail.usual_quiet_ns =
      std::max(quiet_ns, rail.usual_quiet_ns - (rail.usual_quiet_ns - quiet_ns) / kForget);
  // The time of an owed answer counts from when this thread notices it.
  rail.heard_ns = rail.is_owing && owes ? heard_ns : now_ns;
  rail.is_owing = owes;
  rail.num_quiet_looks = 0;
}

// Silence must be seen at several checks: if this thread was not scheduled, the other
// host's acknowledgement may have arrived unread.
bool RailSet::is_quiet(uint32_t index, int64_t now_ns) const {
  constexpr int kLooks = 3;
  const Rail& rail = rails_[index];
  return rail.num_in_flight > 0 && rail.num_quiet_looks >= kLooks &&
         now_ns - rail.heard_ns >= quiet_limit_ns(index);
}

int64_t RailSet::next_event_ns(bool has_waiting) const {
  int64_t next = kNever;
  for (uint32_t r = 0; r < rails_.size(); ++r) {
    const RailHealth& health = rails_[r].health;
    if (has_waiting || health.state() == RailState::kClosed) {
      int64_t due = health.due_ns();
      // A probe that was postponed as too expensive is considered again when it is due anyway.
      if (health.state() == RailState::kPaused && due <= chosen_ns_)
        due += options_.probe_anyway_ns;
      next = std::min(next, due);
    }
    next = std::min({next, stall_due_ns(r), look_due_ns(r)});
    if (has_waiting && rails_[r].held_until_ns > chosen_ns_)
      next = std::min(next, rails_[r].held_until_ns);
  }
  return next;
}

}  // namespace tandem::transfer
