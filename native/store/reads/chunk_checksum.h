// CRC-32C of every chunk of a buffer. Chunks are independent, so three are computed at a time: one
// chain of crc32 instructions waits three cycles for each result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::store {

// Sets sums[i] to the CRC-32C of chunk i, for all ceil(size / chunk_bytes) of them; the last may be
// short. REQUIRES: chunk_bytes > 0.
void checksum_chunks(const void* data, size_t size, size_t chunk_bytes, uint32_t* sums);

struct Value {
  const uint8_t* data;
  uint64_t size;
};

// Sets checksums[i] to that of the table of value i, which is the CRC-32C of each of its chunks; 0
// for an empty value. If tables is not null, all tables are written there, one after the other.
// Short values are computed side by side, so that a batch of them is as fast as one long value.
// REQUIRES: chunk_bytes > 0.
void checksum_values(const Value* values, size_t count, size_t chunk_bytes, uint32_t* checksums,
                     uint32_t* tables);

}  // namespace tandem::store
