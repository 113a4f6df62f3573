// CRC-32C (Castagnoli, RFC 3720): of frame headers always, of slices on request.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::transfer {

// Continues the CRC `crc` over more bytes; begin with 0.
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// True if one stream is computed at full speed (carry-less products of 512 bits); otherwise several
// streams side by side are faster.
bool has_wide_crc32c();

// The same without the instruction of SSE 4.2, for machines without it, and for the test.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t size);

}  // namespace tandem::transfer
