#include "transfer/crc32c.h"

#include <array>
#include <cstring>

namespace tandem::transfer {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Reflected.

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t crc, const void* data,
                                                        size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  uint64_t state = ~crc;
  for (; size >= 8; size -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    state = __builtin_ia32_crc32di(state, word);
  }
  uint32_t tail = static_cast<uint32_t>(state);
  for (; size > 0; --size, ++at) tail = __builtin_ia32_crc32qi(tail, *at);
  return ~tail;
}
#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTable[(crc ^ *at) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(crc, data, size);
#endif
  return crc32c_portable(crc, data, size);
}

}  // namespace tandem::transfer
