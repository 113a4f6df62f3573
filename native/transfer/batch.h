// A batch: transfers submitted together, waited for together.
//
// A transfer is moved as pieces (a range of it that one transport holds) and slices (what a rail
// takes of a piece). The batch counts bytes; it ends once, by success when all have arrived, or by
// an error. Ending by an error has two steps: `begin_end` bars new work, then the engine takes every
// piece and slice back from the transports, and only then `finish` lets the waiters go. So whoever
// sees the end knows that no byte of a local buffer is touched any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "transfer/registry.h"
#include "transfer/transport_kind.h"

namespace tandem::transfer {

class Peer;

enum class Op : uint8_t { kRead, kWrite };

struct TransferItem {
  Op op = Op::kRead;
  uint8_t* local = nullptr;
  Registry::Pin pin;           // Of the local buffer.
  std::shared_ptr<Peer> peer;  // None: the segment is our own.
  uint64_t offset = 0;
  uint64_t length = 0;
  std::atomic<uint64_t> bytes_done{0};
};

class Batch {
 public:
  // `only`: no other transport may be used.
  Batch(size_t num_items, int64_t deadline_ns, std::optional<TransportKind> only = std::nullopt);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::vector<TransferItem>& items() { return items_; }
  const std::optional<TransportKind>& only() const { return only_; }
  int64_t deadline_ns() const { return deadline_ns_; }

  // New work may be started for it.
  bool is_open() const { return !is_ending_.load(std::memory_order_acquire); }
  bool is_finished() const { return is_finished_.load(std::memory_order_acquire); }
  // REQUIRES: finished.
  const Status& status() const { return status_; }

  // REQUIRES: all items are filled in. Counts the bytes that are to come; done at once if none.
  void start();
  void add_done(size_t item, uint64_t bytes);
  // True for the one caller that must take the work back and call finish.
  bool begin_end();
  void finish(Status status);
  // False at the deadline (monotonic nanoseconds).
  bool wait(int64_t deadline_ns);

  // A descriptor that becomes readable when the batch is finished; owned by the batch.
  Result<int> completion_fd();

 private:
  std::vector<TransferItem> items_;
  const int64_t deadline_ns_;
  const std::optional<TransportKind> only_;
  std::atomic<uint64_t> bytes_left_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> is_finished_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  Status status_;      // Written before is_finished_.
  int event_fd_ = -1;  // GUARDED_BY(mutex_)
};

// A range of one transfer of a batch.
struct Piece {
  std::shared_ptr<Batch> batch;
  size_t item = 0;
  uint64_t begin = 0;
  uint64_t length = 0;

  TransferItem& transfer() const { return batch->items()[item]; }
};

}  // namespace tandem::transfer
