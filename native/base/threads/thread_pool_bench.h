// Measurement of how fast the pool starts and ends a job, against a textbook pool in the same run.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "base/threads/thread_pool.h"

namespace tandem {

// Median times over the rounds, in nanoseconds, of an empty job in which every thread takes part,
// from the call to its return.
struct WakeupTimes {
  int64_t pool_ns = 0;
  int64_t condvar_ns = 0;  // Threads behind a Mutex and CondVar.
  double ratio = 0;        // Median over bursts of condvar / pool: above 1, the pool is faster.
};

// Measures both pools in alternating bursts, `rounds` times each, with `gap_us` of rest before each
// job: 0 to 20 us is the rhythm of operators within a decode step, from 1000 us on the workers
// sleep. Errors: kConfig (rounds outside 1 to 1e6, gap outside 0 to 1e6, fewer than 2 threads).
Result<WakeupTimes> measure_wakeup(ThreadPool& pool, int rounds, int gap_us);

}  // namespace tandem
