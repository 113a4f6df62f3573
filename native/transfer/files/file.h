// A file as a segment: its bytes are the address space, from 0 to the length it had when opened.
//
// Opened with `wants_direct` it has a second descriptor with O_DIRECT, which takes the parts of a
// transfer whose offset and length are aligned; the page cache takes heads and tails. The two
// never touch one page in one transfer, and the kernel keeps them coherent between transfers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transfer/engine/batch.h"

namespace tandem::transfer {

struct FileOptions {
  std::string path;
  bool is_writable = false;
  // Makes the file of this many bytes, reserved on the disk, if it is not there; > 0. A file that is
  // there must have this length. 0: it must be there and has the length it has.
  uint64_t create_bytes = 0;
  bool wants_direct = false;
};

class File {
 public:
  // Offset, length and address (of a block of FileIo) of what O_DIRECT takes; covers every block size
  // in use.
  static constexpr uint64_t kAlignment = 4096;

  // Errors: kNotFound, kPermissionDenied, kConflict (another length), kCapacity (disk full, too
  // many files), kConfig (no regular file, no bytes).
  static Result<std::shared_ptr<File>> open(const FileOptions& options);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t length() const { return length_; }
  bool is_writable() const { return is_writable_; }
  // Whether aligned parts bypass the page cache, and else why not.
  bool is_direct() const { return direct_fd_ >= 0 && !is_direct_off_.load(); }
  std::string direct_refusal() const;
  // Errors: kConfig (beyond the end), kPermissionDenied (WRITE, opened for reading).
  Status check(Op op, uint64_t offset, uint64_t length) const;
  // Returns when all that was written is on the disk.
  Status sync() const;

  // What one system call should move of a range, and through which descriptor.
  struct Part {
    int fd;
    uint64_t length;
  };
  Part cut(uint64_t offset, uint64_t length, uint64_t most) const;
  // The descriptor that takes exactly this range.
  int descriptor(uint64_t offset, uint64_t length) const;
  // The one that goes through the page cache.
  int cached_descriptor() const { return fd_; }
  // The device refused an aligned part (a larger block size): from now on without O_DIRECT.
  void stop_direct() { is_direct_off_.store(true); }

 private:
  File(std::string path, int fd, uint64_t length, bool is_writable)
      : path_(std::move(path)), fd_(fd), length_(length), is_writable_(is_writable) {}

  const std::string path_;
  const int fd_;
  const uint64_t length_;
  const bool is_writable_;
  int direct_fd_ = -1;
  int direct_errno_ = 0;
  std::atomic<bool> is_direct_off_{false};
};

}  // namespace tandem::transfer
