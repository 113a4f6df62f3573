// Memory that other processes of the same user can map: an anonymous memory file, as long as its
// reserved part (so that no touch fails) and sealed against shrinking (so that a truncation cannot
// kill a peer that maps it). Its owner may reserve it piece by piece: the file grows, the mappings
// have their full length from the start, and an access beyond the end of the file is refused, here
// and by peers. It has no name, so that a crash leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/wire/wire.h"

struct stat;

namespace tandem::transfer {

class SharedMemory {
 public:
  // Allocates zeroed, fully reserved memory. Errors: kConfig (0 bytes); kCapacity (the machine has
  // too little).
  static Result<std::shared_ptr<SharedMemory>> allocate(size_t size) {
    return allocate(size, size);
  }
  // Allocates memory of which only the first `reserved` bytes are reserved.
  static Result<std::shared_ptr<SharedMemory>> allocate(size_t size, size_t reserved);
  // Maps memory of a peer on this host. Errors: kPermissionDenied (another user, a hardened
  // kernel), kPeerLost (that process has ended), kCorruption (the file is not the one named).
  static Result<std::shared_ptr<SharedMemory>> map_peer(const Grant& grant);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint8_t* data() const { return data_; }
  // Size of the mapping. Touch only bytes that `is_reserved` confirms.
  size_t size() const { return size_; }
  // Reserves the first `end` bytes, permanently. Errors: kConfig (beyond the size); kCapacity (the
  // machine has too little; nothing has changed). REQUIRES: not a peer's memory. Any thread.
  Status reserve(size_t end);
  size_t reserved() const { return reserved_.load(std::memory_order_acquire); }
  // True if the first `end` bytes can be touched; asks the kernel whether a peer's file has grown.
  bool is_reserved(size_t end);
  int fd() const { return fd_; }
  uint64_t device() const { return device_; }
  uint64_t inode() const { return inode_; }

 private:
  SharedMemory(int fd, uint8_t* data, size_t size, size_t reserved, const struct stat& status);

  int fd_;
  Mutex mutex_;  // Of `reserve`.
  std::atomic<size_t> reserved_;
  uint8_t* data_;
  size_t size_;
  uint64_t device_;
  uint64_t inode_;
};

}  // namespace tandem::transfer
