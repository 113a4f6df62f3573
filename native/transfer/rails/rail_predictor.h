// How long a slice will take on a rail, given what the rail carries already:
//
//   L = beta1 * (in_flight + penalty * slice) / bandwidth + beta0
//
// `in_flight` is reserved when a slice is given to the rail and returned when it ends, so two
// decisions in a row see each other. beta1 (how much slower than its nominal speed the rail is) and
// beta0 (what a slice costs however small) are the line through the latencies of slices that ended,
// by least squares over moments that are updated by EWMA. Pure: no clock, no thread; the owner
// serialises calls.
//
// Why both at once: if a fixed latency were taken for a lack of bandwidth, the rail would be given
// less work at a time, the same latency would then look like even less bandwidth, and so on.
#pragma once

#include <cstdint>

namespace tandem::transfer {

struct PredictorOptions {
  // Nominal speed; learnt from then on, so a wrong one costs some slices and no more.
  double bandwidth_bytes_per_s = 1.25e9;
  // P of the formula: above 1 for a rail that is far from the memory (another NUMA node).
  double penalty = 1.0;
  // Weight of a new observation.
  double alpha = 0.0625;
};

class RailPredictor {
 public:
  explicit RailPredictor(const PredictorOptions& options) : options_(options) {}

  // Seconds until a slice given now would end.
  double predict_s(uint64_t slice_bytes) const { return predict_s(slice_bytes, options_.penalty); }
  // With another P: of the memory that the slice lies in.
  double predict_s(uint64_t slice_bytes, double penalty) const;
  // Bytes that wait or move, and what the rail had to do for a slice given now, nominal seconds.
  uint64_t in_flight_bytes() const { return in_flight_; }
  double load_s(uint64_t slice_bytes) const { return load_s(slice_bytes, options_.penalty); }
  double load_s(uint64_t slice_bytes, double penalty) const;
  double penalty() const { return options_.penalty; }
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
  // Moments of (load, latency). They begin with a light point at the origin: until loads differ, all
  // latency is taken for bandwidth, so that the first slice on a slow rail tells that it is slow.
  double weight_ = 0.25;
  double sum_x_ = 0, sum_y_ = 0, sum_xx_ = 0, sum_xy_ = 0;
  double beta0_s_ = 0;
  double beta1_ = 1;
};

}  // namespace tandem::transfer
