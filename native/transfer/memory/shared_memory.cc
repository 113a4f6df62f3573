#include "transfer/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

}  // namespace

Result<std::shared_ptr<SharedMemory>> SharedMemory::allocate(size_t size) {
  if (size == 0) return fail_allocate(Code::kConfig, "0 bytes: ask for at least one");
  if (size > size_t{1} << 46) return fail_allocate(Code::kCapacity, "more than any machine has");
  OwnedFd fd(memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return fail_allocate(Code::kCapacity, describe_errno("memfd_create", errno));
  const off_t length = static_cast<off_t>(size);
  if (fchmod(fd.get(), 0600) != 0 || ftruncate(fd.get(), length) != 0)
    return fail_allocate(Code::kCapacity, describe_errno("ftruncate", errno));
  int refused;
  do {
    refused = fallocate(fd.get(), 0, 0, length);
  } while (refused != 0 && errno == EINTR);
  if (refused != 0)
    return fail_allocate(Code::kCapacity,
                std::to_string(size) + " bytes: " + describe_errno("fallocate", errno));
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return fail_allocate(Code::kCapacity, describe_errno("fcntl(F_ADD_SEALS)", errno));
  struct stat status {};
  fstat(fd.get(), &status);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_allocate(Code::kCapacity, describe_errno("mmap", errno));
  return std::shared_ptr<SharedMemory>(new SharedMemory(
      fd.take(), static_cast<uint8_t*>(data), size, status.st_dev, status.st_ino));
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
  // The pid may have been given to another process between the grant and here.
  struct stat status {};
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (fstat(fd.get(), &status) != 0 || status.st_dev != grant.device ||
      status.st_ino != grant.inode || static_cast<uint64_t>(status.st_size) != grant.length ||
      (fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals)
    return fail_attach(Code::kCorruption, path + " is not the memory that the peer named");
  const int protection = PROT_READ | (grant.can_write ? PROT_WRITE : 0);
  void* data = mmap(nullptr, grant.length, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_attach(Code::kCapacity, describe_errno("mmap", errno));
  // The mapping keeps the file; the descriptor is not needed.
  return std::shared_ptr<SharedMemory>(new SharedMemory(-1, static_cast<uint8_t*>(data),
                                                        grant.length, status.st_dev,
                                                        status.st_ino));
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace tandem::transfer
