// Goal: memory is reached within its bounds and rights only, and stays while it is in use.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/idle_spin.h"
#include "base/test.h"
#include "transfer/process_id.h"
#include "transfer/registry.h"

namespace tandem::transfer {
namespace {

using Access = Registry::Access;

Grant grant_of(const SharedMemory& memory) {
  Grant grant;
  grant.process = read_own_process();
  grant.length = memory.size();
  grant.can_read = grant.can_write = true;
  grant.fd = memory.fd();
  grant.device = memory.device();
  grant.inode = memory.inode();
  return grant;
}

TEST(shared_memory_is_seen_through_another_mapping) {
  const auto memory = SharedMemory::allocate(100'000).value();
  CHECK_EQ(memory->data()[99'999], 0);
  const auto mapped = SharedMemory::map_peer(grant_of(*memory)).value();
  CHECK(mapped->data() != memory->data());
  std::memset(mapped->data(), 7, mapped->size());
  CHECK_EQ(memory->data()[99'999], 7);
  CHECK(ftruncate(memory->fd(), 1) != 0);  // Sealed: nobody can pull the pages away.
}

TEST(shared_memory_refuses_what_is_not_meant) {
  CHECK(SharedMemory::allocate(0).error().code == Code::kConfig);
  CHECK(SharedMemory::allocate(size_t{1} << 60).error().code == Code::kCapacity);
  const auto memory = SharedMemory::allocate(4096).value();
  Grant grant = grant_of(*memory);
  grant.inode += 1;
  CHECK(SharedMemory::map_peer(grant).error().code == Code::kCorruption);
  grant = grant_of(*memory);
  grant.length += 4096;
  CHECK(SharedMemory::map_peer(grant).error().code == Code::kCorruption);
  grant.fd = 1 << 20;
  CHECK(!SharedMemory::map_peer(grant).is_ok());
}

TEST(process_id_knows_the_living) {
  ProcessId own = read_own_process();
  CHECK(is_alive(own));
  CHECK(is_same_host(own, own) || own.host_id.empty());
  own.start_time += 1;  // The pid of another life.
  CHECK(!is_alive(own));
}

TEST(registry_checks_bounds_rights_and_generations) {
  Registry registry;
  uint8_t bytes[1000];
  const uint64_t a = registry.add({bytes, 1000, "a"}).value();
  BufferSpec readonly{bytes, 10, "b"};
  readonly.can_remote_write = false;
  const uint64_t b = registry.add(readonly).value();
  CHECK(registry.pin(a, 1000, Access::kRemoteWrite).is_ok());
  CHECK(registry.pin(a + 999, 1, Access::kRemoteRead).is_ok());
  CHECK(registry.pin(a, 1001, Access::kRemoteRead).error().code == Code::kConfig);
  CHECK(registry.pin(a + 1, UINT64_MAX, Access::kRemoteRead).error().code == Code::kConfig);
  CHECK(registry.pin(a + 1000, 1, Access::kRemoteRead).error().code == Code::kNotFound);
  CHECK(registry.pin(0, 1, Access::kRemoteRead).error().code == Code::kNotFound);
  CHECK(registry.pin(UINT64_MAX, 1, Access::kRemoteRead).error().code == Code::kNotFound);
  CHECK(registry.pin(b, 1, Access::kRemoteWrite).error().code == Code::kPermissionDenied);
  CHECK(registry.pin(b, 1, Access::kLocalWrite).is_ok());
  CHECK(registry.add({bytes, 1, "a"}).error().code == Code::kConflict);
  CHECK(registry.add({bytes, 0, ""}).error().code == Code::kConfig);
  CHECK(registry.close(a).is_ok());
  CHECK(registry.pin(a, 1, Access::kLocalRead).error().code == Code::kNotFound);
  CHECK(registry.wait_unpinned(a, now_ns()));
  registry.remove(a);
  const uint64_t again = registry.add({bytes, 1000, "a"}).value();
  CHECK(again > b);  // An offset is never given twice.
  CHECK(registry.pin(a, 1, Access::kLocalRead).error().code == Code::kNotFound);
  CHECK(registry.close(a).error().code == Code::kNotFound);
}

TEST(registry_close_waits_for_pins) {
  Registry registry;
  uint8_t bytes[10];
  const uint64_t base = registry.add({bytes, 10, ""}).value();
  auto pin = std::make_unique<Registry::Pin>(
      std::move(registry.pin(base, 10, Access::kLocalRead).value()));
  CHECK(registry.close(base).is_ok());
  CHECK(!registry.wait_unpinned(base, now_ns() + 1'000'000));
  std::atomic<bool> is_gone{false};
  std::thread waiter([&] {
    CHECK(registry.wait_unpinned(base, now_ns() + 10'000'000'000));
    CHECK(is_gone.load());
  });
  is_gone.store(true);
  pin.reset();
  waiter.join();
}

}  // namespace
}  // namespace tandem::transfer
