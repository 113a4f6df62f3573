#include "transfer/wire/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
// Continues a CRC from `state` over more bytes, without the inversions at its beginning and end.
__attribute__((target("sse4.2"))) uint32_t advance(uint32_t state, const uint8_t* at, size_t size) {
  uint64_t wide = state;
  for (; size >= 8; size -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  state = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++at) state = __builtin_ia32_crc32qi(state, *at);
  return state;
}

// Returns x^power modulo the polynomial, bit-reflected.
constexpr uint64_t power_of_x(int power) {
  uint32_t value = 0x80000000;
  for (; power > 0; --power) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
  return value;
}

constexpr size_t kFoldBytes = 256;

// Each 128 bits of the running remainder are multiplied by x^2048 (carry-less, in two halves) and
// added to the bits 2048 further; four registers, so that none waits for its multiplication. The
// result is 256 bytes with the checksum of all. REQUIRES: size >= kFoldBytes.
__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) uint32_t crc32c_folded(uint32_t crc,
                                                                            const uint8_t* at,
                                                                            size_t size) {
  constexpr int kBits = 8 * kFoldBytes;
  // A product of reflected numbers is one bit short, so that the exponents are one less than the
  // distance.
  constexpr long long kLow = static_cast<long long>(power_of_x(kBits + 63) << 32);
  constexpr long long kHigh = static_cast<long long>(power_of_x(kBits - 1) << 32);
  const __m512i powers = _mm512_set4_epi64(kHigh, kLow, kHigh, kLow);
  __m512i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(at + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(
                                          static_cast<int>(~crc))));
  at += kFoldBytes, size -= kFoldBytes;
  for (; size >= kFoldBytes; at += kFoldBytes, size -= kFoldBytes)
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_clmulepi64_epi128(sums[i], powers, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(sums[i], powers, 0x11);
      constexpr int kXorOfThree = 0x96;
      sums[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + 64 * i), kXorOfThree);
    }
  uint8_t rest[kFoldBytes];
  for (int i = 0; i < 4; ++i) _mm512_storeu_si512(rest + 64 * i, sums[i]);
  return ~advance(advance(0, rest, kFoldBytes), at, size);
}
#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTable[(crc ^ *at) & 0xff];
  return ~crc;
}

bool has_wide_crc32c() {
#if defined(__x86_64__)
  static const bool has_all = __builtin_cpu_supports("avx512f") &&
                              __builtin_cpu_supports("vpclmulqdq") &&
                              __builtin_cpu_supports("sse4.2");
  return has_all;
#else
  return false;
#endif
}

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  if (size >= 2 * kFoldBytes && has_wide_crc32c()) return crc32c_folded(crc, bytes, size);
  if (has_instruction) return ~advance(~crc, bytes, size);
#endif
  return crc32c_portable(crc, data, size);
}

}  // namespace tandem::transfer
