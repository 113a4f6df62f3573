#include "transfer/files/file_io.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

namespace tandem::transfer {
namespace {

// Large enough for any disk's bandwidth at this depth. Parts from the page cache are small enough
// that all blocks stay in a CPU cache, which is twice as fast.
constexpr uint64_t kPartBytes = 1 << 20;
constexpr uint64_t kCachedPartBytes = 256 << 10;
constexpr uint32_t kRingDepth = 32;
constexpr int kNumThreads = 4;
constexpr std::chrono::seconds kStopTimeout{1};

// True if a range is in the page cache; false if the kernel does not report that (before 6.5).
// RWF_NOWAIT must not be used for this: on a missing page it begins to read ahead, which may wait
// for a disk that hangs.
bool is_cached(int fd, uint64_t offset, uint64_t length) {
  struct {
    uint64_t offset, length;
  } range{offset, length};
  struct {
    uint64_t num_cached, num_dirty, num_writeback, num_evicted, num_recently_evicted;
  } found{};
  constexpr long kCachestat = 451;  // Of all architectures; older headers lack it.
  if (syscall(kCachestat, fd, &range, &found, 0) != 0) return false;
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return found.num_cached >= (offset + length + page - 1) / page - offset / page;
}

}  // namespace

FileIo::FileIo(OnFailure on_failure, Faults faults, AlignedBuffer memory, int num_blocks)
    : on_failure_(std::move(on_failure)), faults_(std::move(faults)), memory_(std::move(memory)) {
  for (int i = 0; i < num_blocks; ++i) free_blocks_.push_back(memory_.data() + i * kPartBytes);
}

Result<std::unique_ptr<FileIo>> FileIo::start(FileBackend backend, OnFailure on_failure,
                                              Faults faults) {
  std::unique_ptr<IoRing> ring;
  std::string refusal;
  if (backend != FileBackend::kThreads) {
    Result<std::unique_ptr<IoRing>> made = IoRing::create(kRingDepth);
    if (made.is_ok())
      ring = std::move(made.value());
    else if (backend == FileBackend::kIoUring)
      return made.error();
    else
      refusal = made.error().what;
  }
  const int num_blocks = ring ? static_cast<int>(kRingDepth) : kNumThreads;
  Result<AlignedBuffer> memory = AlignedBuffer::allocate(num_blocks * kPartBytes, {.hugepages = true, .numa_node = {}});
  if (!memory.is_ok()) return memory.error();
  std::unique_ptr<FileIo> io(new FileIo(std::move(on_failure), std::move(faults),
                                        std::move(memory.value()), num_blocks));
  io->ring_ = std::move(ring);
  io->ring_refusal_ = std::move(refusal);
  const int num_threads = io->ring_ ? 1 : kNumThreads;
  try {
    for (int i = 0; i < num_threads; ++i) {
      const MutexLock lock(io->mutex_);
      io->threads_.emplace_back([raw = io.get()] {
        if (raw->ring_)
          raw->run_ring();
        else
          raw->run_thread();
        const MutexLock lock(raw->mutex_);
        --raw->num_running_;
        raw->idle_.notify_all();
      });
      ++io->num_running_;
      pthread_setname_np(io->threads_.back().native_handle(), "tandem-file");
    }
  } catch (const std::system_error& error) {
    stop(std::move(io));
    return Error{Code::kCapacity, "transfer.file", std::string("no thread: ") + error.what(), ""};
  }
  return io;
}

void FileIo::stop(std::unique_ptr<FileIo> io) {
  MutexLock lock(io->mutex_);
  io->is_stopping_ = true;
  io->work_.notify_all();
  if (io->ring_) io->ring_->wake();
  const bool is_over =
      io->idle_.wait_for(lock, kStopTimeout, [&]() REQUIRES(io->mutex_) { return io->num_running_ == 0; });
  lock.unlock();
  for (std::thread& thread : io->threads_) {
    if (is_over)
      thread.join();
    else
      thread.detach();
  }
  // Leak the blocks, since the kernel may still write to them.
  if (!is_over) static_cast<void>(io.release());
}

void FileIo::submit(Piece piece) {
  {
    const MutexLock lock(mutex_);
    if (!piece.batch->is_open()) return;
    queue_.push_back(std::move(piece));
  }
  if (ring_)
    ring_->wake();
  else
    work_.notify_one();
}

void FileIo::drop(const Batch& batch) {
  MutexLock lock(mutex_);
  std::erase_if(queue_, [&](const Piece& piece) { return piece.batch.get() == &batch; });
  for (auto& [key, taken] : taken_) taken.is_stale |= taken.batch == &batch;
  idle_.wait(lock, [&]() REQUIRES(mutex_) {
    return std::find(touched_.begin(), touched_.end(), &batch) == touched_.end();
  });
}

bool FileIo::begin_touch(const Batch& batch) {
  const MutexLock lock(mutex_);
  // The end of a batch closes it before it calls `drop`, so that either this check or `drop` sees
  // the other.
  if (!batch.is_open()) return false;
  touched_.push_back(&batch);
  return true;
}

void FileIo::end_touch(const Batch& batch) {
  {
    const MutexLock lock(mutex_);
    touched_.erase(std::find(touched_.begin(), touched_.end(), &batch));
  }
  idle_.notify_all();
}

bool FileIo::is_blocked(const Piece& piece) const {
  const uint64_t begin = piece.offset();
  return std::any_of(taken_.begin(), taken_.end(), [&](const auto& item) {
    const Taken& taken = item.second;
    return taken.is_stale && taken.is_write && taken.file == piece.transfer().file &&
           taken.begin < begin + piece.length && begin < taken.end;
  });
}

bool FileIo::take(Part* part) {
  const auto next = std::find_if(queue_.begin(), queue_.end(),
                                 [&](const Piece& piece) REQUIRES(mutex_) {
                                   return !is_blocked(piece);
                                 });
  if (next == queue_.end() || free_blocks_.empty()) return false;
  const TransferItem& item = next->transfer();
  const File::Part cut = item.file->cut(
      next->offset(), next->length, item.file->is_direct() ? kPartBytes : kCachedPartBytes);
  part->piece = *next;
  part->piece.length = cut.length;
  part->fd = cut.fd;
  part->key = next_key_++;
  part->block = free_blocks_.back();
  part->iov = {part->block, cut.length};
  free_blocks_.pop_back();
  taken_.emplace(part->key,
                 Taken{next->batch.get(), item.file, next->offset(),
                       next->offset() + cut.length, item.op == Op::kWrite});
  next->begin += cut.length;
  next->length -= cut.length;
  if (next->length == 0) queue_.erase(next);
  return true;
}

bool FileIo::load(Part& part) {
  const Piece& piece = part.piece;
  if (piece.transfer().op == Op::kRead) return true;
  if (!begin_touch(*piece.batch)) {
    end(part);
    return false;
  }
  std::memcpy(part.block, piece.local(), piece.length);
  end_touch(*piece.batch);
  return true;
}

bool FileIo::read_cached(Part& part) {
  const Piece& piece = part.piece;
  const TransferItem& item = piece.transfer();
  // Aligned parts of a direct file do not use the page cache.
  if (item.op != Op::kRead || part.fd != item.file->cached_descriptor() ||
      !is_cached(part.fd, piece.offset(), piece.length))
    return false;
  if (!begin_touch(*piece.batch)) {
    end(part);
    return true;
  }
  // A fault plan applies to disk operations only.
  if (faults_()) {
    end_touch(*piece.batch);
    return false;
  }
  const iovec to{piece.local(), piece.length};
  const ssize_t got = preadv2(part.fd, &to, 1, static_cast<off_t>(piece.offset()), RWF_NOWAIT);
  end_touch(*piece.batch);
  // Leave missing pages and all errors to a call that may wait.
  return got > 0 && settle(part, static_cast<uint64_t>(got));
}

void FileIo::end(const Part& part) {
  bool was_stale;
  {
    const MutexLock lock(mutex_);
    const auto taken = taken_.find(part.key);
    was_stale = taken->second.is_stale;
    taken_.erase(taken);
    free_blocks_.push_back(part.block);
  }
  if (was_stale) work_.notify_all();  // Something may have waited for its range.
}

Error FileIo::explain(const Part& part, int64_t result) const {
  const TransferItem& item = part.piece.transfer();
  const std::string why =
      result == 0 ? "the file has become shorter"
                  : describe_errno(item.op == Op::kRead ? "read" : "write",
                                   static_cast<int>(-result));
  return {result == -ENOSPC ? Code::kCapacity : Code::kInternal, "transfer.file",
          item.file->path() + ": " + why, ""};
}

Fault FileIo::next_fault(const Part& part) {
  // A batch that has ended may outlive the owner of the fault plan.
  const std::shared_ptr<FaultPlan> plan = part.piece.batch->is_open() ? faults_() : nullptr;
  const Fault fault = plan ? plan->next() : Fault::kNone;
  // Simulates a disk that hangs.
  if (fault == Fault::kDelay)
    std::this_thread::sleep_for(std::chrono::nanoseconds(plan->delay_ns()));
  return fault;
}

bool FileIo::advance(Part& part, int64_t result) {
  Piece& piece = part.piece;
  const std::shared_ptr<Batch> batch = piece.batch;
  File& file = *piece.transfer().file;
  if (const Fault fault = next_fault(part); fault != Fault::kNone && fault != Fault::kDelay)
    result = -EIO;
  const bool is_open = batch->is_open();
  if (is_open && (result == -EINTR || result == -EAGAIN)) return false;
  if (is_open && result == -EINVAL && file.is_direct()) {
    file.stop_direct();
    part.fd = file.descriptor(piece.offset(), piece.length);
    return false;
  }
  if (result <= 0 || !is_open) {
    end(part);
    if (is_open) on_failure_(batch, explain(part, result));
    return true;
  }
  const uint64_t num_bytes = std::min<uint64_t>(static_cast<uint64_t>(result), piece.length);
  if (piece.transfer().op == Op::kRead) {
    if (!begin_touch(*batch)) {
      end(part);
      return true;
    }
    std::memcpy(piece.local(), part.iov.iov_base, num_bytes);
    end_touch(*batch);
  }
  return settle(part, num_bytes);
}

bool FileIo::settle(Part& part, uint64_t num_bytes) {
  Piece& piece = part.piece;
  const std::shared_ptr<Batch> batch = piece.batch;
  Piece moved = piece;
  moved.length = num_bytes;
  piece.begin += num_bytes;
  piece.length -= num_bytes;
  const bool is_done = piece.length == 0;
  if (is_done) {
    end(part);
  } else {
    // A short transfer may have ended inside a disk block, so that the rest may need the other
    // descriptor.
    part.fd = piece.transfer().file->descriptor(piece.offset(), piece.length);
    part.iov = {static_cast<uint8_t*>(part.iov.iov_base) + num_bytes, piece.length};
  }
  batch->add_done(moved, TransportKind::kFile);
  return is_done;
}

void FileIo::run_thread() {
  MutexLock lock(mutex_);
  while (!is_stopping_) {
    Part part;
    if (!take(&part)) {
      work_.wait(lock);
      continue;
    }
    if (!queue_.empty()) work_.notify_one();
    lock.unlock();
    if (load(part) && !read_cached(part)) {
      int64_t result;
      do {
        const off_t offset = static_cast<off_t>(part.piece.offset());
        const ssize_t moved = part.piece.transfer().op == Op::kRead
                                  ? preadv(part.fd, &part.iov, 1, offset)
                                  : pwritev(part.fd, &part.iov, 1, offset);
        result = moved < 0 ? -errno : moved;
      } while (!advance(part, result));
    }
    part = {};
    lock.lock();
  }
}

void FileIo::run_ring() {
  std::map<uint64_t, Part> in_flight;
  const auto prepare = [&](const Part& part) {
    ring_->prepare(part.piece.transfer().op == Op::kWrite, part.fd, &part.iov,
                   part.piece.offset(), part.key);
  };
  while (true) {
    // Parts that need no ring free their blocks at once, so that they do not delay those that do.
    bool has_more = true;
    for (uint32_t i = 0; i < kRingDepth && has_more; ++i) {
      Part part;
      {
        const MutexLock lock(mutex_);
        if (is_stopping_ && in_flight.empty()) return;
        has_more = take(&part);
      }
      const uint64_t key = part.key;
      // A map's node has a stable address, and so has the vector that the kernel reads.
      if (has_more && load(part) && !read_cached(part))
        prepare(in_flight.emplace(key, std::move(part)).first->second);
    }
    if (!ring_->submit(has_more ? 0 : 1).is_ok()) {
      // The kernel lacks resources, and may have taken blocks already: try again at a limited rate.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    IoRing::Completion completion;
    while (ring_->reap(&completion)) {
      const auto found = in_flight.find(completion.tag);
      if (found == in_flight.end()) continue;
      if (advance(found->second, completion.result))
        in_flight.erase(found);
      else
        prepare(found->second);
    }
  }
}

}  // namespace tandem::transfer
