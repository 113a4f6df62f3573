#include "transfer/engine/fence_ledger.h"

#include <unistd.h>

#include <algorithm>

namespace tandem::transfer {

void FenceLedger::add(uint64_t epoch, const FenceDebt& debt, bool may_write) {
  const MutexLock lock(mutex_);
  const auto [found, is_new] = by_epoch_[epoch].try_emplace(debt);
  found->second.may_write |= may_write;
  if (is_new) size_.fetch_add(1, std::memory_order_release);
}

FenceLedger::Due FenceLedger::take_due(uint64_t epoch, uint64_t carrier,
                                       const std::string& only_session) {
  Due due;
  if (is_empty()) return due;
  const MutexLock lock(mutex_);
  const auto found = by_epoch_.find(epoch);
  if (found == by_epoch_.end()) return due;
  for (auto& [debt, state] : found->second) {
    due.may_write |= state.may_write;
    if (!only_session.empty() && debt.session != only_session) continue;
    if (state.carriers.insert(carrier).second) due.debts.push_back(debt);
  }
  return due;
}

void FenceLedger::settle(uint64_t epoch, const std::vector<FenceDebt>& debts) {
  const MutexLock lock(mutex_);
  const auto found = by_epoch_.find(epoch);
  if (found == by_epoch_.end()) return;
  size_t num_settled = 0;
  for (const FenceDebt& debt : debts) num_settled += found->second.erase(debt);
  if (found->second.empty()) by_epoch_.erase(found);
  size_.fetch_sub(num_settled, std::memory_order_release);
}

bool FenceLedger::owes(uint64_t epoch) const { return owes_of_others(epoch, {}); }

bool FenceLedger::owes_of_others(uint64_t epoch, const std::string& session) const {
  if (is_empty()) return false;
  const MutexLock lock(mutex_);
  const auto found = by_epoch_.find(epoch);
  return found != by_epoch_.end() &&
         std::any_of(found->second.begin(), found->second.end(), [&](const auto& one) {
           return one.second.may_write && one.first.session != session;
         });
}

std::vector<FenceDebt> FenceLedger::debts(uint64_t epoch) const {
  std::vector<FenceDebt> debts;
  const MutexLock lock(mutex_);
  if (const auto found = by_epoch_.find(epoch); found != by_epoch_.end())
    for (const auto& [debt, state] : found->second) debts.push_back(debt);
  return debts;
}

std::shared_ptr<FenceLedger> process_fences() {
  // A forked child makes a new ledger and leaves its parent's alone, since another thread of the
  // parent may have held its lock at the fork.
  struct Owned {
    int pid;
    std::shared_ptr<FenceLedger> ledger;
  };
  static std::atomic<Owned*> current{nullptr};
  const int pid = static_cast<int>(::getpid());
  Owned* owned = current.load(std::memory_order_acquire);
  while (owned == nullptr || owned->pid != pid) {
    auto fresh = std::make_unique<Owned>(Owned{pid, std::make_shared<FenceLedger>()});
    if (!current.compare_exchange_weak(owned, fresh.get(), std::memory_order_acq_rel)) continue;
    owned = fresh.release();
  }
  return owned->ledger;
}

}  // namespace tandem::transfer
