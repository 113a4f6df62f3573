// The threads that copy for the transports without a network, a chunk at a time. Whoever waits for
// a batch helps, so that a lone transfer needs no wake-up.
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
  // A path failed: the piece (what is left of it) must go elsewhere.
  using OnFailure = std::function<void(Piece, TransportKind, Error)>;

  static Result<std::unique_ptr<Copier>> start(int num_threads, OnFailure on_failure);
  // REQUIRES: every batch has ended.
  ~Copier() { stop(); }
  // Ends the threads; submitting and helping threads go on copying. Not from one of them.
  void stop();

  // Copies short pieces at once, on this thread; queues long ones.
  void submit(std::vector<Piece> pieces, const std::shared_ptr<Mapping>& mapping);
  // Copies queued chunks until there are none or the batch is finished.
  void help(const Batch& batch);
  // After it returns, no byte of the batch is copied any more. REQUIRES: the batch is not open.
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
  // The mutex is let go of while it copies.
  bool run_one() REQUIRES(mutex_);
  // Pieces of one batch that is in running_.
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
