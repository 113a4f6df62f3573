// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proof of the cluster secret. The build has no
// cryptographic library to lean on; the test vectors are those of the standards.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::transfer {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// In a time that does not depend on where the first difference is.
bool equal_in_constant_time(std::string_view a, std::string_view b);

inline std::string_view as_view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace tandem::transfer
