// The state of a rail (one connection to a peer over one pair of addresses), which decides if it
// may carry slices: healthy, paused, closed or terminated.
//
//   healthy --errors, slow slices--> paused --cool-down over, probe slice ended well--> healthy
//   healthy, paused --connection lost--> closed --reconnected--> paused, probe due at once
//   any --peer gone, epoch changed, proof refused--> terminated, for good
//
// Pure: time is an argument (monotonic nanoseconds); the owner serialises calls.
#pragma once

#include <cstdint>
#include <limits>

namespace tandem::transfer {

// A time that never comes.
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

enum class RailState { kHealthy, kPaused, kClosed, kTerminated };

struct HealthOptions {
  int errors_to_pause = 1;
  int slow_to_pause = 4;  // In a row.
  int64_t pause_ns = 50'000'000;
  int64_t max_pause_ns = 1'000'000'000;
  int64_t reconnect_ns = 10'000'000;
  int64_t max_reconnect_ns = 200'000'000;
  // An attempt to reconnect without an answer of the other host's kernel is given up after
  // travel_factor times the duration of an earlier answer, and not before this: the request may
  // have been lost while the path was down, and TCP repeats it only after a second.
  int64_t patience_ns = 50'000'000;
  int travel_factor = 4;
  int num_impatient = 4;  // In a row; then patience doubles, since the path may have become longer.
};

class RailHealth {
 public:
  explicit RailHealth(const HealthOptions& options) : options_(options) {}

  RailState state() const { return state_; }
  bool may_carry() const { return state_ == RailState::kHealthy; }
  // True if one slice may be sent to test whether the rail works again.
  bool is_probe_due(int64_t now_ns) const {
    return state_ == RailState::kPaused && !is_probing_ && now_ns >= due_ns_;
  }
  bool is_connect_due(int64_t now_ns) const {
    return state_ == RailState::kClosed && !is_connecting_ && now_ns >= due_ns_;
  }
  // Time to check a paused or closed rail again; kNever if nothing is due.
  int64_t due_ns() const;

  void begin_probe() { is_probing_ = true; }
  // Ends a probe that was cancelled, without a conclusion.
  void drop_probe() { is_probing_ = false; }
  void begin_connect() { is_connecting_ = true; }

  void on_success();
  void on_slow(int64_t now_ns);
  void on_error(int64_t now_ns);
  void on_disconnect(int64_t now_ns);
  // `answer_ns`: time that the other host's kernel took to answer; 0 if unknown.
  void on_connect(int64_t now_ns, int64_t answer_ns = 0);
  // Time that an attempt may wait for that answer; kNever without a limit of its own.
  int64_t patience_ns() const;
  // Makes postponed attempts due now, since the path is known to work again.
  void retry_now(int64_t now_ns);
  void terminate() { state_ = RailState::kTerminated; }

 private:
  void pause(int64_t now_ns);

  HealthOptions options_;
  RailState state_ = RailState::kClosed;
  bool is_probing_ = false;
  bool is_connecting_ = false;
  bool was_connected_ = false;
  int num_errors_ = 0;
  int num_slow_ = 0;
  int num_pauses_ = 0;      // Since the last success: the cool-down doubles with each.
  int num_disconnects_ = 0;
  int64_t answer_ns_ = 0;
  int64_t due_ns_ = 0;
};

}  // namespace tandem::transfer
