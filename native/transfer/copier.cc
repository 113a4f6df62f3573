#include "transfer/copier.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>

namespace tandem::transfer {
namespace {

// Small enough that a cancellation waits for some 50 us, large enough that the queue costs nothing.
constexpr uint64_t kChunkBytes = 512 << 10;
// Copied by the submitting thread: less than what waking another would cost.
constexpr uint64_t kInlineBytes = 128 << 10;

}  // namespace

Result<std::unique_ptr<Copier>> Copier::start(int num_threads, OnFailure on_failure) {
  std::unique_ptr<Copier> copier(new Copier(std::move(on_failure)));
  try {
    for (int i = 0; i < num_threads; ++i) {
      copier->threads_.emplace_back([raw = copier.get()] { raw->run(); });
      pthread_setname_np(copier->threads_.back().native_handle(), "tandem-copy");
    }
  } catch (const std::system_error& error) {
    return Error{Code::kCapacity, "transfer.start", std::string("no thread: ") + error.what(), ""};
  }
  return copier;
}

Copier::~Copier() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Copier::submit(Piece piece, std::shared_ptr<Mapping> mapping) {
  if (piece.length <= kInlineBytes) {
    {
      const std::lock_guard lock(mutex_);
      if (!piece.batch->is_open()) return;
      running_.push_back(piece.batch.get());
    }
    return copy_chunk({std::move(piece), std::move(mapping)});
  }
  const std::lock_guard lock(mutex_);
  if (!piece.batch->is_open()) return;
  tasks_.push_back({std::move(piece), std::move(mapping)});
  work_.notify_one();
}

// Takes a chunk off the first task. The lock is released while it is copied.
bool Copier::run_one(std::unique_lock<std::mutex>& lock) {
  if (tasks_.empty()) return false;
  Task task = tasks_.front();
  Piece& rest = tasks_.front().piece;
  task.piece.length = std::min(rest.length, kChunkBytes);
  rest.begin += task.piece.length;
  rest.length -= task.piece.length;
  if (rest.length == 0)
    tasks_.pop_front();
  else
    work_.notify_one();
  running_.push_back(task.piece.batch.get());
  lock.unlock();
  copy_chunk(task);
  lock.lock();
  return true;
}

void Copier::copy_chunk(const Task& task) {
  const Piece& piece = task.piece;
  const Status status = task.mapping->copy(piece.transfer().op, piece.local(), piece.offset(),
                                           piece.length);
  {
    const std::lock_guard lock(mutex_);
    running_.erase(std::find(running_.begin(), running_.end(), piece.batch.get()));
  }
  idle_.notify_all();
  if (!status.is_ok()) return on_failure_(piece, task.mapping->kind(), status.error());
  bytes_moved_[static_cast<size_t>(task.mapping->kind())].fetch_add(piece.length,
                                                                     std::memory_order_relaxed);
  piece.batch->add_done(piece, task.mapping->kind());
}

void Copier::help(const Batch& batch) {
  std::unique_lock lock(mutex_);
  while (!batch.is_finished() && run_one(lock)) {
  }
}

void Copier::drop(const Batch& batch) {
  std::unique_lock lock(mutex_);
  std::erase_if(tasks_, [&](const Task& task) { return task.piece.batch.get() == &batch; });
  idle_.wait(lock, [&] {
    return std::find(running_.begin(), running_.end(), &batch) == running_.end();
  });
}

void Copier::run() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (!run_one(lock)) work_.wait(lock, [&] { return is_stopping_ || !tasks_.empty(); });
  }
}

}  // namespace tandem::transfer
