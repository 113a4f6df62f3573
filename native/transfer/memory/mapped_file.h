// A file that two processes of one user map: the buffer of a peer on this host is a piece of it, and
// is reached through a mapping of our own.
//
// Unlike the memory of allocate() it cannot be sealed, and it outlives its owner. So
// - a copy first makes its pages present (`reach`): a hole that cannot be filled, or an end that has
//   come nearer, is an error there and never SIGBUS. Only who truncates the file between that and
//   the copy, or pages that were present, can kill us: a process of the same user, which could do so
//   anyway;
// - who maps it to write holds a shared lock of the whole file (F_OFD_SETLK), from before its last
//   look at whether the owner lives until no byte can be written any more. The kernel drops it with
//   the process. An owner that comes after another, and alone has the file (by a lock of its own, which
//   ends with it), takes an exclusive lock as the proof that nobody writes by an old grant.
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

// Where a registered buffer lies in an open file. The descriptor is the caller's.
struct FileRange {
  int fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t offset = 0;
};

// Looks whether [data, data + length) is a shared mapping of the file from `offset` on. Errors:
// kConfig (it is not, or ends beyond the file); kPermissionDenied (not a file of our user alone).
Result<FileRange> check_file_range(int fd, uint64_t offset, const uint8_t* data, uint64_t length);

class MappedFile {
 public:
  // Maps all of the file that the grant names. Errors: kPermissionDenied (another user, a hardened
  // kernel); kPeerLost (the owner has ended); kCorruption (not the file that was named, too short,
  // others may write it); kConflict (somebody looks whether anybody writes to it); kCapacity.
  static Result<std::shared_ptr<MappedFile>> map_peer(const Grant& grant);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Where the file begins. Touch nothing that `reach` has not been called for.
  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  // REQUIRES: begin + length <= size(). Errors: kCapacity (the pages cannot be had). Any thread.
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

// The files of peers that are mapped here: each once, however many buffers of it are granted.
// Threads: any; the mutex is a leaf.
class MappedFiles {
 public:
  // Errors: see MappedFile::map_peer.
  Result<std::shared_ptr<MappedFile>> get(const Grant& grant);

 private:
  // Owner's pid and start time, device, inode, writable.
  using Key = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, bool>;

  std::shared_ptr<MappedFile> find(const Key& key, uint64_t size) const REQUIRES(mutex_);

  Mutex mutex_;
  std::map<Key, std::weak_ptr<MappedFile>> files_ GUARDED_BY(mutex_);
};

}  // namespace tandem::transfer
