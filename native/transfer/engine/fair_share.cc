#include "transfer/engine/fair_share.h"

#include <algorithm>
#include <numeric>

namespace tandem::transfer {

std::vector<double> split_capacity(double capacity, const std::vector<ShareClaim>& claims) {
  std::vector<double> shares(claims.size(), 0.0);
  // Order the claims by demand per weight, in which progressive filling satisfies them.
  std::vector<size_t> order(claims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return claims[a].demand * claims[b].weight < claims[b].demand * claims[a].weight;
  });
  double weights_left = 0;
  for (const ShareClaim& claim : claims) weights_left += claim.weight;
  double left = std::max(capacity, 0.0);
  for (const size_t i : order) {
    shares[i] = std::min(claims[i].demand, left * claims[i].weight / weights_left);
    left = std::max(left - shares[i], 0.0);
    weights_left -= claims[i].weight;
  }
  return shares;
}

}  // namespace tandem::transfer
