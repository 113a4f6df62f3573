// A file as a segment whose addresses are the file's offsets, up to the length that it had when
// opened.
//
// A file that was opened with `wants_direct` has a second descriptor with O_DIRECT for the parts of
// a transfer whose offset and length are aligned; heads and tails use the page cache. The two never
// touch the same page in one transfer, and the kernel keeps them coherent between transfers.
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
  // Length of a file to create, reserved on the disk, if it does not exist; an existing one must
  // have this length. 0: the file must exist.
  uint64_t create_bytes = 0;
  bool wants_direct = false;
};

class File {
 public:
  // Alignment of offset, length and address (of a block of FileIo) for O_DIRECT; a multiple of
  // every block size in use.
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
  // True if aligned parts bypass the page cache; else `direct_refusal` has the reason.
  bool is_direct() const { return direct_fd_ >= 0 && !is_direct_off_.load(); }
  std::string direct_refusal() const;
  // Checks a range. Errors: kConfig (beyond the end), kPermissionDenied (WRITE, opened for
  // reading).
  Status check(Op op, uint64_t offset, uint64_t length) const;
  // Returns when all written bytes are on the disk.
  Status sync() const;

  // The part of a range for one system call, and the descriptor to use.
  struct Part {
    int fd;
    uint64_t length;
  };
  Part cut(uint64_t offset, uint64_t length, uint64_t most) const;
  // Returns the descriptor for exactly this range.
  int descriptor(uint64_t offset, uint64_t length) const;
  // The descriptor that uses the page cache.
  int cached_descriptor() const { return fd_; }
  // Stops using O_DIRECT, after the device refused an aligned part (it has a larger block size).
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
