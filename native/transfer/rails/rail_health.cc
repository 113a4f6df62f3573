#include "transfer/rails/rail_health.h"

#include <algorithm>

namespace tandem::transfer {
namespace {

int64_t back_off(int64_t first_ns, int64_t max_ns, int num_times) {
  constexpr int kMaxDoublings = 20;
  return std::min(max_ns, first_ns << std::min(num_times, kMaxDoublings));
}

}  // namespace

int64_t RailHealth::due_ns() const {
  const bool waits = (state_ == RailState::kPaused && !is_probing_) ||
                     (state_ == RailState::kClosed && !is_connecting_);
  return waits ? due_ns_ : kNever;
}

void RailHealth::pause(int64_t now_ns) {
  state_ = RailState::kPaused;
  is_probing_ = false;
  due_ns_ = now_ns + back_off(options_.pause_ns, options_.max_pause_ns, num_pauses_++);
  num_errors_ = num_slow_ = 0;
}

void RailHealth::on_success() {
  num_errors_ = num_slow_ = 0;
  if (state_ != RailState::kHealthy && state_ != RailState::kPaused) return;
  // A slice that was given to the rail before its pause ended well, which counts like a probe.
  state_ = RailState::kHealthy;
  is_probing_ = false;
  num_pauses_ = num_disconnects_ = 0;
}

void RailHealth::on_slow(int64_t now_ns) {
  if (state_ == RailState::kPaused && is_probing_) return pause(now_ns);
  if (state_ == RailState::kHealthy && ++num_slow_ >= options_.slow_to_pause) pause(now_ns);
}

void RailHealth::on_error(int64_t now_ns) {
  if (state_ == RailState::kPaused && is_probing_) return pause(now_ns);
  if (state_ == RailState::kHealthy && ++num_errors_ >= options_.errors_to_pause) pause(now_ns);
}

void RailHealth::on_disconnect(int64_t now_ns) {
  if (state_ == RailState::kTerminated) return;
  state_ = RailState::kClosed;
  is_probing_ = is_connecting_ = false;
  // The first attempt is immediate: a reset connection to a live peer should cost microseconds.
  due_ns_ = now_ns;
  if (num_disconnects_ > 0)
    due_ns_ += back_off(options_.reconnect_ns, options_.max_reconnect_ns, num_disconnects_ - 1);
  ++num_disconnects_;
}

void RailHealth::retry_now(int64_t now_ns) {
  num_disconnects_ = num_pauses_ = 0;
  due_ns_ = std::min(due_ns_, now_ns);
}

int64_t RailHealth::patience_ns() const {
  if (!was_connected_) return kNever;
  const int64_t first_ns = std::max(options_.patience_ns, options_.travel_factor * answer_ns_);
  return back_off(first_ns, kNever, std::max(0, num_disconnects_ - options_.num_impatient));
}

void RailHealth::on_connect(int64_t now_ns, int64_t answer_ns) {
  if (state_ != RailState::kClosed) return;
  answer_ns_ = answer_ns;
  is_connecting_ = false;
  if (!was_connected_) {
    was_connected_ = true;
    state_ = RailState::kHealthy;
    return;
  }
  // The rail failed before, so that one slice must succeed before it gets a share again.
  state_ = RailState::kPaused;
  due_ns_ = now_ns;
}

}  // namespace tandem::transfer
