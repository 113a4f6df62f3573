// Sixteen lanes of AVX-512 (F, BW, DQ, VL); meanings in vec_plain-inl.h. TANDEM_VNNI and
// TANDEM_BF16 choose the dot products that the unit has, over those made of wider steps.

inline constexpr size_t kLanes = 16;
typedef __m512 F32;
// A GCC vector of int32_t and not __m512i, whose lanes GCC takes for 64 bits: sums would change
// their type at every step, and GCC would keep them in memory.
typedef int32_t I32 __attribute__((vector_size(64)));
inline __m512i raw(I32 v) { return (__m512i)v; }

inline constexpr int kMaxRows = 6;
// Vectors of columns beside the rows: 24 sums, 4 vectors of weights and a row fill 29 of the 32
// registers.
constexpr int vectors_beside(int) { return 4; }
constexpr int bf16_vectors_beside(int) { return 4; }
inline constexpr int kMaxF32Rows = 6;
constexpr int f32_vectors_beside(int) { return 4; }

inline F32 zero_f32() { return _mm512_setzero_ps(); }
inline F32 set_f32(float x) { return _mm512_set1_ps(x); }
inline I32 set_i32(int32_t x) { return (I32)_mm512_set1_epi32(x); }
inline F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
inline I32 load_i32(const void* p) { return (I32)_mm512_loadu_si512(p); }
inline void store_i32(void* p, I32 v) { _mm512_storeu_si512(p, raw(v)); }
inline void store_f32(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline I32 load_u8(const uint8_t* p) {
  return (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_u8(uint8_t* p, I32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(raw(v)));
}
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(raw(v)); }
inline F32 at_least(F32 x, F32 low) { return _mm512_max_ps(low, x); }
inline F32 at_most(F32 x, F32 high) { return _mm512_min_ps(high, x); }
inline F32 as_f32(I32 v) { return _mm512_castsi512_ps(raw(v)); }
inline I32 as_i32(F32 v) { return (I32)_mm512_castps_si512(v); }
inline I32 shift_left_23(I32 v) { return (I32)_mm512_slli_epi32(raw(v), 23); }
inline I32 is_less(F32 a, F32 b) {
  return (I32)_mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ));
}
inline I32 select(I32 mask, I32 a, I32 b) {
  return (I32)_mm512_mask_blend_epi32(_mm512_movepi32_mask(raw(mask)), raw(b), raw(a));
}
inline I32 max_i32(I32 a, I32 b) { return (I32)_mm512_max_epi32(raw(a), raw(b)); }
inline int32_t reduce_max(I32 v) { return _mm512_reduce_max_epi32(raw(v)); }
inline float reduce_max(F32 v) { return _mm512_reduce_max_ps(v); }
inline float reduce_min(F32 v) { return _mm512_reduce_min_ps(v); }
inline F32 load_bf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_f32((I32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline F32 load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I32 broadcast(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return set_i32(word);
}

#if TANDEM_VNNI
struct IntWeights {
  I32 v;
};
using IntRow = IntWeights;
inline IntWeights int_weights(I32 v) { return {v}; }
inline IntRow int_row(const uint8_t* p) { return {broadcast(p)}; }
inline I32 dot(I32 acc, IntWeights w, IntRow a) {
  return (I32)_mm512_dpbusd_epi32(raw(acc), raw(w.v), raw(a.v));
}
template <int kMaxCode>
struct NarrowSums {
  static constexpr int kSteps = 0;
};
#else
struct IntWeights {
  I32 even, odd;
};
using IntRow = IntWeights;
inline IntWeights int_weights(I32 v) {
  return {(I32)_mm512_and_si512(raw(v), _mm512_set1_epi16(0x00ff)),
          (I32)_mm512_srli_epi16(raw(v), 8)};
}
inline IntRow int_row(const uint8_t* p) {
  const __m512i v = raw(broadcast(p));
  return {(I32)_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), (I32)_mm512_srai_epi16(v, 8)};
}
inline I32 dot(I32 acc, IntWeights w, IntRow a) {
  acc += (I32)_mm512_madd_epi16(raw(w.even), raw(a.even));
  return acc + (I32)_mm512_madd_epi16(raw(w.odd), raw(a.odd));
}
// Products of small codes summed in 16 bits, as in vec_avx2-inl.h.
template <int kMaxCode>
struct NarrowSums {
  static constexpr int kSteps = 32767 / (256 * kMaxCode);
  static I32 row(const uint8_t* p) { return broadcast(p); }
  static I32 multiply(I32 w, I32 a) { return (I32)_mm512_maddubs_epi16(raw(w), raw(a)); }
  static I32 add(I32 a, I32 b) { return (I32)_mm512_add_epi16(raw(a), raw(b)); }
  static I32 widen(I32 sums) { return (I32)_mm512_madd_epi16(raw(sums), _mm512_set1_epi16(1)); }
};
#endif
inline I32 load_u16(const uint8_t* p) {
  return (I32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I32 look_up(const uint8_t (&table)[16], I32 v) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (I32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), raw(v));
}
template <int kStride>
inline I32 gather(const uint32_t* table, I32 index) {
  return (I32)_mm512_i32gather_epi32(raw(index), table, 4 * kStride);
}
inline I32 negate_bytes(I32 v, I32 signs) {
  const __m512i first = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  const __m512i spread = _mm512_shuffle_epi8(raw(signs), first);
  const __mmask64 mask = _mm512_test_epi8_mask(spread, _mm512_set1_epi32(0x08040201));
  return (I32)_mm512_mask_sub_epi8(raw(v), mask, _mm512_setzero_si512(), raw(v));
}
inline I32 low_nibbles(I32 v) { return v & 0x0f0f0f0f; }
inline I32 high_nibbles(I32 v) { return (v >> 4) & 0x0f0f0f0f; }

#if TANDEM_BF16
struct Bf16Pair {
  I32 v;
};
inline Bf16Pair bf16_weights(I32 v) { return {v}; }
inline Bf16Pair bf16_row(const uint8_t* p) { return {broadcast(p)}; }
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w.v, (__m512bh)a.v);
}

// Rounds 32 floats to bf16.
inline void round_pair(uint16_t* out, const float* values) {
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(load_f32(values + 16), load_f32(values)));
}
inline void store_pair(uint8_t* p, Bf16Pair w) { _mm512_storeu_si512(p, raw(w.v)); }

// Table of the two bytes of bf16 for each seven bits of an e4m3 magnitude. Subnormal e4m3 numbers
// are normalised, because the dot product takes bf16's own subnormals for zeros.
struct E4m3Bytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
constexpr E4m3Bytes list_e4m3() {
  E4m3Bytes bytes{};
  for (uint32_t code = 0; code < 128; ++code) {
    uint32_t exponent = code >> 3, mantissa = code & 7;
    if (exponent == 0 && mantissa != 0) {
      for (exponent = 1; mantissa < 8; --exponent) mantissa <<= 1;
      mantissa &= 7;
    }
    // Unsigned arithmetic wraps modulo 2^32, so exponents below 0 come out right.
    const uint32_t bf16 = code == 0 ? 0 : ((exponent + 120) << 7) | (mantissa << 4);
    bytes.low[code] = static_cast<uint8_t>(bf16);
    bytes.high[code] = static_cast<uint8_t>(bf16 >> 8);
  }
  return bytes;
}
constexpr E4m3Bytes kE4m3Bytes = list_e4m3();
inline constexpr float kE4m3Factor = 1.0f;
inline void e4m3_weights(I32 v, Bf16Pair (&w)[2]) {
  const auto look_up = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), raw(v),
                                    _mm512_load_si512(table + 64));
  };
  const __m512i low = look_up(kE4m3Bytes.low);
  // The lookup ignores the sign bit, so it is put back: high | (v & 0x80).
  const __m512i high = _mm512_ternarylogic_epi32(look_up(kE4m3Bytes.high), raw(v),
                                                 _mm512_set1_epi8(INT8_MIN), 0xf8);
  w[0] = {(I32)_mm512_unpacklo_epi8(low, high)};
  w[1] = {(I32)_mm512_unpackhi_epi8(low, high)};
}
template <int kPair>
inline Bf16Pair e2m1_weights(I32 v) {
  // The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives in bf16, twice: the lookup uses five
  // bits of each 16-bit lane, of which the fifth belongs to the next code.
  const __m512i values = _mm512_broadcast_i32x8(_mm256_setr_epi32(
      0x3f000000, 0x3fc03f80, 0x40404000, 0x40c04080, static_cast<int32_t>(0xbf008000),
      static_cast<int32_t>(0xbfc0bf80), static_cast<int32_t>(0xc040c000),
      static_cast<int32_t>(0xc0c0c080)));
  return {(I32)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw(v), 4 * kPair), values)};
}
#else
#include "kernels/vectors/bf16_pairs-inl.h"
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  return fma(w.odd, a.odd, fma(w.even, a.even, acc));
}

// Shifted to fp16's exponent, an e4m3 number is too small by 2^8; the conversion from fp16
// normalises subnormal ones.
inline constexpr float kE4m3Factor = 256.0f;
inline F32 widen_e4m3(__m256i high_bytes) {
  const __m256i fields = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high_bytes, 1), fields));
}
inline void e4m3_weights(I32 v, Bf16Pair (&w)[2]) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i sorted = _mm512_permutexvar_epi64(order, raw(v));
  const __m256i first = _mm512_castsi512_si256(sorted);
  const __m256i second = _mm512_extracti64x4_epi64(sorted, 1);
  w[0] = {widen_e4m3(_mm256_slli_epi16(first, 8)), widen_e4m3(first)};
  w[1] = {widen_e4m3(_mm256_slli_epi16(second, 8)), widen_e4m3(second)};
}
template <int kPair>
inline Bf16Pair e2m1_weights(I32 v) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  // The lookup uses the lowest four bits of each lane, a whole e2m1 code.
  return {_mm512_permutexvar_ps(raw(v >> (4 * kPair)), values),
          _mm512_permutexvar_ps(raw(v >> (16 + 4 * kPair)), values)};
}
#endif
