#include "transfer/engine/copier.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>

namespace tandem::transfer {
namespace {

// Small enough that a cancellation waits for some 50 us, large enough that the queue costs little.
constexpr uint64_t kChunkBytes = 512 << 10;
// Pieces up to this size are copied by the submitting thread, which takes less time than waking
// another.
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

void Copier::stop() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Copier::submit(std::vector<Piece> pieces, const std::shared_ptr<Mapping>& mapping) {
  for (size_t i = 0; i < pieces.size();) {
    // Short pieces of one batch are copied together, since taking the locks costs more than copying
    // 4 KiB.
    const size_t first = i;
    const auto& batch = pieces[first].batch;
    for (uint64_t total = 0; i < pieces.size() && pieces[i].batch == batch; ++i) {
      total += pieces[i].length;
      if (pieces[i].length > kInlineBytes || total > kChunkBytes) break;
    }
    const std::span<const Piece> now(&pieces[first], i - first);
    {
      const MutexLock lock(mutex_);
      if (!batch->is_open()) {
        i = std::max(i, first + 1);
        continue;
      }
      if (now.empty()) {
        tasks_.push_back({std::move(pieces[i++]), mapping});
        work_.notify_one();
        continue;
      }
      running_.push_back(batch.get());
    }
    copy_now(now, *mapping);
  }
}

// Copies one chunk of the first task.
bool Copier::run_one() {
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
  mutex_.unlock();
  copy_now({&task.piece, 1}, *task.mapping);
  mutex_.lock();
  return true;
}

void Copier::copy_now(std::span<const Piece> pieces, Mapping& mapping) {
  const std::shared_ptr<Batch> batch = pieces.front().batch;
  const TransportKind kind = mapping.kind();
  std::vector<std::pair<size_t, Error>> failures;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const Status status =
        mapping.copy(piece.transfer().op, piece.local(), piece.offset(), piece.length);
    if (!status.is_ok()) failures.emplace_back(i, status.error());
  }
  {
    const MutexLock lock(mutex_);
    running_.erase(std::find(running_.begin(), running_.end(), batch.get()));
  }
  idle_.notify_all();
  size_t begin = 0;
  for (auto& [i, error] : failures) {
    add_done(pieces.subspan(begin, i - begin), kind);
    on_failure_(pieces[i], kind, std::move(error));
    begin = i + 1;
  }
  add_done(pieces.subspan(begin), kind);
}

void Copier::add_done(std::span<const Piece> pieces, TransportKind kind) {
  if (pieces.empty()) return;
  uint64_t num_bytes = 0;
  for (const Piece& piece : pieces) num_bytes += piece.length;
  bytes_moved_[static_cast<size_t>(kind)].fetch_add(num_bytes, std::memory_order_relaxed);
  pieces.front().batch->add_done(pieces, kind);
}

void Copier::help(const Batch& batch) {
  MutexLock lock(mutex_);
  while (!batch.is_finished() && run_one()) {
  }
}

void Copier::drop(const Batch& batch) {
  MutexLock lock(mutex_);
  std::erase_if(tasks_, [&](const Task& task) { return task.piece.batch.get() == &batch; });
  idle_.wait(lock, [&]() REQUIRES(mutex_) {
    return std::find(running_.begin(), running_.end(), &batch) == running_.end();
  });
}

void Copier::run() {
  MutexLock lock(mutex_);
  while (!is_stopping_) {
    if (!run_one()) work_.wait(lock, [&]() REQUIRES(mutex_) { return is_stopping_ || !tasks_.empty(); });
  }
}

}  // namespace tandem::transfer
