// A batch: transfers that are submitted together and waited for together.
//
// Transfers that continue each other without a gap at either end form a run. A run is moved as
// pieces (a range of it that one transport has) and slices (the part of a piece that a rail takes).
// The batch counts bytes. It ends once, by success when all have arrived, or by an error. An end by
// an error has two steps: `begin_end` bars new work, the engine takes every piece and slice back
// from the transports, and then `finish` wakes the waiters. So when a waiter sees the end, no byte
// of a local buffer is touched any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "transfer/engine/completion.h"
#include "transfer/engine/counters.h"
#include "transfer/engine/registry.h"
#include "transfer/memory/transport_kind.h"

namespace tandem::transfer {

class File;
class Peer;

enum class Op : uint8_t { kRead, kWrite };

struct Piece;

struct TransferItem {
  Op op = Op::kRead;
  uint8_t* local = nullptr;
  // Kept alive by the batch. If both are null, the segment is the engine's own.
  Peer* peer = nullptr;
  File* file = nullptr;
  TransferCounters* counters = nullptr;  // Of the peer, file or engine that moves it.
  size_t location = 0;                   // Of the local memory, see PeerOptions::penalties.
  uint64_t offset = 0;
  uint64_t length = 0;
  std::atomic<uint64_t> bytes_done{0};
};

class Batch {
 public:
  // Called with the end, before the waiters wake.
  using OnEnd = std::function<void(const Batch&, const Status&)>;
  // `only`: the one transport that may be used.
  Batch(size_t num_items, int64_t deadline_ns, std::optional<TransportKind> only = std::nullopt,
        OnEnd on_end = {});
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::vector<TransferItem>& items() { return items_; }
  // Keeps a local buffer registered until the end. REQUIRES: not started.
  void hold(Registry::Pin pin) { pins_.push_back(std::move(pin)); }
  // Keeps peers and files of the items alive as long as the batch. REQUIRES: not started.
  void hold(const std::shared_ptr<Peer>& peer, const std::shared_ptr<File>& file);
  // The peers of the items, each once.
  const std::vector<std::shared_ptr<Peer>>& peers() const { return peers_; }
  const std::vector<std::shared_ptr<File>>& files() const { return files_; }
  const std::optional<TransportKind>& only() const { return only_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  int64_t begin_ns() const { return begin_ns_; }

  // True if new work may be started for the batch.
  bool is_open() const { return !is_ending_.load(std::memory_order_acquire); }
  bool is_finished() const { return completion_.is_done(); }
  // REQUIRES: finished.
  const Status& status() const { return status_; }

  // Counts the bytes of all items; the batch ends at once without any. REQUIRES: all items are
  // filled in.
  void start();
  // Counts the bytes of arrived pieces of this batch, at least one.
  void add_done(std::span<const Piece> pieces, TransportKind kind);
  void add_done(const Piece& piece, TransportKind kind);
  // Returns true to the one caller that must take the work back and call `finish`.
  bool begin_end();
  void finish(Status status);
  // For waiting for `finish`.
  Completion& completion() { return completion_; }

  // Returns a descriptor that becomes readable when the batch is finished; owned by the batch.
  Result<int> completion_fd();

 private:
  std::vector<TransferItem> items_;
  std::vector<Registry::Pin> pins_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<File>> files_;
  const int64_t deadline_ns_;
  const std::optional<TransportKind> only_;
  const OnEnd on_end_;
  const int64_t begin_ns_;
  std::atomic<uint64_t> bytes_left_{0};
  std::atomic<bool> is_ending_{false};
  Completion completion_;
  Status status_;      // Written before the end.
  int event_fd_ = -1;  // While completion_ is held.
};

// A range of a run.
struct Piece {
  std::shared_ptr<Batch> batch;
  size_t item = 0;     // The first transfer of the run.
  uint64_t begin = 0;  // From its start.
  uint64_t length = 0;
  uint64_t total = 0;  // Of the run.

  // The first transfer of the run: it has the run's direction and segment. Its length is its own.
  TransferItem& transfer() const { return batch->items()[item]; }
  uint8_t* local() const { return transfer().local + begin; }
  uint64_t offset() const { return transfer().offset + begin; }
};

}  // namespace tandem::transfer
