#include "transfer/rail_predictor.h"

#include <algorithm>
#include <cassert>

namespace tandem::transfer {
namespace {

// One absurd sample (a suspended machine) must not put a rail beyond recovery.
constexpr double kMinBeta1 = 1.0 / 256;
constexpr double kMaxBeta1 = 4096;
constexpr double kMaxBeta0S = 1.0;

}  // namespace

double RailPredictor::load_s(uint64_t slice_bytes) const {
  return (static_cast<double>(in_flight_) + options_.penalty * static_cast<double>(slice_bytes)) /
         options_.bandwidth_bytes_per_s;
}

double RailPredictor::predict_s(uint64_t slice_bytes) const {
  return beta1_ * load_s(slice_bytes) + beta0_s_;
}

void RailPredictor::release(uint64_t slice_bytes) {
  assert(slice_bytes <= in_flight_);
  in_flight_ -= std::min(in_flight_, slice_bytes);
}

void RailPredictor::observe(double load_s, double latency_s) {
  ++num_observed_;
  const double alpha = std::max(options_.alpha, 1.0 / static_cast<double>(num_observed_));
  // The error belongs to the term that dominates: a large slice tells the speed, a small one the
  // fixed cost. Splitting it between both would let noise in one drag the other.
  const double moving_s = beta1_ * load_s;
  if (moving_s >= beta0_s_ && load_s > 0) {
    const double sample = std::max(latency_s - beta0_s_, 0.0) / load_s;
    beta1_ = std::clamp(beta1_ + alpha * (sample - beta1_), kMinBeta1, kMaxBeta1);
  } else {
    const double sample = std::max(latency_s - moving_s, 0.0);
    beta0_s_ = std::clamp(beta0_s_ + alpha * (sample - beta0_s_), 0.0, kMaxBeta0S);
  }
}

}  // namespace tandem::transfer
