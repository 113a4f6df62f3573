// Moves bytes between memory and files: by io_uring where the kernel allows it, else by threads
// that read and write. One queue, cut into parts of at most a mebibyte.
//
// Operations that the kernel has taken cannot be cancelled, and a disk may hang for any time. So
// the kernel never accesses the memory of a batch: parts go through the engine's own blocks, and a
// batch that ends early waits for a copy at most. A WRITE that is abandoned this way may still
// reach the file; until it has ended, no other operation is begun on its range. A READ from the
// page cache waits for no disk: it is copied straight to its destination, unless the page is
// evicted in the same moment.
//
// Threads: any. Lock order: mutex_ is a leaf and never held over a system call or a copy.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/threads/thread_annotations.h"
#include "transfer/engine/batch.h"
#include "transfer/wire/fault_plan.h"
#include "transfer/files/file.h"
#include "transfer/files/io_ring.h"

namespace tandem::transfer {

enum class FileBackend { kAuto, kIoUring, kThreads };

class FileIo {
 public:
  // Called when a part failed: the batch must end with this error.
  using OnFailure = std::function<void(const std::shared_ptr<Batch>&, Error)>;
  using Faults = std::function<std::shared_ptr<FaultPlan>()>;

  // Errors: kUnsupported (kIoUring, and the kernel refuses), kCapacity (threads). `faults`: returns
  // the plan of faults for tests, or null.
  static Result<std::unique_ptr<FileIo>> start(FileBackend backend, OnFailure on_failure,
                                               Faults faults);
  // Ends the threads. Those that a disk delays for more than a second are abandoned, and their
  // memory is leaked. REQUIRES: every batch has ended.
  static void stop(std::unique_ptr<FileIo> io);

  void submit(Piece piece);
  // Takes back all work of a batch. After the return no byte of it is moved any more. REQUIRES: the
  // batch is not open.
  void drop(const Batch& batch);
  bool has_ring() const { return ring_ != nullptr; }
  // The reason why io_uring is not used; empty if it is used or was not wanted.
  const std::string& ring_refusal() const { return ring_refusal_; }

 private:
  struct Part {
    Piece piece;  // Exactly the part; shrinks as bytes move.
    uint64_t key = 0;
    uint8_t* block = nullptr;
    int fd = -1;
    iovec iov{};  // What is left of it, in the block.
  };
  // A part that the kernel may still access.
  struct Taken {
    const Batch* batch;
    const File* file;
    uint64_t begin;
    uint64_t end;
    bool is_write;
    bool is_stale = false;  // Its batch has ended.
  };

  FileIo(OnFailure on_failure, Faults faults, AlignedBuffer memory, int num_blocks);
  bool take(Part* part) REQUIRES(mutex_);
  bool is_blocked(const Piece& piece) const REQUIRES(mutex_);
  // Copies a WRITE's bytes into its block. Returns false if the batch has ended, which ends the
  // part.
  bool load(Part& part);
  // Serves a READ as far as the page cache has its bytes; returns true if the part has ended.
  bool read_cached(Part& part);
  // Handles the bytes moved by an operation, or its error; returns true if the part has ended.
  bool advance(Part& part, int64_t result);
  // Counts bytes that are in their place; returns true if they were the last of the part.
  bool settle(Part& part, uint64_t num_bytes);
  void end(const Part& part);
  Error explain(const Part& part, int64_t result) const;
  // Returns true if the batch is open. Its end then waits for end_touch.
  bool begin_touch(const Batch& batch);
  void end_touch(const Batch& batch);
  Fault next_fault(const Part& part);
  void run_thread();
  void run_ring();

  const OnFailure on_failure_;
  const Faults faults_;
  const AlignedBuffer memory_;  // Of all blocks.
  std::unique_ptr<IoRing> ring_;
  std::string ring_refusal_;
  Mutex mutex_;
  CondVar work_;
  CondVar idle_;
  std::deque<Piece> queue_ GUARDED_BY(mutex_);
  std::vector<uint8_t*> free_blocks_ GUARDED_BY(mutex_);
  std::map<uint64_t, Taken> taken_ GUARDED_BY(mutex_);
  uint64_t next_key_ GUARDED_BY(mutex_) = 1;
  std::vector<const Batch*> touched_ GUARDED_BY(mutex_);  // Whose memory is being copied.
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  int num_running_ GUARDED_BY(mutex_) = 0;  // Threads.
  std::vector<std::thread> threads_;
};

}  // namespace tandem::transfer
