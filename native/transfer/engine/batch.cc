#include "transfer/engine/batch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/threads/idle_spin.h"

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

void Batch::hold(const std::shared_ptr<Peer>& peer, const std::shared_ptr<File>& file) {
  if (peer && std::find(peers_.begin(), peers_.end(), peer) == peers_.end())
    peers_.push_back(peer);
  if (file && std::find(files_.begin(), files_.end(), file) == files_.end())
    files_.push_back(file);
}

void Batch::add_done(const Piece& piece, TransportKind kind) { add_done({&piece, 1}, kind); }

void Batch::add_done(std::span<const Piece> pieces, TransportKind kind) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) {
    size_t item = piece.item;
    if (TransferCounters* counters = items_[item].counters)
      counters->add(kind, static_cast<int>(items_[item].op), piece.length);
    uint64_t begin = piece.begin;
    while (begin >= items_[item].length) begin -= items_[item++].length;
    for (uint64_t left = piece.length; left > 0; ++item, begin = 0) {
      TransferItem& part_of = items_[item];
      const uint64_t part = std::min(left, part_of.length - begin);
      // If one piece has the whole item, no other thread adds to its count, and a store suffices.
      if (part == part_of.length)
        part_of.bytes_done.store(part, std::memory_order_relaxed);
      else
        part_of.bytes_done.fetch_add(part, std::memory_order_relaxed);
      left -= part;
    }
    total += piece.length;
  }
  if (bytes_left_.fetch_sub(total, std::memory_order_acq_rel) == total && begin_end()) finish({});
}

bool Batch::begin_end() { return !is_ending_.exchange(true, std::memory_order_acq_rel); }

void Batch::finish(Status status) {
  pins_.clear();
  if (on_end_) on_end_(*this, status);
  completion_.complete([&] {
    status_ = std::move(status);
    if (event_fd_ >= 0) eventfd_write(event_fd_, 1);
  });
}

Result<int> Batch::completion_fd() {
  return completion_.hold([&]() -> Result<int> {
    if (event_fd_ < 0) {
      event_fd_ = eventfd(is_finished() ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
      if (event_fd_ < 0)
        return Error{Code::kCapacity, "transfer.await", describe_errno("eventfd", errno), ""};
    }
    return event_fd_;
  });
}

}  // namespace tandem::transfer
