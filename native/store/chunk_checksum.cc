#include "store/chunk_checksum.h"

#include <algorithm>
#include <cstring>

#include "transfer/crc32c.h"

namespace tandem::store {
namespace {

#if defined(__x86_64__)
uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

__attribute__((target("sse4.2"))) void checksum_three(const uint8_t* data, size_t chunk_bytes,
                                                      uint32_t* sums) {
  const uint8_t* a = data;
  const uint8_t* b = data + chunk_bytes;
  const uint8_t* c = data + 2 * chunk_bytes;
  uint64_t sum_a = 0xffffffff, sum_b = 0xffffffff, sum_c = 0xffffffff;
  for (size_t i = 0; i < chunk_bytes; i += 8) {
    sum_a = __builtin_ia32_crc32di(sum_a, load(a + i));
    sum_b = __builtin_ia32_crc32di(sum_b, load(b + i));
    sum_c = __builtin_ia32_crc32di(sum_c, load(c + i));
  }
  sums[0] = ~static_cast<uint32_t>(sum_a);
  sums[1] = ~static_cast<uint32_t>(sum_b);
  sums[2] = ~static_cast<uint32_t>(sum_c);
}
#endif

}  // namespace

void checksum_chunks(const void* data, size_t size, size_t chunk_bytes, uint32_t* sums) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (chunk_bytes % 8 == 0 && __builtin_cpu_supports("sse4.2")) {
    for (; size / 3 >= chunk_bytes; size -= 3 * chunk_bytes, at += 3 * chunk_bytes, sums += 3)
      checksum_three(at, chunk_bytes, sums);
  }
#endif
  for (; size > 0; ++sums) {
    const size_t length = std::min(size, chunk_bytes);
    *sums = transfer::crc32c(0, at, length);
    at += length;
    size -= length;
  }
}

}  // namespace tandem::store
