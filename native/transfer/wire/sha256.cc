#include "transfer/wire/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tandem::transfer {
namespace {

constexpr size_t kBlockBytes = 64;

// Fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void compress_portable(uint32_t state[8], const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i)
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
           uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t s[8];
  std::memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t e1 = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
    const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t t1 = s[7] + e1 + choice + kRound[i] + w[i];
    const uint32_t e0 = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    std::memmove(s + 1, s, 7 * sizeof s[0]);
    s[4] += t1;
    s[0] = t1 + e0 + majority;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

#if defined(__x86_64__)
bool has_sha_instructions() {
  // Query CPUID directly, since the compiler's own test for this feature is too new to rely on.
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kSha = 1u << 29;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kSha) != 0 &&
         __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

// The instructions keep the state as ABEF and CDGH, and compute two rounds each.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_by_instructions(uint32_t state[8],
                                                                          const uint8_t* at,
                                                                          size_t num_blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* const out = reinterpret_cast<__m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(out), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(out + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; num_blocks > 0; --num_blocks, at += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i >= 4) {
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                          _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));
        w[i % 4] = _mm_sha256msg2_epu32(sum, w[(i + 3) % 4]);
      }
      const __m128i rounds = _mm_add_epi32(
          w[i % 4], _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRound) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, rounds);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(rounds, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}
#endif

void compress(uint32_t state[8], const uint8_t* at, size_t num_blocks) {
#if defined(__x86_64__)
  static const bool has_instructions = has_sha_instructions();
  if (has_instructions) return compress_by_instructions(state, at, num_blocks);
#endif
  for (; num_blocks > 0; --num_blocks, at += kBlockBytes) compress_portable(state, at);
}

}  // namespace

void sha256_compress_portable(uint32_t state[8], const uint8_t* block) {
  compress_portable(state, block);
}


void Sha256::update(std::string_view data) {
  const auto* from = reinterpret_cast<const uint8_t*>(data.data());
  size_t left = data.size();
  const size_t fill = num_bytes_ % kBlockBytes;
  num_bytes_ += left;
  if (fill > 0) {
    const size_t part = std::min(left, kBlockBytes - fill);
    std::memcpy(block_.data() + fill, from, part);
    if (fill + part < kBlockBytes) return;
    compress(state_.data(), block_.data(), 1);
    from += part;
    left -= part;
  }
  compress(state_.data(), from, left / kBlockBytes);
  std::memcpy(block_.data(), from + left / kBlockBytes * kBlockBytes, left % kBlockBytes);
}

Digest Sha256::finish() {
  const uint64_t num_bits = num_bytes_ * 8;
  std::string padding(1, static_cast<char>(0x80));
  while ((num_bytes_ + padding.size()) % kBlockBytes != kBlockBytes - 8) padding.push_back('\0');
  for (int shift = 56; shift >= 0; shift -= 8)
    padding.push_back(static_cast<char>(num_bits >> shift & 0xff));
  update(padding);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

HmacSha256::HmacSha256(std::string_view key) {
  Digest hashed;
  if (key.size() > kBlockBytes) {
    hashed = sha256(key);
    key = as_view(hashed);
  }
  std::string inner(kBlockBytes, '\x36'), outer(kBlockBytes, '\x5c');
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] = static_cast<char>(inner[i] ^ key[i]);
    outer[i] = static_cast<char>(outer[i] ^ key[i]);
  }
  inner_.update(inner);
  outer_.update(outer);
}

Digest HmacSha256::sign(std::initializer_list<std::string_view> parts) const {
  Sha256 inner = inner_, outer = outer_;
  for (const std::string_view part : parts) inner.update(part);
  outer.update(as_view(inner.finish()));
  return outer.finish();
}

Digest sha256(std::string_view data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
  return HmacSha256(key).sign({data});
}

Digest hkdf_sha256(std::string_view salt, std::string_view secret, std::string_view info) {
  const Digest extracted = hmac_sha256(salt, secret);
  return HmacSha256(as_view(extracted)).sign({info, std::string_view("\x01", 1)});
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<uint8_t>(a[i]) ^ static_cast<uint8_t>(b[i]);
  return difference == 0;
}

}  // namespace tandem::transfer
