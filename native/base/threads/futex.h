// Sleeping until one half of a 64-bit atomic changes (Linux futex); the kernel compares 32 bits
// only.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdint>

namespace tandem {

static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free);

inline uint32_t* low_half(std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(&word) + (std::endian::native == std::endian::little ? 0 : 1);
}
inline uint32_t* high_half(std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(&word) + (std::endian::native == std::endian::little ? 1 : 0);
}

// Returns when woken, when *address != expected, or for no reason: always call in a loop.
inline void futex_wait(const uint32_t* address, uint32_t expected) {
  syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
inline void futex_wake(const uint32_t* address, int count) {
  syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace tandem
