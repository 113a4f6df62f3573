#include "transfer/file_io.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>

namespace tandem::transfer {
namespace {

// Large enough for the bandwidth of any disk at this depth, small enough that a cancelled batch
// waits for milliseconds.
constexpr uint64_t kPartBytes = 1 << 20;
constexpr uint32_t kRingDepth = 32;
constexpr int kNumThreads = 4;

}  // namespace

Result<std::unique_ptr<FileIo>> FileIo::start(FileBackend backend, OnFailure on_failure,
                                              std::function<bool()> has_fault) {
  std::unique_ptr<FileIo> io(new FileIo(std::move(on_failure), std::move(has_fault)));
  if (backend != FileBackend::kThreads) {
    Result<std::unique_ptr<IoRing>> ring = IoRing::create(kRingDepth);
    if (ring.is_ok())
      io->ring_ = std::move(ring.value());
    else if (backend == FileBackend::kIoUring)
      return ring.error();
    else
      io->ring_refusal_ = ring.error().what;
  }
  try {
    const int num_threads = io->ring_ ? 1 : kNumThreads;
    for (int i = 0; i < num_threads; ++i) {
      io->threads_.emplace_back([raw = io.get()] {
        if (raw->ring_)
          raw->run_ring();
        else
          raw->run_thread();
      });
      pthread_setname_np(io->threads_.back().native_handle(), "tandem-file");
    }
  } catch (const std::system_error& error) {
    return Error{Code::kCapacity, "transfer.file", std::string("no thread: ") + error.what(), ""};
  }
  return io;
}

FileIo::~FileIo() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  work_.notify_all();
  if (ring_) ring_->wake();
  for (std::thread& thread : threads_) thread.join();
}

void FileIo::submit(Piece piece) {
  {
    const std::lock_guard lock(mutex_);
    if (!piece.batch->is_open()) return;
    queue_.push_back(std::move(piece));
  }
  if (ring_)
    ring_->wake();
  else
    work_.notify_one();
}

void FileIo::drop(const Batch& batch) {
  std::unique_lock lock(mutex_);
  std::erase_if(queue_, [&](const Piece& piece) { return piece.batch.get() == &batch; });
  idle_.wait(lock, [&] {
    return std::find(running_.begin(), running_.end(), &batch) == running_.end();
  });
}

// REQUIRES: mutex_ held.
bool FileIo::take(std::unique_lock<std::mutex>&, Part* part) {
  if (queue_.empty()) return false;
  Piece& front = queue_.front();
  const File::Part cut =
      front.transfer().file->cut(front.local(), front.offset(), front.length, kPartBytes);
  part->piece = front;
  part->piece.length = cut.length;
  part->fd = cut.fd;
  front.begin += cut.length;
  front.length -= cut.length;
  running_.push_back(front.batch.get());
  if (front.length == 0) queue_.pop_front();
  part->iov = {part->piece.local(), part->piece.length};
  return true;
}

// The part is over. A failure is told when the batch's last part is: ending a batch waits for the
// others, and with io_uring it is this very thread that must see them end.
void FileIo::end(const Part& part) {
  const Batch* batch = part.piece.batch.get();
  std::optional<Error> failure;
  {
    const std::lock_guard lock(mutex_);
    running_.erase(std::find(running_.begin(), running_.end(), batch));
    const auto found = failures_.find(batch);
    if (found != failures_.end() &&
        std::find(running_.begin(), running_.end(), batch) == running_.end()) {
      failure = std::move(found->second);
      failures_.erase(found);
    }
  }
  idle_.notify_all();
  if (failure) on_failure_(part.piece.batch, std::move(*failure));
}

void FileIo::fail(const Part& part, int64_t result) {
  const TransferItem& item = part.piece.transfer();
  const std::string why =
      result == 0 ? "the file has become shorter"
                  : describe_errno(item.op == Op::kRead ? "read" : "write",
                                   static_cast<int>(-result));
  const std::lock_guard lock(mutex_);
  const Batch* batch = part.piece.batch.get();
  std::erase_if(queue_, [&](const Piece& piece) { return piece.batch.get() == batch; });
  failures_.try_emplace(batch, Error{result == -ENOSPC ? Code::kCapacity : Code::kInternal,
                                     "transfer.file", item.file->path() + ": " + why, ""});
}

bool FileIo::advance(Part& part, int64_t result) {
  Piece& piece = part.piece;
  File& file = *piece.transfer().file;
  const bool is_open = piece.batch->is_open();
  if (has_fault_()) result = -EIO;
  if (is_open && (result == -EINTR || result == -EAGAIN)) return false;
  if (is_open && result == -EINVAL && file.is_direct()) {
    file.stop_direct();
    part.fd = file.descriptor(piece.local(), piece.offset(), piece.length);
    return false;
  }
  if (result <= 0 || !is_open) {
    if (is_open) fail(part, result);
    end(part);
    return true;
  }
  Piece moved = piece;
  moved.length = std::min<uint64_t>(static_cast<uint64_t>(result), piece.length);
  piece.begin += moved.length;
  piece.length -= moved.length;
  const bool is_done = piece.length == 0;
  if (is_done) {
    end(part);
  } else {
    // A short transfer may have ended inside a block.
    part.fd = file.descriptor(piece.local(), piece.offset(), piece.length);
    part.iov = {piece.local(), piece.length};
  }
  moved.batch->add_done(moved, TransportKind::kFile);
  return is_done;
}

void FileIo::run_thread() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    Part part;
    if (!take(lock, &part)) {
      work_.wait(lock, [&] { return is_stopping_ || !queue_.empty(); });
      continue;
    }
    if (!queue_.empty()) work_.notify_one();
    lock.unlock();
    int64_t result;
    do {
      const off_t offset = static_cast<off_t>(part.piece.offset());
      const ssize_t moved = part.piece.transfer().op == Op::kRead
                                ? preadv(part.fd, &part.iov, 1, offset)
                                : pwritev(part.fd, &part.iov, 1, offset);
      result = moved < 0 ? -errno : moved;
    } while (!advance(part, result));
    lock.lock();
  }
}

void FileIo::run_ring() {
  std::map<uint64_t, Part> in_flight;
  uint64_t next_tag = 1;
  const auto prepare = [&](uint64_t tag, const Part& part) {
    ring_->prepare(part.piece.transfer().op == Op::kWrite, part.fd, &part.iov,
                   part.piece.offset(), tag);
  };
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (is_stopping_ && in_flight.empty()) return;
      while (in_flight.size() < kRingDepth) {
        Part part;
        if (!take(lock, &part)) break;
        const uint64_t tag = next_tag++;
        // A node of a map stays where it is, and with it the vector that the kernel reads.
        prepare(tag, in_flight.emplace(tag, std::move(part)).first->second);
      }
    }
    if (!ring_->submit_and_wait().is_ok()) {
      // The kernel is short of something. It may hold buffers already, so the batches cannot be
      // ended from here: try again, bounded in rate.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    IoRing::Completion completion;
    while (ring_->reap(&completion)) {
      const auto found = in_flight.find(completion.tag);
      if (found == in_flight.end()) continue;
      if (advance(found->second, completion.result))
        in_flight.erase(found);
      else
        prepare(completion.tag, found->second);
    }
  }
}

}  // namespace tandem::transfer
