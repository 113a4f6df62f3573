#include "transfer/rails/rail_predictor.h"

#include <algorithm>
#include <cassert>

namespace tandem::transfer {
namespace {

// The estimates are bounded, so that one absurd sample (from a suspended machine) cannot ruin a
// rail's estimate for good.
constexpr double kMinBeta1 = 1.0 / 256;
constexpr double kMaxBeta1 = 4096;
constexpr double kMaxBeta0S = 1.0;
// Least relative variance of the loads (queued bytes / nominal bandwidth) for which the slope of
// latency over load is estimated.
constexpr double kLeastSpread = 1e-3;
// Least part of the mean latency that is attributed to bandwidth; the rest is fixed latency.
constexpr double kLeastPart = 0.1;

}  // namespace

double RailPredictor::load_s(uint64_t slice_bytes, double penalty) const {
  return (static_cast<double>(in_flight_) + penalty * static_cast<double>(slice_bytes)) /
         options_.bandwidth_bytes_per_s;
}

double RailPredictor::predict_s(uint64_t slice_bytes, double penalty) const {
  return beta1_ * load_s(slice_bytes, penalty) + beta0_s_;
}

void RailPredictor::release(uint64_t slice_bytes) {
  assert(slice_bytes <= in_flight_);
  in_flight_ -= std::min(in_flight_, slice_bytes);
}

void RailPredictor::observe(double load_s, double latency_s) {
  const double keep = 1 - options_.alpha;
  weight_ = weight_ * keep + 1;
  sum_x_ = sum_x_ * keep + load_s;
  sum_y_ = sum_y_ * keep + latency_s;
  sum_xx_ = sum_xx_ * keep + load_s * load_s;
  sum_xy_ = sum_xy_ * keep + load_s * latency_s;
  const double mean_x = sum_x_ / weight_;
  const double mean_y = sum_y_ / weight_;
  const double variance = sum_xx_ / weight_ - mean_x * mean_x;
  // Loads that are all alike do not determine the slope; then only beta0, the fixed latency, is
  // updated.
  if (mean_x > 0 && variance > kLeastSpread * mean_x * mean_x) {
    const double covariance = sum_xy_ / weight_ - mean_x * mean_y;
    // Neither term may be negative; and noise must not attribute nearly all latency to beta0, or
    // the rail would look as if its bandwidth had no limit.
    const double most = mean_y / mean_x;
    const double least = std::min(kLeastPart * most, beta1_);
    beta1_ = std::clamp(std::clamp(covariance / variance, least, std::max(least, most)),
                        kMinBeta1, kMaxBeta1);
  }
  beta0_s_ = std::clamp(mean_y - beta1_ * mean_x, 0.0, kMaxBeta0S);
}

}  // namespace tandem::transfer
