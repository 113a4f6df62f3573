#include "store/reads/chunk_checksum.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "transfer/wire/crc32c.h"

namespace tandem::store {
namespace {

#if defined(__x86_64__)
uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

__attribute__((target("sse4.2"))) void checksum_three(const uint8_t* a, const uint8_t* b,
                                                      const uint8_t* c, size_t length,
                                                      uint32_t* sums) {
  uint64_t sum_a = 0xffffffff, sum_b = 0xffffffff, sum_c = 0xffffffff;
  for (size_t i = 0; i < length; i += 8) {
    sum_a = __builtin_ia32_crc32di(sum_a, load(a + i));
    sum_b = __builtin_ia32_crc32di(sum_b, load(b + i));
    sum_c = __builtin_ia32_crc32di(sum_c, load(c + i));
  }
  sums[0] = ~static_cast<uint32_t>(sum_a);
  sums[1] = ~static_cast<uint32_t>(sum_b);
  sums[2] = ~static_cast<uint32_t>(sum_c);
}
#endif

// Chunks of equal length, queued so that three are computed at a time.
class ChunkQueue {
 public:
  explicit ChunkQueue(uint32_t* sums) : sums_(sums) {}

  // Adds a chunk, whose checksum is the next one in `sums`.
  void add(const uint8_t* data, size_t length) {
    if (count_ > 0 && length != length_) flush();
    length_ = length;
    waiting_[count_++] = data;
    if (count_ == 3 || transfer::has_wide_crc32c()) flush();
  }

  void flush() {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (count_ == 3 && length_ % 8 == 0 && has_instruction) {
      checksum_three(waiting_[0], waiting_[1], waiting_[2], length_, sums_);
      sums_ += 3;
      count_ = 0;
      return;
    }
#endif
    for (int i = 0; i < count_; ++i) *sums_++ = transfer::crc32c(0, waiting_[i], length_);
    count_ = 0;
  }

 private:
  const uint8_t* waiting_[3] = {};
  size_t length_ = 0;
  int count_ = 0;
  uint32_t* sums_;
};

}  // namespace

void checksum_values(const Value* values, size_t count, size_t chunk_bytes, uint32_t* checksums,
                     uint32_t* tables) {
  std::vector<uint32_t> own;
  if (tables == nullptr) {
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) total += (values[i].size + chunk_bytes - 1) / chunk_bytes;
    own.resize(total);
    tables = own.data();
  }
  ChunkQueue queue(tables);
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = 0; at < values[i].size; at += chunk_bytes)
      queue.add(values[i].data + at, std::min<size_t>(chunk_bytes, values[i].size - at));
  }
  queue.flush();
  for (size_t i = 0; i < count; ++i) {
    const size_t chunks = (values[i].size + chunk_bytes - 1) / chunk_bytes;
    checksums[i] = chunks == 0 ? 0 : transfer::crc32c(0, tables, 4 * chunks);
    tables += chunks;
  }
}

void checksum_chunks(const void* data, size_t size, size_t chunk_bytes, uint32_t* sums) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (chunk_bytes % 8 == 0 && __builtin_cpu_supports("sse4.2") && !transfer::has_wide_crc32c()) {
    for (; size / 3 >= chunk_bytes; size -= 3 * chunk_bytes, at += 3 * chunk_bytes, sums += 3)
      checksum_three(at, at + chunk_bytes, at + 2 * chunk_bytes, chunk_bytes, sums);
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
