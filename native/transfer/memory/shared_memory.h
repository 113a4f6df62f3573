// Memory that other processes of the same user can map: an anonymous memory file, reserved in full
// when it is made (so that no touch fails later) and sealed against resizing (so that a peer that
// maps it cannot be killed by a truncation). It has no name, so nothing is left behind by a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

class SharedMemory {
 public:
  // Zeroed. Errors: kConfig (0 bytes); kCapacity (the machine has not that much).
  static Result<std::shared_ptr<SharedMemory>> allocate(size_t size);
  // Maps memory of a peer on this host. Errors: kPermissionDenied (another user, a hardened
  // kernel), kPeerLost (that process has ended), kCorruption (the file is not the one named).
  static Result<std::shared_ptr<SharedMemory>> map_peer(const Grant& grant);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_; }
  uint64_t device() const { return device_; }
  uint64_t inode() const { return inode_; }

 private:
  SharedMemory(int fd, uint8_t* data, size_t size, uint64_t device, uint64_t inode)
      : fd_(fd), data_(data), size_(size), device_(device), inode_(inode) {}

  int fd_;
  uint8_t* data_;
  size_t size_;
  uint64_t device_;
  uint64_t inode_;
};

}  // namespace tandem::transfer
