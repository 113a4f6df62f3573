// Distribution of slices: which rail takes the next slice of a transfer, and how long that slice
// is.
//
// A slice is cut when a rail is chosen for it: its length is what that rail moves in `slice_ns`, so
// that fast rails get long slices and slow rails short ones, and all slices take about the same
// time, which limits the tail of a transfer. A rail has at most `window_ns` of predicted work (and
// may always have two slices); further slices wait, so that a late discovery about a rail affects
// few of them.
//
// Every choice is a ticket that ends in exactly one of complete, fail, forget or disconnect. Pure:
// time is an argument (monotonic nanoseconds); the owner serialises calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "transfer/rails/rail_health.h"
#include "transfer/rails/rail_predictor.h"

namespace tandem::transfer {

struct SprayOptions {
  uint64_t min_slice_bytes = 64 << 10;
  uint64_t max_slice_bytes = 4 << 20;
  int64_t slice_ns = 1'000'000;
  int64_t window_ns = 10'000'000;
  // A slice is slow if it took this many times its prediction, and longer than the floor. Below the
  // floor, the noise of a shared machine looks the same.
  double slow_factor = 3.0;
  int64_t slow_floor_ns = 20'000'000;
  // A rail with work that makes no progress for slow_factor times the prediction is silent, and its
  // connection is closed. Not before the first limit while few slices have measured its speed, and
  // never before the second: below it, silence and a busy machine look the same.
  int64_t stall_floor_ns = 200'000'000;
  int64_t known_stall_floor_ns = 20'000'000;
  // A rail is also silent if the other host's kernel, which owes acknowledgements, has sent none
  // for quiet_factor times the prediction of the oldest slice, and not below the floor. A kernel
  // answers while processes wait for a core, so that this limit may be tight, and a rail on which
  // the kernel answers is not given up before stall_floor_ns. The difference to slow_factor allows
  // for clocks and wake-ups.
  double quiet_factor = 1.75;
  int64_t quiet_floor_ns = 12'000'000;
  // One choice in this many goes to the healthy rail that was idle longest, so that its speed stays
  // known.
  uint64_t choices_per_probe = 128;
  // One choice in this many goes to a rail with few measured slices: an unlucky first slice would
  // otherwise be believed for long.
  uint64_t choices_per_trial = 8;
  // A probe that would end after the rest of the transfer is postponed to a longer transfer, for
  // this time at most.
  int64_t probe_anyway_ns = 1'000'000'000;
  HealthOptions health;
};

struct SliceChoice {
  uint64_t ticket = 0;
  uint32_t rail = 0;
  uint64_t bytes = 0;
};

class RailSet {
 public:
  explicit RailSet(const SprayOptions& options) : options_(options) {}

  // Adds a rail, closed until on_connect. Returns its index.
  uint32_t add_rail(const PredictorOptions& options);
  size_t num_rails() const { return rails_.size(); }
  const RailHealth& health(uint32_t rail) const { return rails_[rail].health; }
  const RailPredictor& predictor(uint32_t rail) const { return rails_[rail].predictor; }
  bool has_healthy() const;
  bool is_terminated() const;

  // Chooses a rail, and a length in [1, remaining], for the next slice of a transfer of `total`
  // bytes. Returns nothing if the caller must wait for a completion or for next_event_ns. REQUIRES:
  // 1 <= remaining <= total. `location`: of the memory, see set_penalty.
  std::optional<SliceChoice> choose(int64_t now_ns, uint64_t remaining, uint64_t total,
                                    size_t location = 0);
  // Sets the penalty of the prediction for slices in memory of this location (0: unknown, always
  // the rail's own).
  void set_penalty(uint32_t rail, size_t location, double penalty);
  // Bars a rail until a time, since it has used its share of the NIC.
  void hold(uint32_t rail, int64_t until_ns) { rails_[rail].held_until_ns = until_ns; }

  // From now on rails take slices in turn, whatever their load and speed, as a baseline for
  // comparisons. Lengths stay, and errors still bar a rail.
  void use_round_robin() { is_round_robin_ = true; }

  bool has_ticket(uint64_t ticket) const { return tickets_.contains(ticket); }
  // Notes that bytes of this rail moved, so that it is not silent.
  void on_progress(uint32_t rail, int64_t now_ns);
  // True if the owner should check the other host's acknowledgements. `on_look` notes the result:
  // whether the host owes some, and when it was last heard.
  bool is_look_due(uint32_t rail, int64_t now_ns) const { return now_ns >= look_due_ns(rail); }
  void on_look(uint32_t rail, int64_t now_ns, bool owes, int64_t heard_ns);
  void complete(uint64_t ticket, int64_t now_ns);
  void fail(uint64_t ticket, int64_t now_ns);
  void forget(uint64_t ticket);

  bool is_connect_due(uint32_t rail, int64_t now_ns) const {
    return rails_[rail].health.is_connect_due(now_ns);
  }
  void begin_connect(uint32_t rail) { rails_[rail].health.begin_connect(); }
  void on_connect(uint32_t rail, int64_t now_ns, int64_t answer_ns = 0);
  // Limit for an answer to a reconnection, see RailHealth.
  int64_t patience_ns(uint32_t rail) const { return rails_[rail].health.patience_ns(); }
  // Removes and returns the tickets of a disconnected rail, whose slices must be given anew.
  std::vector<uint64_t> on_disconnect(uint32_t rail, int64_t now_ns);
  void terminate(uint32_t rail) { rails_[rail].health.terminate(); }
  void retry_now(uint32_t rail, int64_t now_ns) { rails_[rail].health.retry_now(now_ns); }

  // True if the rail has work and has been silent for too long.
  bool is_stalled(uint32_t rail, int64_t now_ns) const {
    return now_ns >= stall_due_ns(rail) || is_quiet(rail, now_ns);
  }
  // Returns the next time at which a reconnection, a stall, a look or (if slices wait for a rail) a
  // probe is due; kNever if none is.
  int64_t next_event_ns(bool has_waiting = true) const;

 private:
  struct Rail {
    Rail(RailPredictor of, RailHealth in) : predictor(std::move(of)), health(std::move(in)) {}

    RailPredictor predictor;
    RailHealth health;
    uint32_t num_in_flight = 0;
    int64_t used_ns = 0;
    int64_t progress_ns = 0;
    int64_t held_until_ns = 0;
    uint64_t num_completed = 0;
    // Longest recent time between two signs of progress: as much silence is usual.
    int64_t usual_gap_ns = 0;
    // Time when the other host was last heard, whether it owes acknowledgements, and the number of
    // looks since.
    int64_t heard_ns = 0;
    int64_t looked_ns = 0;
    bool is_owing = false;
    int num_quiet_looks = 0;
    // Longest recent silence of the host after which it was still alive.
    int64_t usual_quiet_ns = 0;
    // Time and length of the silence for which the rail was given up; if it reconnects at once, as
    // much silence counts as usual.
    int64_t left_ns = 0;
    int64_t left_quiet_ns = 0;
    std::vector<double> penalties;  // By location.

    double penalty(size_t location) const {
      return location < penalties.size() ? penalties[location] : predictor.penalty();
    }
  };
  struct Ticket {
    uint32_t rail;
    uint64_t bytes;
    double load_s;
    double predicted_s;
    int64_t begin_ns;
  };

  int64_t stall_due_ns(uint32_t rail) const;
  int64_t quiet_limit_ns(uint32_t rail) const;
  int64_t look_due_ns(uint32_t rail) const;
  bool is_quiet(uint32_t rail, int64_t now_ns) const;
  // True if the rail has as much work as it may have, including a slice that is predicted to end
  // then.
  bool is_full(const Rail& rail, double predicted_s) const;
  uint64_t cut(const Rail& rail, uint64_t remaining, uint64_t total, double all_bandwidth) const;
  uint32_t find_next_in_turn();
  std::optional<uint32_t> find_idlest(int64_t now_ns, bool is_little_known) const;
  SliceChoice take(uint32_t rail, uint64_t bytes, int64_t now_ns);
  Ticket end(uint64_t ticket);

  SprayOptions options_;
  std::vector<Rail> rails_;
  std::map<uint64_t, Ticket> tickets_;
  uint64_t next_ticket_ = 1;
  uint64_t num_choices_ = 0;
  int64_t chosen_ns_ = 0;  // When it was chosen last: what was due then was considered.
  bool is_round_robin_ = false;
  uint32_t next_in_turn_ = 0;
};

}  // namespace tandem::transfer
