// Goal: memory is accessed only within its bounds and rights, and stays in place while it is in
// use.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/threads/idle_spin.h"
#include "base/test.h"
#include "transfer/memory/mapped_file.h"
#include "transfer/memory/mapping.h"
#include "transfer/memory/process_id.h"
#include "transfer/engine/registry.h"

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

TEST(shared_memory_is_reached_as_far_as_it_is_reserved) {
  constexpr size_t kPart = 64 << 10;
  const auto memory = SharedMemory::allocate(4 * kPart, kPart).value();
  struct stat status {};
  CHECK_EQ(fstat(memory->fd(), &status), 0);
  CHECK_EQ(static_cast<size_t>(status.st_blocks) * 512, kPart);  // No page of the rest is taken.
  Grant grant = grant_of(*memory);
  const auto mapped = SharedMemory::map_peer(grant).value();
  CHECK(mapped->is_reserved(kPart) && !mapped->is_reserved(kPart + 1));
  CHECK(memory->reserve(3 * kPart).is_ok());
  CHECK(memory->reserve(kPart).is_ok());  // Nothing is given back.
  CHECK_EQ(memory->reserved(), 3 * kPart);
  CHECK(mapped->is_reserved(3 * kPart) && !mapped->is_reserved(4 * kPart));
  mapped->data()[3 * kPart - 1] = 5;
  CHECK_EQ(memory->data()[3 * kPart - 1], 5);
  CHECK(memory->reserve(4 * kPart + 1).error().code == Code::kConfig);
  CHECK(ftruncate(memory->fd(), 1) != 0);
}

TEST(what_is_not_reserved_is_refused_by_every_way) {
  constexpr size_t kPart = 64 << 10;
  const auto memory = SharedMemory::allocate(2 * kPart, kPart).value();
  Registry registry;
  BufferSpec spec;
  spec.data = memory->data();
  spec.length = memory->size();
  spec.memory = memory;
  const uint64_t base = registry.add(spec).value();
  Grant grant = grant_of(*memory);
  grant.base = base;
  grant.is_sealed = true;
  MappedFiles files;
  const auto shm = make_shm_mapping(grant, files).value();
  const auto local = make_local_mapping(&registry);
  std::vector<uint8_t> target(kPart);
  for (const auto& mapping : {shm, local}) {
    CHECK(mapping->copy(Op::kRead, target.data(), base, kPart).is_ok());
    CHECK(mapping->copy(Op::kRead, target.data(), base + 1, kPart).error().code == Code::kConfig);
  }
  CHECK(registry.pin(base, kPart + 1, Access::kRemoteRead).error().code == Code::kConfig);
  CHECK(registry.pin(base, kPart + 1, Access::kLocalWrite).error().code == Code::kConfig);
  CHECK(memory->reserve(2 * kPart).is_ok());
  for (const auto& mapping : {shm, local})
    CHECK(mapping->copy(Op::kRead, target.data(), base + kPart, kPart).is_ok());
}

// A mapped file of 1 MiB, with the grant that its owner would give.
struct OwnFile {
  OwnFile() : fd(memfd_create("test", MFD_CLOEXEC)) {
    CHECK_EQ(ftruncate(fd, kSize), 0);
    CHECK_EQ(fchmod(fd, 0600), 0);
    data = static_cast<uint8_t*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  }
  ~OwnFile() {
    munmap(data, kSize);
    close(fd);
  }
  Grant grant(uint64_t offset) const {
    const FileRange range = check_file_range(fd, offset, data + offset, kSize - offset).value();
    Grant grant;
    grant.process = read_own_process();
    grant.length = kSize - offset;
    grant.can_read = grant.can_write = true;
    grant.fd = fd;
    grant.device = range.device;
    grant.inode = range.inode;
    grant.file_offset = offset;
    return grant;
  }
  bool has_writers() const {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    if (fcntl(fd, F_OFD_SETLK, &lock) != 0) return true;
    lock.l_type = F_UNLCK;
    CHECK_EQ(fcntl(fd, F_OFD_SETLK, &lock), 0);
    return false;
  }

  static constexpr size_t kSize = 1 << 20;
  const int fd;
  uint8_t* data;
};

TEST(mapped_file_is_one_for_all_grants_and_holds_the_lock_of_writers) {
  OwnFile own;
  MappedFiles files;
  Grant read_only = own.grant(0);
  read_only.can_write = false;
  auto reader = files.get(read_only).value();
  CHECK(!own.has_writers());
  auto writer = files.get(own.grant(4096)).value();
  CHECK(writer != reader && writer == files.get(own.grant(8192)).value());
  CHECK(writer == files.get(read_only).value());  // It can be read as well.
  CHECK(own.has_writers());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const uint64_t begin = 100'000u * static_cast<uint64_t>(i) + 4000;
      CHECK(writer->reach(begin, 90'000).is_ok());
      std::memset(writer->data() + begin, i + 1, 90'000);
      CHECK(reader->reach(begin, 90'000).is_ok());
      CHECK_EQ(reader->data()[begin + 89'999], i + 1);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(own.data[4000], 1);
  CHECK_EQ(own.data[3999], 0);
  writer.reset();
  CHECK(!own.has_writers());
}

TEST(mapped_file_refuses_what_is_not_meant) {
  OwnFile own;
  const auto code = [](const Grant& grant) {
    const auto mapped = MappedFile::map_peer(grant);
    return mapped.is_ok() ? std::optional<Code>() : mapped.error().code;
  };
  CHECK(!code(own.grant(4096)));
  Grant grant = own.grant(4096);
  grant.inode += 1;
  CHECK(code(grant) == Code::kCorruption);
  grant = own.grant(4096);
  grant.length += 1;
  CHECK(code(grant) == Code::kCorruption);
  grant = own.grant(4096);
  grant.process.start_time += 1;
  CHECK(code(grant) == Code::kPeerLost);
  CHECK(!own.has_writers());
  CHECK(!check_file_range(own.fd, 4096, own.data, 4096).is_ok());
  CHECK(!check_file_range(own.fd, 0, own.data, OwnFile::kSize + 1).is_ok());
  grant = own.grant(4096);
  CHECK_EQ(fchmod(own.fd, 0606), 0);
  CHECK(code(grant) == Code::kCorruption);
}

TEST(mapped_file_that_was_cut_is_an_error) {
  OwnFile own;
  const auto mapped = MappedFile::map_peer(own.grant(0)).value();
  CHECK_EQ(ftruncate(own.fd, 300'000), 0);
  CHECK(mapped->reach(100'000, 100'000).is_ok());
  CHECK(mapped->reach(290'000, 10'000).is_ok());  // The rest of that step is gone.
  CHECK(mapped->reach(299'000, 10'000).error().code == Code::kCapacity);
  CHECK(mapped->reach(500'000, 1).error().code == Code::kCapacity);
}

TEST(process_id_knows_the_living) {
  ProcessId own = read_own_process();
  CHECK(is_alive(own));
  CHECK(is_same_host(own, own) || own.host_id.empty());
  own.start_time += 1;  // The pid of another life.
  CHECK(!is_alive(own));
}

TEST(process_id_takes_no_want_of_descriptors_for_a_death) {
  const ProcessId own = read_own_process();
  ProcessId other = own;
  other.pid = 0;
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool is_own_alive = is_alive(own), is_other_alive = is_alive(other);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(is_own_alive);
  CHECK(!is_other_alive);
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
