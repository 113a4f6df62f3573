// Prediction of how long a slice will take on a rail, given the rail's load:
//
// L = beta1 * (in_flight + penalty * slice) / bandwidth + beta0
//
// `in_flight` is reserved when a slice is given to the rail and returned when it ends, so that two
// decisions in a row see each other. beta1 (slowness relative to the nominal speed) and beta0
// (fixed cost of a slice) are the line through the latencies of ended slices, by least squares over
// moments that are updated by EWMA. Pure: no clock, no thread; the owner serialises calls.
//
// Both are estimated together: if a fixed latency were attributed to lack of bandwidth, the rail
// would be given less work at a time, the same latency would then look like even less bandwidth,
// and so on.
#pragma once

#include <cstdint>

namespace tandem::transfer {

struct PredictorOptions {
  // Nominal speed. It is measured from then on, so that a wrong value costs only some slices.
  double bandwidth_bytes_per_s = 1.25e9;
  // Penalty of the formula: above 1 for a rail that is far from the memory (another NUMA node).
  double penalty = 1.0;
  // Weight of a new observation.
  double alpha = 0.0625;
};

class RailPredictor {
 public:
  explicit RailPredictor(const PredictorOptions& options) : options_(options) {}

  // Returns the seconds until a slice that is given now would end.
  double predict_s(uint64_t slice_bytes) const { return predict_s(slice_bytes, options_.penalty); }
  // Returns the same prediction with the penalty of the memory that holds the slice, instead of the
  // rail's own.
  double predict_s(uint64_t slice_bytes, double penalty) const;
  // Bytes that wait or move, and the rail's load if a slice is given now, in nominal seconds.
  uint64_t in_flight_bytes() const { return in_flight_; }
  double load_s(uint64_t slice_bytes) const { return load_s(slice_bytes, options_.penalty); }
  double load_s(uint64_t slice_bytes, double penalty) const;
  double penalty() const { return options_.penalty; }
  // Measured speed in bytes per second.
  double effective_bandwidth() const { return options_.bandwidth_bytes_per_s / beta1_; }
  double beta0_s() const { return beta0_s_; }
  double beta1() const { return beta1_; }

  void reserve(uint64_t slice_bytes) { in_flight_ += slice_bytes; }
  // REQUIRES: reserved before.
  void release(uint64_t slice_bytes);
  // Notes that a slice took `latency_s`, at a load of `load_s`, itself included.
  void observe(double load_s, double latency_s);

 private:
  PredictorOptions options_;
  uint64_t in_flight_ = 0;
  // Moments of (load, latency). They begin with a light point at the origin: until loads differ,
  // all latency is attributed to bandwidth, so that the first slice on a slow rail shows that it is
  // slow.
  double weight_ = 0.25;
  double sum_x_ = 0, sum_y_ = 0, sum_xx_ = 0, sum_xy_ = 0;
  double beta0_s_ = 0;
  double beta1_ = 1;
};

}  // namespace tandem::transfer
