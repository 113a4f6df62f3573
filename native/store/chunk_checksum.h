// CRC-32C of every chunk of a buffer. Chunks are independent, so three are computed at a time: one
// chain of crc32 instructions waits three cycles for each result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::store {

// Sets sums[i] to the CRC-32C of chunk i, for all ceil(size / chunk_bytes) of them; the last may be
// short. REQUIRES: chunk_bytes > 0.
void checksum_chunks(const void* data, size_t size, size_t chunk_bytes, uint32_t* sums);

}  // namespace tandem::store
