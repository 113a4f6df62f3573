// Moves bytes between memory and files: through io_uring where the kernel allows it, else with
// threads that read and write. One queue, cut into parts of at most a mebibyte.
//
// A batch that ends early waits for its parts that are in progress: what the kernel has taken cannot
// be called back, and no byte of a buffer may change afterwards.
//
// Threads: any. Lock order: mutex_ is a leaf and never held over a system call.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transfer/batch.h"
#include "transfer/file.h"
#include "transfer/io_ring.h"

namespace tandem::transfer {

enum class FileBackend { kAuto, kIoUring, kThreads };

class FileIo {
 public:
  // A part failed: the batch must end with this.
  using OnFailure = std::function<void(const std::shared_ptr<Batch>&, Error)>;

  // Errors: kUnsupported (kIoUring, and the kernel refuses), kCapacity (threads).
  // `has_fault`: whether this part is to fail, for tests.
  static Result<std::unique_ptr<FileIo>> start(FileBackend backend, OnFailure on_failure,
                                               std::function<bool()> has_fault);
  // REQUIRES: every batch has ended.
  ~FileIo();

  void submit(Piece piece);
  // After it returns, no byte of the batch is moved any more. REQUIRES: the batch is not open.
  void drop(const Batch& batch);
  bool has_ring() const { return ring_ != nullptr; }
  // Why io_uring is not used; empty where it is, or was not wanted.
  const std::string& ring_refusal() const { return ring_refusal_; }

 private:
  struct Part {
    Piece piece;  // Exactly the part; shrinks as bytes move.
    int fd = -1;
    iovec iov{};
  };

  FileIo(OnFailure on_failure, std::function<bool()> has_fault)
      : on_failure_(std::move(on_failure)), has_fault_(std::move(has_fault)) {}
  bool take(std::unique_lock<std::mutex>& lock, Part* part);
  // Some bytes moved, or an error; true if the part has ended and is not to be continued.
  bool advance(Part& part, int64_t result);
  void end(const Part& part);
  void fail(const Part& part, int64_t result);
  void run_thread();
  void run_ring();

  const OnFailure on_failure_;
  const std::function<bool()> has_fault_;
  std::unique_ptr<IoRing> ring_;
  std::string ring_refusal_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::deque<Piece> queue_;            // GUARDED_BY(mutex_)
  std::vector<const Batch*> running_;  // GUARDED_BY(mutex_): batches of parts in progress
  std::map<const Batch*, Error> failures_;  // GUARDED_BY(mutex_): not told yet
  bool is_stopping_ = false;           // GUARDED_BY(mutex_)
  std::vector<std::thread> threads_;
};

}  // namespace tandem::transfer
