// Fairness: how the capacity of a NIC is divided between those who want it. Weighted max-min: each
// gets its weight's part of what is left, nobody more than it asks for, and what one leaves the
// others take. Pure.
#pragma once

#include <vector>

namespace tandem::transfer {

struct ShareClaim {
  double weight = 1;  // > 0.
  double demand = 0;  // >= 0, in the unit of the capacity.
};

// The share of each claim. The sum is min(capacity, sum of demands) up to rounding.
std::vector<double> split_capacity(double capacity, const std::vector<ShareClaim>& claims);

}  // namespace tandem::transfer
