// Fairness between the processes of a user that share a NIC: each holds itself to its weight's part
// of what the NIC moves, by a look at a board in shared memory every 20 ms.
//
// The board is a file in /dev/shm, of this user alone (0600). Each process writes one slot, its own,
// and only reads the others: there is no lock that a killed process could keep. A slot whose owner is
// dead counts for nothing and is taken by the next comer.
//
// A process that is alone on the NIC, or whose others want less than their part, is not held at all.
// What the NIC can do is not configured: it is what all together moved lately, and a little more, so
// that a share grows where there is room.
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

  // `name`: of the board; letters, digits, '-', '_' and '.'. Errors: kPermissionDenied (the file is
  // another user's, or open to others), kCapacity (no free slot, no memory), kConfig (name, weight).
  static Result<std::shared_ptr<NicQuota>> join(const std::string& name, double weight,
                                                const ProcessId& process,
                                                const std::string& folder = "/dev/shm");
  ~NicQuota();
  NicQuota(const NicQuota&) = delete;
  NicQuota& operator=(const NicQuota&) = delete;

  // A slice of so many bytes goes out. Returns when the next one may; now_ns or earlier: at once.
  int64_t spend(uint64_t bytes, int64_t now_ns);
  // A slice ended. Bytes that moved are what shares are made of.
  void add_moved(uint64_t bytes, int64_t now_ns);
  // There is more to send than was sent.
  void note_backlog(int64_t now_ns);
  // Bytes per second that this process may move now; infinity: not held.
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
