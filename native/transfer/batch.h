// A batch: transfers submitted together, waited for together.
//
// Transfers that continue each other without a gap at either end form a run. A run is moved as pieces
// (a range of it that one transport holds) and slices (what a rail takes of a piece). The batch
// counts bytes; it ends once, by success when all have arrived, or by
// an error. Ending by an error has two steps: `begin_end` bars new work, then the engine takes every
// piece and slice back from the transports, and only then `finish` lets the waiters go. So whoever
// sees the end knows that no byte of a local buffer is touched any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "transfer/counters.h"
#include "transfer/registry.h"
#include "transfer/transport_kind.h"

namespace tandem::transfer {

class File;
class Peer;

enum class Op : uint8_t { kRead, kWrite };

struct Piece;

struct TransferItem {
  Op op = Op::kRead;
  uint8_t* local = nullptr;
  std::shared_ptr<Peer> peer;  // Neither this nor a file: the segment is our own.
  std::shared_ptr<File> file;
  TransferCounters* counters = nullptr;  // Of the peer, file or engine that moves it.
  size_t location = 0;                   // Of the local memory, see PeerOptions::penalties.
  uint64_t offset = 0;
  uint64_t length = 0;
  std::atomic<uint64_t> bytes_done{0};
};

class Batch {
 public:
  // Told of the end, before the waiters are.
  using OnEnd = std::function<void(const Batch&, const Status&)>;
  // `only`: no other transport may be used.
  Batch(size_t num_items, int64_t deadline_ns, std::optional<TransportKind> only = std::nullopt,
        OnEnd on_end = {});
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::vector<TransferItem>& items() { return items_; }
  // Keeps a local buffer in place until the end. REQUIRES: not started.
  void hold(Registry::Pin pin) { pins_.push_back(std::move(pin)); }
  const std::optional<TransportKind>& only() const { return only_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  int64_t begin_ns() const { return begin_ns_; }

  // New work may be started for it.
  bool is_open() const { return !is_ending_.load(std::memory_order_acquire); }
  bool is_finished() const { return is_finished_.load(std::memory_order_acquire); }
  // REQUIRES: finished.
  const Status& status() const { return status_; }

  // REQUIRES: all items are filled in. Counts the bytes that are to come; done at once if none.
  void start();
  // The bytes of a piece have arrived.
  void add_done(const Piece& piece, TransportKind kind);
  // True for the one caller that must take the work back and call finish.
  bool begin_end();
  void finish(Status status);
  // False at the deadline (monotonic nanoseconds).
  bool wait(int64_t deadline_ns);

  // A descriptor that becomes readable when the batch is finished; owned by the batch.
  Result<int> completion_fd();

 private:
  std::vector<TransferItem> items_;
  std::vector<Registry::Pin> pins_;
  const int64_t deadline_ns_;
  const std::optional<TransportKind> only_;
  const OnEnd on_end_;
  const int64_t begin_ns_;
  std::atomic<uint64_t> bytes_left_{0};
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> is_finished_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  Status status_;      // Written before is_finished_.
  int event_fd_ = -1;  // GUARDED_BY(mutex_)
};

// A range of a run.
struct Piece {
  std::shared_ptr<Batch> batch;
  size_t item = 0;     // The first transfer of the run.
  uint64_t begin = 0;  // From its start.
  uint64_t length = 0;
  uint64_t total = 0;  // Of the run.

  // Has the run's direction and segment; its length is its own.
  TransferItem& transfer() const { return batch->items()[item]; }
  uint8_t* local() const { return transfer().local + begin; }
  uint64_t offset() const { return transfer().offset + begin; }
};

}  // namespace tandem::transfer
