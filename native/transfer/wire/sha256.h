// SHA-256 (FIPS 180-4), HMAC (RFC 2104) and HKDF (RFC 5869), for the proof of the cluster secret,
// the keys of a connection, and its tags without libcrypto. Implemented here because the build has
// no cryptographic library; tested with the standards' vectors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace tandem::transfer {

using Digest = std::array<uint8_t, 32>;

// A SHA-256 digest of bytes that are added in parts.
class Sha256 {
 public:
  void update(std::string_view data);
  // REQUIRES: called once, last.
  Digest finish();

 private:
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_;
  uint64_t num_bytes_ = 0;
};

// An HMAC key, prepared for many messages.
class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  Digest sign(std::initializer_list<std::string_view> parts) const;

 private:
  Sha256 inner_, outer_;
};

Digest sha256(std::string_view data);
// Processes one block of 64 bytes without the SHA instructions; for tests.
void sha256_compress_portable(uint32_t state[8], const uint8_t* block);
Digest hmac_sha256(std::string_view key, std::string_view data);
// Returns one block of HKDF-SHA256: 32 bytes of key for the purpose that `info` names.
Digest hkdf_sha256(std::string_view salt, std::string_view secret, std::string_view info);

// Compares in a time that does not depend on the place of the first difference.
bool equal_in_constant_time(std::string_view a, std::string_view b);

inline std::string_view as_view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace tandem::transfer
