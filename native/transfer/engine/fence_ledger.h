// The ledger of connections that were given up with unconfirmed WRITEs: their bytes may be in a
// kernel's buffer, and the peer could apply them after later writes. Such a connection is a debt
// until the peer has confirmed that it is closed there. All engines of a process share the ledger,
// which is indexed by the peer's epoch, so that debts outlive segments and engines.
//
// A connection that carries slices sends the debts ahead of them (`take_due`): the peer closes the
// old connections before it reads the next frame. Copies without a connection (shm, cma) wait until
// no debt is left. Without debts both cost one atomic load.
//
// Pure except for its mutex, which is a leaf: no clock, no socket. Threads: any.
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
  // Returns a new id for a connection or copier that carries fences; unique in the process.
  uint64_t next_carrier() { return next_carrier_.fetch_add(1, std::memory_order_relaxed); }

  // Adds a debt. `may_write`: WRITEs were unconfirmed, so that copies must wait. An existing debt
  // stays.
  void add(uint64_t epoch, const FenceDebt& debt, bool may_write);
  struct Due {
    bool may_write = false;        // A debt is left for which copies must wait.
    std::vector<FenceDebt> debts;  // To be sent over this carrier now; counted as sent.
  };
  // Returns the debts to send over a carrier. `only_session`: the only session whose debts the peer
  // understands; empty if it understands all.
  Due take_due(uint64_t epoch, uint64_t carrier, const std::string& only_session = {});
  // Removes the debts of connections that the peer has closed.
  void settle(uint64_t epoch, const std::vector<FenceDebt>& debts);

  // True if this peer is owed a debt with `may_write`.
  bool owes(uint64_t epoch) const;
  // True if this peer is owed a debt with `may_write` of another session than this one.
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

// The ledger of this process. A forked child has its own, since it has none of its parent's
// connections.
std::shared_ptr<FenceLedger> process_fences();

}  // namespace tandem::transfer
