// A file that two processes of one user map: the buffer of a peer on this host is a range of it,
// and is reached by a mapping in this process.
//
// Unlike the memory of allocate() the file cannot be sealed, and it outlives its owner. So
// - a copy first populates its pages (`reach`): a hole that cannot be filled, or a shortened file, is
//   an error there and never SIGBUS. Only a truncation of the file between that and the copy can kill
//   this process, and only a process of the same user can do that, which could kill it anyway;
// - a process that maps the file to write holds a shared lock of the whole file (F_OFD_SETLK), from
//   before its last check that the owner lives until no byte can be written any more. The kernel
//   drops the lock with the process. A new owner, which has the file alone by another lock, takes an
//   exclusive lock as the proof that nobody writes by an old grant.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

// Place of a registered buffer in an open file. The caller owns the descriptor.
struct FileRange {
  int fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t offset = 0;
};

// Checks that [data, data + length) is a shared mapping of the file from `offset` on. Errors:
// kConfig (it is not, or ends beyond the file); kPermissionDenied (the file is accessible to other
// users).
Result<FileRange> check_file_range(int fd, uint64_t offset, const uint8_t* data, uint64_t length);

class MappedFile {
 public:
  // Maps the whole file that the grant names. Errors: kPermissionDenied (another user, a hardened
  // kernel); kPeerLost (the owner has ended); kCorruption (another file than named, too short,
  // writable by others); kConflict (an owner is checking for writers); kCapacity.
  static Result<std::shared_ptr<MappedFile>> map_peer(const Grant& grant);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Beginning of the file. Touch only ranges that `reach` was called for.
  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  // Populates the pages of a range. REQUIRES: begin + length <= size(). Errors: kCapacity (the
  // machine lacks pages). Any thread.
  Status reach(uint64_t begin, uint64_t length);

 private:
  MappedFile(int fd, uint8_t* data, uint64_t size, bool is_writable);
  int populate(uint64_t begin, uint64_t end) const;
  bool is_present(uint64_t step) const;

  const int fd_;  // Holds the lock; -1 where the mapping is read-only.
  uint8_t* const data_;
  const uint64_t size_;
  const bool is_writable_;
  const uint64_t page_bytes_;
  std::vector<std::atomic<uint64_t>> present_;  // A bit for each step of the file.
};

// The peers' files that this process has mapped, each once, however many of its buffers are
// granted. Threads: any; the mutex is a leaf.
class MappedFiles {
 public:
  // Returns the mapping of a granted file. Errors: see MappedFile::map_peer.
  Result<std::shared_ptr<MappedFile>> get(const Grant& grant);

 private:
  // The owner's pid and start time, device, inode, writable.
  using Key = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, bool>;

  std::shared_ptr<MappedFile> find(const Key& key, uint64_t size) const REQUIRES(mutex_);

  Mutex mutex_;
  std::map<Key, std::weak_ptr<MappedFile>> files_ GUARDED_BY(mutex_);
};

}  // namespace tandem::transfer
