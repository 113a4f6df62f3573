// Injected faults for tests: a plan decides for each chunk of a transport what goes wrong. The
// network has its own proxy (tests/transfer/transfer_faults.py); this is for transports within the
// host.
#pragma once

#include <cstdint>
#include <memory>
#include <random>

#include "base/threads/thread_annotations.h"
#include "transfer/memory/mapping.h"

namespace tandem::transfer {

// Probabilities for each chunk; the remaining probability is that of no fault.
struct FaultRates {
  double drop = 0;       // Not moved, reported as failed.
  double corrupt = 0;    // Wrong bytes moved, reported as failed: torn.
  double duplicate = 0;  // Moved twice.
  double reorder = 0;    // Its second half is moved before the first.
  double delay = 0;      // Moved late.
  int64_t delay_ns = 0;
  bool is_dead = false;  // Every chunk fails.
};

enum class Fault { kNone, kDrop, kCorrupt, kDuplicate, kReorder, kDelay };

// Threads: any.
class FaultPlan {
 public:
  FaultPlan(uint64_t seed, const FaultRates& rates) : rates_(rates), random_(seed) {}

  Fault next();
  int64_t delay_ns() const { return rates_.delay_ns; }
  // Number of faults so far.
  uint64_t num_faults() const;

 private:
  const FaultRates rates_;
  mutable Mutex mutex_;  // Leaf.
  std::mt19937_64 random_ GUARDED_BY(mutex_);
  uint64_t num_faults_ GUARDED_BY(mutex_) = 0;
};

// Returns a mapping that applies the plan's faults to copies through another mapping.
std::shared_ptr<Mapping> make_faulty_mapping(std::shared_ptr<Mapping> mapping,
                                             std::shared_ptr<FaultPlan> plan);

}  // namespace tandem::transfer
