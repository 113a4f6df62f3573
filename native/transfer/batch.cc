#include "transfer/batch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/idle_spin.h"

namespace tandem::transfer {

Batch::Batch(size_t num_items, int64_t deadline_ns, std::optional<TransportKind> only,
             OnEnd on_end)
    : items_(num_items),
      deadline_ns_(deadline_ns),
      only_(only),
      on_end_(std::move(on_end)),
      begin_ns_(now_ns()) {}

Batch::~Batch() {
  if (event_fd_ >= 0) close(event_fd_);
}

void Batch::start() {
  uint64_t total = 0;
  for (const TransferItem& item : items_) total += item.length;
  bytes_left_.store(total);
  if (total == 0 && begin_end()) finish({});
}

void Batch::add_done(const Piece& piece, TransportKind kind) {
  size_t item = piece.item;
  if (TransferCounters* counters = items_[item].counters)
    counters->add(kind, static_cast<int>(items_[item].op), piece.length);
  uint64_t begin = piece.begin;
  while (begin >= items_[item].length) begin -= items_[item++].length;
  for (uint64_t left = piece.length; left > 0; ++item, begin = 0) {
    const uint64_t part = std::min(left, items_[item].length - begin);
    items_[item].bytes_done.fetch_add(part, std::memory_order_relaxed);
    left -= part;
  }
  if (bytes_left_.fetch_sub(piece.length, std::memory_order_acq_rel) == piece.length &&
      begin_end())
    finish({});
}

bool Batch::begin_end() { return !is_ending_.exchange(true, std::memory_order_acq_rel); }

void Batch::finish(Status status) {
  pins_.clear();
  if (on_end_) on_end_(*this, status);
  const std::lock_guard lock(mutex_);
  status_ = std::move(status);
  is_finished_.store(true, std::memory_order_release);
  if (event_fd_ >= 0) eventfd_write(event_fd_, 1);
  finished_.notify_all();
}

bool Batch::wait(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  return finished_.wait_until(lock, deadline, [&] { return is_finished_.load(); });
}

Result<int> Batch::completion_fd() {
  const std::lock_guard lock(mutex_);
  if (event_fd_ < 0) {
    event_fd_ = eventfd(is_finished_.load() ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0)
      return Error{Code::kCapacity, "transfer.await", describe_errno("eventfd", errno), ""};
  }
  return event_fd_;
}

}  // namespace tandem::transfer
