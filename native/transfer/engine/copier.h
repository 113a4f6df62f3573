// Threads that copy for the transports without a network, one chunk at a time. A thread that waits
// for a batch helps, so that a single transfer needs no wake-up.
//
// Threads: any. Lock order: mutex_ is never held while copying or while calling the owner.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/engine/batch.h"
#include "transfer/memory/mapping.h"

namespace tandem::transfer {

class Copier {
 public:
  // Called when a path failed: the rest of the piece must use another transport.
  using OnFailure = std::function<void(Piece, TransportKind, Error)>;

  static Result<std::unique_ptr<Copier>> start(int num_threads, OnFailure on_failure);
  // REQUIRES: every batch has ended.
  ~Copier() { stop(); }
  // Ends the threads. Submitting and helping threads continue to copy. Must not be called by one of
  // the threads.
  void stop();

  // Copies short pieces at once on this thread, and queues long ones.
  void submit(std::vector<Piece> pieces, const std::shared_ptr<Mapping>& mapping);
  // Copies queued chunks until none is left or the batch is finished.
  void help(const Batch& batch);
  // Takes back all copies of a batch. After the return no byte of it is copied any more. REQUIRES:
  // the batch is not open.
  void drop(const Batch& batch);
  uint64_t bytes_moved(TransportKind kind) const {
    return bytes_moved_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
  }

 private:
  struct Task {
    Piece piece;
    std::shared_ptr<Mapping> mapping;
  };

  explicit Copier(OnFailure on_failure) : on_failure_(std::move(on_failure)) {}
  void run();
  // Copies one chunk, and releases the mutex meanwhile.
  bool run_one() REQUIRES(mutex_);
  // Copies pieces of one batch, which is in running_.
  void copy_now(std::span<const Piece> pieces, Mapping& mapping);
  void add_done(std::span<const Piece> pieces, TransportKind kind);

  const OnFailure on_failure_;
  Mutex mutex_;
  CondVar work_;
  CondVar idle_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  std::vector<const Batch*> running_ GUARDED_BY(mutex_);  // Batches of chunks in progress.
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  std::array<std::atomic<uint64_t>, kTransportNames.size()> bytes_moved_{};
  std::vector<std::thread> threads_;
};

}  // namespace tandem::transfer
