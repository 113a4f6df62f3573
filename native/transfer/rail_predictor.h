// How long a slice will take on a rail, given what the rail carries already:
//
//   L = beta1 * (in_flight + penalty * slice) / bandwidth + beta0
//
// `in_flight` is reserved when a slice is given to the rail and returned when it ends, so two
// decisions in a row see each other. beta1 (how much slower than its nominal speed the rail is) and
// beta0 (what a slice costs however small) are learnt by EWMA from slices that ended. Pure: no
// clock, no thread; the owner serialises calls.
#pragma once

#include <cstdint>

namespace tandem::transfer {

struct PredictorOptions {
  // Nominal speed; learnt from then on, so a wrong one costs some slices and no more.
  double bandwidth_bytes_per_s = 1.25e9;
  // P of the formula: above 1 for a rail that is far from the memory (another NUMA node).
  double penalty = 1.0;
  // Weight of a new observation. The first ones weigh 1/n, so that a new rail is known after few.
  double alpha = 0.125;
};

class RailPredictor {
 public:
  explicit RailPredictor(const PredictorOptions& options) : options_(options) {}

  // Seconds until a slice given now would end.
  double predict_s(uint64_t slice_bytes) const;
  // Bytes that wait or move, and what the rail had to do for a slice given now, nominal seconds.
  uint64_t in_flight_bytes() const { return in_flight_; }
  double load_s(uint64_t slice_bytes) const;
  // Learnt speed, bytes per second.
  double effective_bandwidth() const { return options_.bandwidth_bytes_per_s / beta1_; }
  double beta0_s() const { return beta0_s_; }
  double beta1() const { return beta1_; }

  void reserve(uint64_t slice_bytes) { in_flight_ += slice_bytes; }
  // REQUIRES: reserved before.
  void release(uint64_t slice_bytes);
  // A slice that had `load_s` before it (itself included) took `latency_s`.
  void observe(double load_s, double latency_s);

 private:
  PredictorOptions options_;
  uint64_t in_flight_ = 0;
  uint64_t num_observed_ = 0;
  double beta0_s_ = 0;
  double beta1_ = 1;
};

}  // namespace tandem::transfer
