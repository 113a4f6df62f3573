// Moves bytes between memory and files: through io_uring where the kernel allows it, else with
// threads that read and write. One queue, cut into parts of at most a mebibyte.
//
// What the kernel has taken cannot be called back, and a disk may hang for as long as it likes. So the
// kernel never sees the memory of a batch: parts go through blocks of ours, and a batch that ends early
// waits for a copy at most. A WRITE that is left behind so may still reach the file; until it has
// ended, nothing else is begun on its range. A READ of what the page cache has waits for no disk: it is
// a copy like any other, and goes straight to its place, unless that is evicted in the same moment.
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
  // A part failed: the batch must end with this.
  using OnFailure = std::function<void(const std::shared_ptr<Batch>&, Error)>;
  using Faults = std::function<std::shared_ptr<FaultPlan>()>;

  // Errors: kUnsupported (kIoUring, and the kernel refuses), kCapacity (threads).
  // `faults`: what is to go wrong, for tests; may return nothing.
  static Result<std::unique_ptr<FileIo>> start(FileBackend backend, OnFailure on_failure,
                                               Faults faults);
  // Ends the threads; those that a disk holds up for more than a second are left alone, with all that
  // they use. REQUIRES: every batch has ended.
  static void stop(std::unique_ptr<FileIo> io);

  void submit(Piece piece);
  // After it returns, no byte of the batch is moved any more. REQUIRES: the batch is not open.
  void drop(const Batch& batch);
  bool has_ring() const { return ring_ != nullptr; }
  // Why io_uring is not used; empty where it is, or was not wanted.
  const std::string& ring_refusal() const { return ring_refusal_; }

 private:
  struct Part {
    Piece piece;  // Exactly the part; shrinks as bytes move.
    uint64_t key = 0;
    uint8_t* block = nullptr;
    int fd = -1;
    iovec iov{};  // What is left of it, in the block.
  };
  // A part that the kernel may have.
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
  // A WRITE's bytes into its block. False: the batch has ended, and the part with it.
  bool load(Part& part);
  // A READ, as far as the page cache has it; true if the part has ended.
  bool read_cached(Part& part);
  // Some bytes moved, or an error; true if the part has ended and is not to be continued.
  bool advance(Part& part, int64_t result);
  // So many bytes are in their place; true if those were the last of the part.
  bool settle(Part& part, uint64_t num_bytes);
  void end(const Part& part);
  Error explain(const Part& part, int64_t result) const;
  // Whether the batch is open; if so it stays untouched by its end until end_touch.
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
