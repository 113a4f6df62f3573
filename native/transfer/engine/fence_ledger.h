// Which connections to a peer were given up with WRITEs unconfirmed: their bytes may lie in a kernel's
// buffer, and the peer could apply them after what is written later. Such a connection is a debt until
// the peer has confirmed that it is closed there. The ledger is shared by all engines of a process, by
// epoch of the peer, so debts outlive segments and engines.
//
// What carries slices over a connection sends the debts ahead of them (`take_due`): the peer closes
// the old connections before it reads the next frame. What goes past connections (shm, cma) waits
// until nothing is owed. Without debts both cost one atomic load.
//
// Pure but for its mutex, which is a leaf: no clock, no socket. Threads: any.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/threads/thread_annotations.h"

namespace tandem::transfer {

struct FenceDebt {
  std::string session;
  uint32_t connection = 0;

  auto operator<=>(const FenceDebt&) const = default;
};

class FenceLedger {
 public:
  // Ids of what carries fences: unique in the process, never given again.
  uint64_t next_carrier() { return next_carrier_.fetch_add(1, std::memory_order_relaxed); }

  // `may_write`: WRITEs were unconfirmed, so copies must wait. A debt that is there already stays.
  void add(uint64_t epoch, const FenceDebt& debt, bool may_write);
  struct Due {
    bool may_write = false;        // A debt is left for which copies must wait.
    std::vector<FenceDebt> debts;  // To be sent over this carrier now; counted as sent.
  };
  // `only_session`: the peer understands no other's debts; empty: it understands all.
  Due take_due(uint64_t epoch, uint64_t carrier, const std::string& only_session = {});
  // The peer has closed these connections.
  void settle(uint64_t epoch, const std::vector<FenceDebt>& debts);

  // A debt to this peer with `may_write`.
  bool owes(uint64_t epoch) const;
  // The like, of another session than this one.
  bool owes_of_others(uint64_t epoch, const std::string& session) const;
  std::vector<FenceDebt> debts(uint64_t epoch) const;
  bool is_empty() const { return size_.load(std::memory_order_acquire) == 0; }
  size_t size() const { return size_.load(std::memory_order_acquire); }

 private:
  struct State {
    bool may_write = false;
    std::set<uint64_t> carriers;  // Over which it was sent.
  };
  using Debts = std::map<FenceDebt, State>;

  std::atomic<uint64_t> next_carrier_{1};
  std::atomic<size_t> size_{0};  // Written under mutex_.
  mutable Mutex mutex_;
  std::map<uint64_t, Debts> by_epoch_ GUARDED_BY(mutex_);
};

// The ledger of this process. A forked child, which owns none of its parent's connections, has
// another.
std::shared_ptr<FenceLedger> process_fences();

}  // namespace tandem::transfer
