#include "transfer/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "transfer/memory/owned_fd.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

Error fail_allocate(Code code, std::string what) {
  return {code, "transfer.allocate", std::move(what), "nbytes"};
}

Error fail_attach(Code code, std::string what) {
  return {code, "transfer.map", std::move(what), ""};
}

// Reserves a file's pages. Returns zero, or an errno. The file grows to `end` only if all
// pages can be reserved.
int grow(int fd, size_t begin, size_t end) {
  int refused = 0;
  do {
    refused = fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  } while (refused != 0 && errno == EINTR);
  return refused == 0 ? 0 : errno;
}

}  // namespace

SharedMemory::SharedMemory(int fd, uint8_t* data, size_t size, size_t reserved,
                           const struct stat& status)
    : fd_(fd),
      reserved_(reserved),
      data_(data),
      size_(size),
      device_(status.st_dev),
      inode_(status.st_ino) {}

Result<std::shared_ptr<SharedMemory>> SharedMemory::allocate(size_t size, size_t reserved) {
  if (size == 0) return fail_allocate(Code::kConfig, "0 bytes: ask for at least one");
  if (size > size_t{1} << 46) return fail_allocate(Code::kCapacity, "more than any machine has");
  OwnedFd fd(memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return fail_allocate(Code::kCapacity, describe_errno("memfd_create", errno));
  if (fchmod(fd.get(), 0600) != 0)
    return fail_allocate(Code::kCapacity, describe_errno("fchmod", errno));
  // Seal only a fully reserved file against growing: others must stay growable for their owner, and
  // another process that grows one does no harm.
  const int seals = F_SEAL_SHRINK | F_SEAL_SEAL | (reserved < size ? 0 : F_SEAL_GROW);
  reserved = std::min(reserved, size);
  if (const int error = reserved == 0 ? 0 : grow(fd.get(), 0, reserved); error != 0)
    return fail_allocate(Code::kCapacity,
                         std::to_string(reserved) + " bytes: " + describe_errno("fallocate", error));
  if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0)
    return fail_allocate(Code::kCapacity, describe_errno("fcntl(F_ADD_SEALS)", errno));
  struct stat status {};
  fstat(fd.get(), &status);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_allocate(Code::kCapacity, describe_errno("mmap", errno));
  return std::shared_ptr<SharedMemory>(new SharedMemory(
      fd.take(), static_cast<uint8_t*>(data), size, reserved, status));
}

Result<std::shared_ptr<SharedMemory>> SharedMemory::map_peer(const Grant& grant) {
  const std::string path =
      "/proc/" + std::to_string(grant.process.pid) + "/fd/" + std::to_string(grant.fd);
  OwnedFd fd(open(path.c_str(), (grant.can_write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    const bool is_gone = errno == ENOENT && !is_alive(grant.process);
    return fail_attach(is_gone ? Code::kPeerLost : Code::kPermissionDenied,
                    describe_errno("opening " + path, errno));
  }
  // Check the file: the pid may have been given to another process since the grant.
  struct stat status {};
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (fstat(fd.get(), &status) != 0 || status.st_dev != grant.device ||
      status.st_ino != grant.inode || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return fail_attach(Code::kCorruption, path + " is not the memory that the peer named");
  // A file that may still grow has the length that its owner has reserved.
  const uint64_t length = static_cast<uint64_t>(status.st_size);
  if (length > grant.length || (length < grant.length && (seals & F_SEAL_GROW) != 0))
    return fail_attach(Code::kCorruption, path + " is not the memory that the peer named");
  const int protection = PROT_READ | (grant.can_write ? PROT_WRITE : 0);
  void* data = mmap(nullptr, grant.length, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_attach(Code::kCapacity, describe_errno("mmap", errno));
  const size_t size = static_cast<size_t>(status.st_size);
  // The mapping keeps the file open. The descriptor is kept only for a file that may grow, to read
  // its length.
  const int kept = size < grant.length ? fd.take() : -1;
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(kept, static_cast<uint8_t*>(data), grant.length, size, status));
}

Status SharedMemory::reserve(size_t end) {
  const MutexLock lock(mutex_);
  if (end > size_)
    return {Code::kConfig, "transfer.reserve",
            std::to_string(end) + " bytes of " + std::to_string(size_), "nbytes"};
  const size_t begin = reserved();
  if (end <= begin) return {};
  if (const int error = grow(fd_, begin, end); error != 0)
    return {Code::kCapacity, "transfer.reserve",
            std::to_string(end - begin) + " bytes: " + describe_errno("fallocate", error), "nbytes"};
  reserved_.store(end, std::memory_order_release);
  return {};
}

bool SharedMemory::is_reserved(size_t end) {
  if (end <= reserved()) return true;
  struct stat status {};
  if (fd_ < 0 || fstat(fd_, &status) != 0) return false;
  // The length is never less than before, as the file is sealed against shrinking.
  reserved_.store(static_cast<size_t>(status.st_size), std::memory_order_release);
  return end <= static_cast<size_t>(status.st_size);
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace tandem::transfer
