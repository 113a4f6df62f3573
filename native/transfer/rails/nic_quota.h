// Fairness between the processes of a user that share a NIC: each limits itself to its weight's
// part of what the NIC moves, after reading a board in shared memory every 20 ms.
//
// The board is a file in /dev/shm that only this user can access (0600). Each process writes only
// its own slot and reads the others: there is no lock that a killed process could keep. A slot of a
// dead process does not count, and is taken by the next process.
//
// A process that is alone on the NIC, or whose competitors want less than their part, is not
// limited. The NIC's capacity is not configured: it is estimated as what all processes together
// moved recently, and a little more, so that shares grow while capacity is left.
//
// Threads: any; the mutex is a leaf.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/engine/fair_share.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

class NicQuota {
 public:
  static constexpr int64_t kRefreshNs = 20'000'000;

  // `name`: name of the board; letters, digits, '-', '_' and '.'. Errors: kPermissionDenied (the
  // file is another user's, or open to others), kCapacity (no free slot, no memory), kConfig (name,
  // weight).
  static Result<std::shared_ptr<NicQuota>> join(const std::string& name, double weight,
                                                const ProcessId& process,
                                                const std::string& folder = "/dev/shm");
  ~NicQuota();
  NicQuota(const NicQuota&) = delete;
  NicQuota& operator=(const NicQuota&) = delete;

  // Counts a slice that is sent. Returns the time at which the next one may be sent; now_ns or
  // earlier for at once.
  int64_t spend(uint64_t bytes, int64_t now_ns);
  // Counts the bytes of a slice that ended. Shares are computed from these.
  void add_moved(uint64_t bytes, int64_t now_ns);
  // Notes that more is waiting to be sent.
  void note_backlog(int64_t now_ns);
  // Bytes per second that this process may move now; infinity without a limit.
  double rate() const;

 private:
  struct Board;
  NicQuota(Board* board, int fd, size_t slot, double weight, const ProcessId& process);
  void refresh(int64_t now_ns) REQUIRES(mutex_);

  Board* const board_;
  const int fd_;
  const size_t slot_;
  const double weight_;
  const ProcessId process_;

  mutable Mutex mutex_;
  int64_t refreshed_ns_ GUARDED_BY(mutex_) = 0;
  int64_t backlog_ns_ GUARDED_BY(mutex_) = 0;
  uint64_t moved_bytes_ GUARDED_BY(mutex_) = 0;       // Since the last refresh.
  double moved_per_s_ GUARDED_BY(mutex_) = 0;         // Smoothed.
  bool is_fresh_ GUARDED_BY(mutex_) = true;           // It began, or began again, a period ago.
  double rate_ GUARDED_BY(mutex_) = 0;
  int64_t next_ns_ GUARDED_BY(mutex_) = 0;            // When what was spent is paid for at that rate.
};

}  // namespace tandem::transfer
