// Division of a NIC's capacity among claims. Weighted max-min fairness: each claim gets its
// weight's part of the rest, and no more than it asks for; the others divide what it leaves. Pure.
#pragma once

#include <vector>

namespace tandem::transfer {

struct ShareClaim {
  double weight = 1;  // > 0.
  double demand = 0;  // >= 0, in the unit of the capacity.
};

// Returns the share of each claim. Their sum is min(capacity, sum of demands) up to rounding.
std::vector<double> split_capacity(double capacity, const std::vector<ShareClaim>& claims);

}  // namespace tandem::transfer
