// Reads ranges of files past the page cache, many at a time, into memory of its own.
//
// The reader owns the memory, so that a read that the disk delays still has a destination after its
// caller gave up; the caller must not reuse that part of the memory before the read ends. With
// io_uring the calling thread submits and reaps, so that no thread is woken; without io_uring,
// threads read. Files are opened as `File` does: where a file system refuses O_DIRECT, reads use
// the page cache.
//
// Threads: any, one call at a time is served; the lock is a leaf and is held while a call waits.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/threads/thread_annotations.h"
#include "transfer/files/file.h"
#include "transfer/files/file_io.h"
#include "transfer/files/io_ring.h"

namespace tandem::transfer {

class DirectReader {
 public:
  // Alignment of reads in file and memory, bytes.
  static constexpr uint64_t kAlignment = File::kAlignment;

  struct Options {
    uint64_t memory_bytes = 0;
    FileBackend backend = FileBackend::kAuto;
    uint32_t depth = 16;             // Parts that the kernel has at a time.
    uint64_t part_bytes = 512 << 10;  // Bytes of one operation; a multiple of kAlignment.
  };

  // Errors: kConfig (a part or depth of 0, or not aligned), kCapacity (memory, threads), kUnsupported
  // (kIoUring, and the kernel refuses).
  static Result<std::unique_ptr<DirectReader>> create(const Options& options);
  // Waits up to a second for running reads, then destroys the reader; memory of reads that the disk
  // still delays is leaked.
  static void stop(std::unique_ptr<DirectReader> reader);
  ~DirectReader();

  // Opens a file, and returns its number. With `may_change` its contents may be written while it is
  // read, by its owner, who does not read a range while it writes it; its length stays. Errors: as
  // File::open.
  Result<size_t> add_file(const std::string& path, bool may_change = false);
  // Returns the number of bytes that a read of a range writes at most; the range's own bytes begin
  // at offset % kAlignment.
  static uint64_t span_bytes(uint64_t offset, uint64_t length);
  // Begins to read a range to memory() + at, and returns the read's number. Errors: kNotFound (no
  // such file), kConfig (beyond the file's end or the memory, not aligned).
  Result<uint64_t> begin(size_t file, uint64_t offset, uint64_t length, uint64_t at);
  // Submits the begun reads, and reaps the ended ones. Errors: kInternal.
  Status poll();
  // Returns true if `finish` would not wait.
  bool is_done(uint64_t read);
  // Waits for a read, and forgets it. Errors: kCorruption (the file ends too soon, or was written
  // since it was added, unless it may change), kInternal (the disk fails), kNotFound (no such read), kDeadline (the read
  // continues, and can be waited for again).
  Status finish(uint64_t read, int timeout_ms);

  uint8_t* memory() const { return memory_.data(); }
  uint64_t memory_bytes() const { return memory_.size_bytes(); }
  bool has_ring() const { return ring_ != nullptr; }
  const std::string& ring_refusal() const { return ring_refusal_; }
  // Returns the reason why a file is not read past the page cache; empty if it is.
  Result<std::string> direct_refusal(size_t file);
  uint64_t bytes_read() const;

 private:
  struct Source {
    std::shared_ptr<File> file;
    struct timespec modified;
    bool may_change = false;
  };
  // A part of a read, from its submission to its end. After a short transfer it continues behind
  // it.
  struct Part {
    uint64_t read = 0;
    size_t file = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    uint64_t wanted_end = 0;  // Offset up to which bytes must be there; the file may end after it.
    uint8_t* target = nullptr;
    iovec iov{};
    int fd = -1;
  };
  struct Read {
    size_t file = 0;
    size_t parts_left = 0;
    Status status;
  };
  // The queue between the caller and the threads that read without a ring.
  struct Queue;

  DirectReader(const Options& options, AlignedBuffer memory);
  Status start_threads();
  Status pump() REQUIRES(mutex_);
  void hand_over(uint64_t key, Part& part) REQUIRES(mutex_);
  void collect() REQUIRES(mutex_);
  // Handles the result of a part's operation; returns true if the part has ended.
  bool advance(Part& part, int64_t result) REQUIRES(mutex_);
  void end_part(const Part& part, Status status) REQUIRES(mutex_);
  Status wait_some(int timeout_ms) REQUIRES(mutex_);
  Status check_unchanged(const Source& source) const;
  static void run_thread(std::shared_ptr<Queue> queue);

  const Options options_;
  const AlignedBuffer memory_;
  std::unique_ptr<IoRing> ring_;
  std::string ring_refusal_;
  std::shared_ptr<Queue> queue_;  // Outlives the reader while a thread is held up.
  std::vector<std::thread> threads_;
  mutable Mutex mutex_;
  std::vector<Source> sources_ GUARDED_BY(mutex_);
  std::deque<Part> waiting_ GUARDED_BY(mutex_);
  std::map<uint64_t, Part> in_flight_ GUARDED_BY(mutex_);
  std::map<uint64_t, Read> reads_ GUARDED_BY(mutex_);
  uint64_t next_key_ GUARDED_BY(mutex_) = 1;
  uint64_t next_read_ GUARDED_BY(mutex_) = 1;
  uint64_t bytes_read_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem::transfer
