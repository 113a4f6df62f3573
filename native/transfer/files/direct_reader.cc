#include "transfer/files/direct_reader.h"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace tandem::transfer {
namespace {

constexpr int kStopMs = 1000;
// Limit of reading threads without a ring: each handles one part, so that their number is the
// depth.
constexpr uint32_t kMaxReadThreads = 16;

uint64_t align_down(uint64_t value) { return value / DirectReader::kAlignment * DirectReader::kAlignment; }
uint64_t align_up(uint64_t value) { return align_down(value + DirectReader::kAlignment - 1); }

int64_t monotonic_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct DirectReader::Queue {
  struct Task {
    uint64_t key;
    int fd;
    iovec iov;
    uint64_t offset;
  };
  struct Done {
    uint64_t key;
    int64_t result;
  };
  Mutex mutex;  // Leaf.
  CondVar work;
  CondVar done;
  std::deque<Task> tasks GUARDED_BY(mutex);
  std::deque<Done> results GUARDED_BY(mutex);
  bool is_stopping GUARDED_BY(mutex) = false;
};

DirectReader::DirectReader(const Options& options, AlignedBuffer memory)
    : options_(options), memory_(std::move(memory)) {}

Result<std::unique_ptr<DirectReader>> DirectReader::create(const Options& options) {
  if (options.depth == 0 || options.part_bytes == 0 || options.part_bytes % kAlignment != 0)
    return Error{Code::kConfig, "transfer.create_reader",
                 std::to_string(options.depth) + " parts of " + std::to_string(options.part_bytes) +
                     " bytes: give at least one, of whole multiples of " +
                     std::to_string(kAlignment),
                 "part_bytes"};
  Result<AlignedBuffer> memory =
      AlignedBuffer::allocate(options.memory_bytes, {.hugepages = true, .numa_node = {}});
  if (!memory.is_ok()) return memory.error();
  std::unique_ptr<DirectReader> reader(new DirectReader(options, std::move(memory.value())));
  if (options.backend != FileBackend::kThreads) {
    Result<std::unique_ptr<IoRing>> ring = IoRing::create(options.depth);
    if (ring.is_ok()) {
      reader->ring_ = std::move(ring.value());
      return reader;
    }
    if (options.backend == FileBackend::kIoUring) return ring.error();
    reader->ring_refusal_ = ring.error().what;
  }
  Status status = reader->start_threads();
  if (!status.is_ok()) return status.error();
  return reader;
}

Status DirectReader::start_threads() {
  queue_ = std::make_shared<Queue>();
  try {
    for (uint32_t i = 0; i < std::min(options_.depth, kMaxReadThreads); ++i) {
      threads_.emplace_back(run_thread, queue_);
      pthread_setname_np(threads_.back().native_handle(), "tandem-read");
    }
  } catch (const std::system_error& error) {
    return {Code::kCapacity, "transfer.create_reader", std::string("no thread: ") + error.what(),
            ""};
  }
  return {};
}

void DirectReader::run_thread(std::shared_ptr<Queue> queue) {
  MutexLock lock(queue->mutex);
  while (!queue->is_stopping) {
    if (queue->tasks.empty()) {
      queue->work.wait(lock);
      continue;
    }
    const Queue::Task task = queue->tasks.front();
    queue->tasks.pop_front();
    lock.unlock();
    const ssize_t moved = preadv(task.fd, &task.iov, 1, static_cast<off_t>(task.offset));
    const int64_t result = moved < 0 ? -errno : moved;
    lock.lock();
    queue->results.push_back({task.key, result});
    queue->done.notify_all();
  }
}

DirectReader::~DirectReader() {
  if (queue_) {
    {
      const MutexLock lock(queue_->mutex);
      queue_->is_stopping = true;
      queue_->tasks.clear();
    }
    queue_->work.notify_all();
  }
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void DirectReader::stop(std::unique_ptr<DirectReader> reader) {
  bool is_over = false;
  {
    const MutexLock lock(reader->mutex_);
    reader->waiting_.clear();
    const int64_t end_ms = monotonic_ms() + kStopMs;
    while (!(is_over = reader->in_flight_.empty())) {
      const int64_t left_ms = end_ms - monotonic_ms();
      if (left_ms <= 0 || !reader->wait_some(static_cast<int>(left_ms)).is_ok()) break;
      reader->collect();
      reader->waiting_.clear();
    }
  }
  // Leak the memory, since the kernel may still write to it.
  if (!is_over) static_cast<void>(reader.release());
}

Result<size_t> DirectReader::add_file(const std::string& path, bool may_change) {
  Result<std::shared_ptr<File>> file = File::open({path, false, 0, true});
  if (!file.is_ok()) return file.error();
  struct stat info{};
  if (fstat(file.value()->cached_descriptor(), &info) != 0)
    return Error{Code::kInternal, "transfer.add_file", describe_errno("fstat", errno), "path"};
  const MutexLock lock(mutex_);
  sources_.push_back({file.value(), info.st_mtim, may_change});
  return sources_.size() - 1;
}

uint64_t DirectReader::span_bytes(uint64_t offset, uint64_t length) {
  return align_up(offset + length) - align_down(offset);
}

Result<uint64_t> DirectReader::begin(size_t file, uint64_t offset, uint64_t length, uint64_t at) {
  const MutexLock lock(mutex_);
  if (file >= sources_.size())
    return Error{Code::kNotFound, "transfer.read_direct",
                 "file " + std::to_string(file) + " of " + std::to_string(sources_.size()), "file"};
  Status status = sources_[file].file->check(Op::kRead, offset, length);
  if (!status.is_ok()) return status.error();
  const uint64_t span = span_bytes(offset, length);
  if (length == 0 || at % kAlignment != 0 || at > memory_bytes() || span > memory_bytes() - at)
    return Error{Code::kConfig, "transfer.read_direct",
                 std::to_string(span) + " bytes at " + std::to_string(at) + " of " +
                     std::to_string(memory_bytes()) + ": give a place that is aligned and fits",
                 "at"};
  const uint64_t id = next_read_++;
  Read& read = reads_[id];
  read.file = file;
  const uint64_t first = align_down(offset);
  for (uint64_t done = 0; done < span; done += options_.part_bytes) {
    const uint64_t part = std::min(options_.part_bytes, span - done);
    waiting_.push_back({
        .read = id,
        .file = file,
        .offset = first + done,
        .length = part,
        .wanted_end = std::min(first + done + part, offset + length),
        .target = memory() + at + done,
        .iov = {},
        .fd = -1});
    ++read.parts_left;
  }
  status = pump();
  if (!status.is_ok()) return status.error();
  return id;
}

void DirectReader::hand_over(uint64_t key, Part& part) {
  part.iov = {part.target, part.length};
  const File& file = *sources_[part.file].file;
  part.fd = file.descriptor(part.offset, part.length);
  if (ring_) {
    ring_->prepare(false, part.fd, &part.iov, part.offset, key);
    return;
  }
  const MutexLock lock(queue_->mutex);
  queue_->tasks.push_back({key, part.fd, part.iov, part.offset});
  queue_->work.notify_one();
}

Status DirectReader::pump() {
  while (!waiting_.empty() && in_flight_.size() < options_.depth) {
    const uint64_t key = next_key_++;
    // A map's node has a stable address, and so has the vector that the kernel reads.
    Part& part = in_flight_.emplace(key, std::move(waiting_.front())).first->second;
    waiting_.pop_front();
    hand_over(key, part);
  }
  return ring_ ? ring_->submit(0) : Status();
}

void DirectReader::collect() {
  const auto take = [&](uint64_t key, int64_t result) REQUIRES(mutex_) {
    const auto found = in_flight_.find(key);
    if (found == in_flight_.end()) return;
    if (advance(found->second, result))
      in_flight_.erase(found);
    else
      hand_over(key, found->second);
  };
  if (ring_) {
    IoRing::Completion completion;
    while (ring_->reap(&completion)) take(completion.tag, completion.result);
    return;
  }
  std::deque<Queue::Done> results;
  {
    const MutexLock lock(queue_->mutex);
    results.swap(queue_->results);
  }
  for (const Queue::Done& done : results) take(done.key, done.result);
}

bool DirectReader::advance(Part& part, int64_t result) {
  File& file = *sources_[part.file].file;
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result == -EINVAL && file.is_direct()) {
    file.stop_direct();
    return false;
  }
  if (result < 0) {
    end_part(part, {Code::kInternal, "transfer.read_direct",
                    file.path() + ": " + describe_errno("read", static_cast<int>(-result)), ""});
    return true;
  }
  const uint64_t moved = std::min(static_cast<uint64_t>(result), part.length);
  bytes_read_ += moved;
  part.offset += moved;
  part.target += moved;
  part.length -= moved;
  if (part.length == 0 || part.offset >= part.wanted_end) {
    end_part(part, {});
    return true;
  }
  if (moved > 0) return false;
  end_part(part, {Code::kCorruption, "transfer.read_direct",
                  file.path() + " ends at byte " + std::to_string(part.offset) + ", before " +
                      std::to_string(part.wanted_end),
                  ""});
  return true;
}

void DirectReader::end_part(const Part& part, Status status) {
  const auto found = reads_.find(part.read);
  if (found == reads_.end()) return;
  Read& read = found->second;
  --read.parts_left;
  if (read.status.is_ok()) read.status = std::move(status);
}

Status DirectReader::wait_some(int timeout_ms) {
  if (ring_) return ring_->wait(timeout_ms);
  MutexLock lock(queue_->mutex);
  queue_->done.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                        [&]() REQUIRES(queue_->mutex) { return !queue_->results.empty(); });
  return {};
}

Status DirectReader::poll() {
  const MutexLock lock(mutex_);
  collect();
  return pump();
}

bool DirectReader::is_done(uint64_t read) {
  const MutexLock lock(mutex_);
  collect();
  static_cast<void>(pump());
  const auto found = reads_.find(read);
  return found == reads_.end() || found->second.parts_left == 0;
}

Status DirectReader::check_unchanged(const Source& source) const {
  if (source.may_change) return {};
  struct stat info{};
  const File& file = *source.file;
  if (fstat(file.cached_descriptor(), &info) != 0)
    return {Code::kInternal, "transfer.read_direct", describe_errno("fstat", errno), ""};
  if (static_cast<uint64_t>(info.st_size) == file.length() &&
      info.st_mtim.tv_sec == source.modified.tv_sec &&
      info.st_mtim.tv_nsec == source.modified.tv_nsec)
    return {};
  return {Code::kCorruption, "transfer.read_direct",
          file.path() + " was written to since it was opened: start again", ""};
}

Status DirectReader::finish(uint64_t read, int timeout_ms) {
  const MutexLock lock(mutex_);
  const auto found = reads_.find(read);
  if (found == reads_.end())
    return {Code::kNotFound, "transfer.read_direct", "no read " + std::to_string(read), "read"};
  const int64_t end_ms = monotonic_ms() + timeout_ms;
  collect();
  while (found->second.parts_left > 0) {
    Status status = pump();
    const int64_t left_ms = end_ms - monotonic_ms();
    if (status.is_ok() && left_ms <= 0)
      status = {Code::kDeadline, "transfer.read_direct",
                sources_[found->second.file].file->path() + ": no answer of the disk within " +
                    std::to_string(timeout_ms) + " ms",
                ""};
    if (status.is_ok()) status = wait_some(static_cast<int>(left_ms));
    if (!status.is_ok()) return status;
    collect();
  }
  Status status = pump();
  if (status.is_ok()) status = std::move(found->second.status);
  if (status.is_ok()) status = check_unchanged(sources_[found->second.file]);
  reads_.erase(found);
  return status;
}

Result<std::string> DirectReader::direct_refusal(size_t file) {
  const MutexLock lock(mutex_);
  if (file >= sources_.size())
    return Error{Code::kNotFound, "transfer.read_direct", "no such file", "file"};
  return sources_[file].file->direct_refusal();
}

uint64_t DirectReader::bytes_read() const {
  const MutexLock lock(mutex_);
  return bytes_read_;
}

}  // namespace tandem::transfer
