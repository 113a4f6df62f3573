#include "transfer/memory/mapping.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "transfer/memory/shared_memory.h"

namespace tandem::transfer {
namespace {

Status check_range(const Grant& grant, Op op, uint64_t offset, uint64_t length) {
  if (offset < grant.base || length > grant.length ||
      offset - grant.base > grant.length - length)
    return {Code::kConfig, "transfer.access",
            "offset " + std::to_string(offset) + ", " + std::to_string(length) +
                " bytes: beyond the end of the buffer", "length"};
  if (op == Op::kRead ? !grant.can_read : !grant.can_write)
    return {Code::kPermissionDenied, "transfer.access", "the buffer is registered without this right",
            "offset"};
  return {};
}

// The ranges may overlap: always possible within one process, and between two that map the same
// file.
Status move(Op op, uint8_t* local, uint8_t* far, uint64_t length) {
  if (op == Op::kRead)
    std::memmove(local, far, length);
  else
    std::memmove(far, local, length);
  return {};
}

class LocalMapping : public Mapping {
 public:
  explicit LocalMapping(Registry* registry) : registry_(registry) {}
  TransportKind kind() const override { return TransportKind::kLocal; }

 protected:
  Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) override {
    const auto access =
        op == Op::kRead ? Registry::Access::kRemoteRead : Registry::Access::kRemoteWrite;
    Result<Registry::Pin> pin = registry_->pin(offset, length, access);
    if (!pin.is_ok()) return pin.error();
    const Registry::Entry& entry = pin.value().entry();
    return move(op, local, entry.spec.data + (offset - entry.base), length);
  }

 private:
  Registry* const registry_;
};

class ShmMapping : public Mapping {
 public:
  ShmMapping(const Grant& grant, std::shared_ptr<SharedMemory> memory)
      : grant_(grant), memory_(std::move(memory)) {}
  TransportKind kind() const override { return TransportKind::kShm; }

 protected:
  Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) override {
    if (Status status = check_range(grant_, op, offset, length); !status.is_ok()) return status;
    const uint64_t begin = offset - grant_.base;
    if (!memory_->is_reserved(begin + length))
      return {Code::kConfig, "transfer.access",
              "offset " + std::to_string(offset) + ", " + std::to_string(length) +
                  " bytes: the peer has not reserved them", "offset"};
    return move(op, local, memory_->data() + begin, length);
  }

 private:
  const Grant grant_;
  const std::shared_ptr<SharedMemory> memory_;
};

class FileMapping : public Mapping {
 public:
  FileMapping(const Grant& grant, std::shared_ptr<MappedFile> file)
      : grant_(grant), file_(std::move(file)) {}
  TransportKind kind() const override { return TransportKind::kShm; }

 protected:
  Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) override {
    if (Status status = check_range(grant_, op, offset, length); !status.is_ok()) return status;
    const uint64_t begin = grant_.file_offset + (offset - grant_.base);
    if (Status status = file_->reach(begin, length); !status.is_ok()) return status;
    return move(op, local, file_->data() + begin, length);
  }

 private:
  const Grant grant_;
  const std::shared_ptr<MappedFile> file_;
};

class CmaMapping : public Mapping {
 public:
  explicit CmaMapping(const Grant& grant) : grant_(grant) {}
  TransportKind kind() const override { return TransportKind::kCma; }

  // Checks that the process is still the one meant, since its pid may belong to another now. Takes
  // a few hundred nanoseconds, so it is done before each copy. The remaining window is shorter than
  // any reuse of a pid.
  Status probe() const {
    char cookie[64];
    if (grant_.cookie.empty() || grant_.cookie.size() > sizeof cookie)
      return {Code::kCorruption, "transfer.cma", "the peer gave no cookie", ""};
    iovec near{cookie, grant_.cookie.size()};
    iovec far{reinterpret_cast<void*>(grant_.cookie_address), grant_.cookie.size()};
    const ssize_t got =
        process_vm_readv(static_cast<pid_t>(grant_.process.pid), &near, 1, &far, 1, 0);
    if (got < 0 && (errno == ESRCH || errno == EFAULT))
      return {Code::kPeerLost, "transfer.cma", describe_errno("process_vm_readv", errno), ""};
    if (got < 0)
      return {Code::kPermissionDenied, "transfer.cma",
              describe_errno("process_vm_readv", errno) +
                  ": same user and kernel.yama.ptrace_scope = 0 are needed", ""};
    if (std::string_view(cookie, static_cast<size_t>(got)) != grant_.cookie)
      return {Code::kPeerLost, "transfer.cma", "the pid belongs to another process now", ""};
    return {};
  }

 protected:
  Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) override {
    if (Status status = check_range(grant_, op, offset, length); !status.is_ok()) return status;
    if (Status status = probe(); !status.is_ok()) return status;
    const uint64_t far_begin = grant_.address + (offset - grant_.base);
    for (uint64_t done = 0; done < length;) {
      iovec near{local + done, length - done};
      iovec far{reinterpret_cast<void*>(far_begin + done), length - done};
      const pid_t pid = static_cast<pid_t>(grant_.process.pid);
      const ssize_t moved = op == Op::kRead ? process_vm_readv(pid, &near, 1, &far, 1, 0)
                                            : process_vm_writev(pid, &near, 1, &far, 1, 0);
      if (moved <= 0)
        return {Code::kPeerLost, "transfer.cma", describe_errno("process_vm", errno), ""};
      done += static_cast<uint64_t>(moved);
    }
    return {};
  }

 private:
  const Grant grant_;
};

}  // namespace

Status Mapping::copy(Op op, uint8_t* local, uint64_t offset, uint64_t length) {
  const Status revoked(Code::kNotFound, "transfer.access", "the peer took the buffer back", "");
  // Check before locking, so that a stream of readers cannot keep `revoke` waiting.
  if (is_revoked_.load(std::memory_order_acquire)) return revoked;
  const std::shared_lock lock(mutex_);
  if (is_revoked_.load(std::memory_order_acquire)) return revoked;
  return copy_held(op, local, offset, length);
}

void Mapping::revoke() {
  is_revoked_.store(true, std::memory_order_release);
  const std::unique_lock lock(mutex_);
}

std::shared_ptr<Mapping> make_local_mapping(Registry* registry) {
  return std::make_shared<LocalMapping>(registry);
}

Result<std::shared_ptr<Mapping>> make_shm_mapping(const Grant& grant, MappedFiles& files) {
  if (grant.fd < 0)
    return Error{Code::kUnsupported, "transfer.shm",
                 "the buffer is neither from allocate() nor of a file: it cannot be mapped", ""};
  if (!grant.is_sealed) {
    Result<std::shared_ptr<MappedFile>> file = files.get(grant);
    if (!file.is_ok()) return file.error();
    return std::shared_ptr<Mapping>(std::make_shared<FileMapping>(grant, file.value()));
  }
  Result<std::shared_ptr<SharedMemory>> memory = SharedMemory::map_peer(grant);
  if (!memory.is_ok()) return memory.error();
  return std::shared_ptr<Mapping>(std::make_shared<ShmMapping>(grant, memory.value()));
}

Result<std::shared_ptr<Mapping>> make_cma_mapping(const Grant& grant) {
  auto mapping = std::make_shared<CmaMapping>(grant);
  if (Status status = mapping->probe(); !status.is_ok()) return status.error();
  return std::shared_ptr<Mapping>(std::move(mapping));
}

}  // namespace tandem::transfer
