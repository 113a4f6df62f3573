#include "transfer/memory/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/pages.h"
#include "transfer/memory/owned_fd.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

// Bytes that are populated at once around a first touch: neighbours of a small value cost less now
// than by a call each later, and no more memory than this is populated without need.
constexpr uint64_t kStepBytes = 64 << 10;

Error fail_range(Code code, std::string what) {
  return {code, "transfer.register", std::move(what), "file"};
}

Error fail_map(Code code, std::string what) { return {code, "transfer.map", std::move(what), ""}; }

bool is_ours_alone(const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
         (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::string read_path(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t size = readlink(link.c_str(), path, sizeof path);
  return size > 0 ? std::string(path, static_cast<size_t>(size)) : std::string();
}

// Checks in /proc/self/maps that the whole range is a shared mapping of that file at these offsets.
bool is_mapped(int fd, uint64_t inode, uint64_t offset, uint64_t begin, uint64_t end) {
  const std::string path = read_path(fd);
  std::ifstream maps("/proc/self/maps");
  std::string line;
  uint64_t at = begin;
  while (at < end && std::getline(maps, line)) {
    uint64_t first = 0, last = 0, file_offset = 0, file_inode = 0;
    char rights[5] = {};
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*x:%*x %" SCNu64 " %n",
                    &first, &last, rights, &file_offset, &file_inode, &path_at) != 5)
      return false;
    if (last <= at) continue;
    // overlayfs lists the inode of the lower layer.
    const bool is_it = file_inode == inode ||
                       (!path.empty() && line.compare(static_cast<size_t>(path_at),
                                                      std::string::npos, path) == 0);
    if (first > at || rights[3] != 's' || !is_it ||
        file_offset + (at - first) != offset + (at - begin))
      return false;
    at = last;
  }
  return at >= end;
}

Status lock_shared(int fd) {
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return {};
  return fail_map(Code::kConflict, describe_errno("fcntl(F_OFD_SETLK)", errno));
}

}  // namespace

Result<FileRange> check_file_range(int fd, uint64_t offset, const uint8_t* data, uint64_t length) {
  struct stat status {};
  if (fstat(fd, &status) != 0)
    return fail_range(Code::kConfig, describe_errno("fstat", errno));
  if (!is_ours_alone(status))
    return fail_range(Code::kPermissionDenied,
                      "peers map files of our user alone: chmod it to 0600");
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  if (offset > size || length > size - offset)
    return fail_range(Code::kConfig, std::to_string(length) + " bytes at " +
                                         std::to_string(offset) + ": the file has " +
                                         std::to_string(size));
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  if (!is_mapped(fd, status.st_ino, offset, begin, begin + length))
    return fail_range(Code::kConfig, "the buffer is no shared mapping of the file at offset " +
                                         std::to_string(offset));
  return FileRange{fd, status.st_dev, status.st_ino, offset};
}

Result<std::shared_ptr<MappedFile>> MappedFile::map_peer(const Grant& grant) {
  const std::string path =
      "/proc/" + std::to_string(grant.process.pid) + "/fd/" + std::to_string(grant.fd);
  OwnedFd fd(open(path.c_str(), (grant.can_write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK |
                                   O_NOCTTY));
  if (fd.get() < 0) {
    const bool is_gone = errno == ENOENT && !is_alive(grant.process);
    return fail_map(is_gone ? Code::kPeerLost : Code::kPermissionDenied,
                    describe_errno("opening " + path, errno));
  }
  const auto is_named = [&grant](const struct stat& status) {
    return status.st_dev == grant.device && status.st_ino == grant.inode;
  };
  struct stat status {};
  if (fstat(fd.get(), &status) != 0 || !is_named(status))
    return fail_map(Code::kCorruption, path + " is not the file that the peer named");
  if (status.st_uid != geteuid())
    return fail_map(Code::kPermissionDenied, path + " belongs to another user");
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  if (!is_ours_alone(status) || grant.file_offset > size ||
      grant.length > size - grant.file_offset)
    return fail_map(Code::kCorruption, path + " is no file of " +
                                           std::to_string(grant.file_offset + grant.length) +
                                           " bytes that others cannot write");
  if (grant.can_write) {
    if (Status locked = lock_shared(fd.get()); !locked.is_ok()) return locked.error();
  }
  // Checked after the lock: the owner that still has the file open has no successor yet, and a
  // later one will see the lock.
  struct stat again {};
  if (stat(path.c_str(), &again) != 0 || !is_named(again) || !is_alive(grant.process))
    return fail_map(Code::kPeerLost, "the process that granted " + path + " has ended");
  const int protection = PROT_READ | (grant.can_write ? PROT_WRITE : 0);
  void* data = mmap(nullptr, size, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_map(Code::kCapacity, describe_errno("mmap", errno));
  // A forked child has no engine that could use the mapping. If the kernel refuses this, the child
  // keeps it.
  madvise(data, size, MADV_DONTFORK);
  return std::shared_ptr<MappedFile>(new MappedFile(grant.can_write ? fd.take() : -1,
                                                    static_cast<uint8_t*>(data), size,
                                                    grant.can_write));
}

MappedFile::MappedFile(int fd, uint8_t* data, uint64_t size, bool is_writable)
    : fd_(fd),
      data_(data),
      size_(size),
      is_writable_(is_writable),
      page_bytes_(static_cast<uint64_t>(sysconf(_SC_PAGESIZE))),
      present_((size + 64 * kStepBytes - 1) / (64 * kStepBytes)) {}

MappedFile::~MappedFile() {
  munmap(data_, size_);
  if (fd_ >= 0) close(fd_);  // And with it the lock: last.
}

bool MappedFile::is_present(uint64_t step) const {
  return present_[step / 64].load(std::memory_order_relaxed) >> (step % 64) & 1;
}

// Returns zero, or an errno.
int MappedFile::populate(uint64_t begin, uint64_t end) const {
  return populate_pages(data_ + begin, end - begin, is_writable_);
}

Status MappedFile::reach(uint64_t begin, uint64_t length) {
  const uint64_t end_step = (begin + length + kStepBytes - 1) / kStepBytes;
  for (uint64_t step = begin / kStepBytes, next = 0; step < end_step; step = next) {
    next = step + 1;
    if (is_present(step)) continue;
    while (next < end_step && !is_present(next)) ++next;
    const uint64_t first = step * kStepBytes, last = std::min(next * kStepBytes, size_);
    int refused = populate(first, last);
    // Kernels before 5.14 lack this call; there a page is populated by its first touch.
    if (refused == 0 || refused == EINVAL) {
      for (; step < next; ++step)
        present_[step / 64].fetch_or(uint64_t{1} << (step % 64), std::memory_order_relaxed);
      continue;
    }
    // The wanted range may be available while the rest of the step has a hole.
    refused = populate(std::max(first, begin / page_bytes_ * page_bytes_),
                       std::min(last, begin + length));
    if (refused != 0)
      return fail_map(Code::kCapacity, describe_errno("madvise(MADV_POPULATE)", refused) +
                                           ": the file was cut, or its file system is full");
  }
  return {};
}

std::shared_ptr<MappedFile> MappedFiles::find(const Key& key, uint64_t size) const {
  const auto found = files_.find(key);
  std::shared_ptr<MappedFile> file = found == files_.end() ? nullptr : found->second.lock();
  return file && file->size() >= size ? file : nullptr;
}

Result<std::shared_ptr<MappedFile>> MappedFiles::get(const Grant& grant) {
  const MutexLock lock(mutex_);
  std::erase_if(files_, [](const auto& item) { return item.second.expired(); });
  const uint64_t size = grant.file_offset + grant.length;
  Key key{grant.process.pid, grant.process.start_time, grant.device, grant.inode, true};
  std::shared_ptr<MappedFile> file = find(key, size);
  if (!file && !grant.can_write) {
    std::get<bool>(key) = false;
    file = find(key, size);
  }
  if (file) return file;
  Result<std::shared_ptr<MappedFile>> made = MappedFile::map_peer(grant);
  if (made.is_ok()) files_[key] = made.value();
  return made;
}

}  // namespace tandem::transfer
