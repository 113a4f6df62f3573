// Access to a buffer without the network: in this process, by shared memory, or by the kernel
// (process_vm_readv / writev). One class for each way.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "base/status.h"
#include "transfer/engine/batch.h"
#include "transfer/memory/mapped_file.h"
#include "transfer/engine/registry.h"
#include "transfer/memory/transport_kind.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

// Threads: any. `revoke` waits for running copies and bars all later ones.
class Mapping {
 public:
  virtual ~Mapping() = default;
  virtual TransportKind kind() const = 0;
  // Copies between `local` and the segment's [offset, offset + length), in either direction;
  // complete on return. After a failure the caller may use another transport, which copies all
  // again.
  Status copy(Op op, uint8_t* local, uint64_t offset, uint64_t length);
  void revoke();

 protected:
  virtual Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) = 0;

 private:
  std::shared_mutex mutex_;
  std::atomic<bool> is_revoked_{false};
};

// Access to buffers of this engine itself.
std::shared_ptr<Mapping> make_local_mapping(Registry* registry);
// Errors: see SharedMemory::map_peer and MappedFile::map_peer; kUnsupported (neither can be mapped).
Result<std::shared_ptr<Mapping>> make_shm_mapping(const Grant& grant, MappedFiles& files);
// Reads the peer's cookie, to check that the kernel allows access and that the process is the one
// meant. Errors: kPermissionDenied (another user, ptrace hardening), kPeerLost.
Result<std::shared_ptr<Mapping>> make_cma_mapping(const Grant& grant);

}  // namespace tandem::transfer
