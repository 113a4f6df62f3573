// The part of io_uring that reads and writes of files need, by raw system calls: one submitter, no
// registered buffers, vectored operations (which every kernel with io_uring has).
//
// Threads: one, the owner's; `wake` from any.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace tandem::transfer {

class IoRing {
 public:
  struct Completion {
    uint64_t tag;
    int result;  // Bytes, or -errno.
  };

  // `depth`: limit of operations in flight. Errors: kUnsupported (with the reason: no kernel
  // support, a seccomp filter, built without its header); kCapacity.
  static Result<std::unique_ptr<IoRing>> create(uint32_t depth);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // Queues one operation, which `submit` passes to the kernel. `iov` must live until its
  // completion. REQUIRES: fewer than `depth` in flight.
  void prepare(bool is_write, int fd, const iovec* iov, uint64_t offset, uint64_t tag);
  // Passes the queued operations to the kernel and waits for `num_awaited` completions, or a wake.
  // Errors: kInternal.
  Status submit(uint32_t num_awaited);
  // Returns when there is a completion to reap, or after the timeout. Errors: kInternal.
  Status wait(int timeout_ms);
  // Returns the next completion; false without one.
  bool reap(Completion* completion);
  void wake();

 private:
  struct Rings;
  explicit IoRing(std::unique_ptr<Rings> rings);
  void arm_wake();
  void push(uint8_t opcode, int fd, const iovec* iov, uint64_t offset, uint64_t tag);

  std::unique_ptr<Rings> rings_;
  uint32_t num_queued_ = 0;
  bool is_wake_armed_ = false;
};

}  // namespace tandem::transfer
