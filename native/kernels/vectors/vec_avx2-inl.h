// Eight lanes of AVX2 with FMA and F16C; meanings in vec_plain-inl.h.

inline constexpr size_t kLanes = 8;
typedef __m256 F32;
// A GCC vector of int32_t and not __m256i, for the reason that vec_avx512-inl.h states for __m512i.
typedef int32_t I32 __attribute__((vector_size(32)));
inline __m256i raw(I32 v) { return (__m256i)v; }

inline constexpr int kMaxRows = 4;
// Vectors of columns beside a number of rows. They use 16 registers: 8 sums, two vectors of weights
// split in two, a row split in two. A single row takes all columns in order, because half of a
// panel's lines come slowly from memory.
constexpr int vectors_beside(int rows) { return rows == 1 ? 8 : 2; }
constexpr int bf16_vectors_beside(int rows) { return rows == 1 ? 8 : 2; }
// The sizes for fp32 use 12 registers for sums, two for weights and one for a row.
inline constexpr int kMaxF32Rows = 6;
constexpr int f32_vectors_beside(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline F32 zero_f32() { return _mm256_setzero_ps(); }
inline F32 set_f32(float x) { return _mm256_set1_ps(x); }
inline I32 set_i32(int32_t x) { return (I32)_mm256_set1_epi32(x); }
inline F32 load_f32(const float* p) { return _mm256_loadu_ps(p); }
inline I32 load_i32(const void* p) {
  return (I32)_mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_i32(void* p, I32 v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), raw(v));
}
inline void store_f32(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline I32 load_u8(const uint8_t* p) {
  return (I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline void store_u8(uint8_t* p, I32 v) {
  const __m256i words = _mm256_packus_epi32(raw(v), raw(v));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const __m256i order = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order)));
}
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 to_f32(I32 v) { return _mm256_cvtepi32_ps(raw(v)); }
// The instructions return their second operand if either is NaN, so x comes second.
inline F32 at_least(F32 x, F32 low) { return _mm256_max_ps(low, x); }
inline F32 at_most(F32 x, F32 high) { return _mm256_min_ps(high, x); }
inline F32 as_f32(I32 v) { return _mm256_castsi256_ps(raw(v)); }
inline I32 as_i32(F32 v) { return (I32)_mm256_castps_si256(v); }
inline I32 shift_left_23(I32 v) { return (I32)_mm256_slli_epi32(raw(v), 23); }
inline I32 is_less(F32 a, F32 b) { return (I32)(a < b); }
inline I32 select(I32 mask, I32 a, I32 b) {
  return (I32)_mm256_blendv_epi8(raw(b), raw(a), raw(mask));
}
inline I32 max_i32(I32 a, I32 b) { return (I32)_mm256_max_epi32(raw(a), raw(b)); }
inline int32_t reduce_max(I32 v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(raw(v)), _mm256_extracti128_si256(raw(v), 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
inline float reduce_max(F32 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_shuffle_ps(m, m, 0x4e));
  m = _mm_max_ps(m, _mm_shuffle_ps(m, m, 0xb1));
  return _mm_cvtss_f32(m);
}
inline float reduce_min(F32 v) {
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_min_ps(m, _mm_shuffle_ps(m, m, 0x4e));
  m = _mm_min_ps(m, _mm_shuffle_ps(m, m, 0xb1));
  return _mm_cvtss_f32(m);
}
inline F32 load_bf16(const uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return as_f32((I32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline F32 load_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Weights of one step, widened from bytes to 16 bits: the even and the odd ones apart, so that each
// pair of products is summed without loss. vpmaddubsw on bytes would saturate (2 * 255 * 127 >
// 2^15).
struct IntWeights {
  I32 even, odd;
};
using IntRow = IntWeights;
inline IntWeights int_weights(I32 v) {
  return {(I32)_mm256_and_si256(raw(v), _mm256_set1_epi16(0x00ff)),
          (I32)_mm256_srli_epi16(raw(v), 8)};
}
inline IntRow int_row(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  const __m256i v = raw(set_i32(word));
  return {(I32)_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), (I32)_mm256_srai_epi16(v, 8)};
}
// Keeps a value's place among the others that are held. GCC otherwise moves all additions of a group
// behind its products, which then do not fit into 16 registers and go through the stack.
inline void hold_order(I32& v) { __asm__ volatile("" : "+x"(v)); }
inline I32 dot(I32 acc, IntWeights w, IntRow a) {
  acc += (I32)_mm256_madd_epi16(raw(w.even), raw(a.even));
  hold_order(acc);
  acc += (I32)_mm256_madd_epi16(raw(w.odd), raw(a.odd));
  hold_order(acc);
  return acc;
}
// Products of codes that are small enough for vpmaddubsw, and the number of steps that can be
// summed in 16 bits without overflow. This takes half the operations of IntWeights.
template <int kMaxCode>
struct NarrowSums {
  static constexpr int kSteps = 32767 / (256 * kMaxCode);
  static I32 row(const uint8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return set_i32(word);
  }
  static I32 multiply(I32 w, I32 a) {
    I32 products = (I32)_mm256_maddubs_epi16(raw(w), raw(a));
    hold_order(products);
    return products;
  }
  static I32 add(I32 a, I32 b) {
    I32 sum = (I32)_mm256_add_epi16(raw(a), raw(b));
    hold_order(sum);
    return sum;
  }
  static I32 widen(I32 sums) { return (I32)_mm256_madd_epi16(raw(sums), _mm256_set1_epi16(1)); }
};
inline I32 load_u16(const uint8_t* p) {
  return (I32)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I32 look_up(const uint8_t (&table)[16], I32 v) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (I32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), raw(v));
}
template <int kStride>
inline I32 gather(const uint32_t* table, I32 index) {
  return (I32)_mm256_i32gather_epi32(reinterpret_cast<const int*>(table), raw(index), 4 * kStride);
}
inline I32 negate_bytes(I32 v, I32 signs) {
  const __m256i first = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  const __m256i bits = _mm256_set1_epi32(0x08040201);
  const __m256i spread = _mm256_shuffle_epi8(raw(signs), first);
  const __m256i mask = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
  return (I32)_mm256_sub_epi8(_mm256_xor_si256(raw(v), mask), mask);
}
inline I32 low_nibbles(I32 v) { return v & 0x0f0f0f0f; }
inline I32 high_nibbles(I32 v) { return (v >> 4) & 0x0f0f0f0f; }

#include "kernels/vectors/bf16_pairs-inl.h"
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  return fma(w.odd, a.odd, fma(w.even, a.even, acc));
}

// Shifted to fp16's exponent, an e4m3 number is too small by 2^8; the conversion from fp16
// normalises subnormal ones.
inline constexpr float kE4m3Factor = 256.0f;
inline F32 widen_e4m3(__m128i high_bytes) {
  const __m128i fields = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high_bytes, 1), fields));
}
inline void e4m3_weights(I32 v, Bf16Pair (&w)[2]) {
  const __m256i sorted = _mm256_permute4x64_epi64(raw(v), 0xd8);
  const __m128i first = _mm256_castsi256_si128(sorted);
  const __m128i second = _mm256_extracti128_si256(sorted, 1);
  w[0] = {widen_e4m3(_mm_slli_epi16(first, 8)), widen_e4m3(first)};
  w[1] = {widen_e4m3(_mm_slli_epi16(second, 8)), widen_e4m3(second)};
}
template <int kPair>
inline Bf16Pair e2m1_weights(I32 v) {
  const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  // The lookup uses the three bits of the magnitude; the fourth bit of the code is moved to the
  // sign.
  const auto widen = [&](I32 low, I32 high) {
    const F32 magnitude = _mm256_permutevar8x32_ps(values, raw(low));
    return as_f32(as_i32(magnitude) | (high & INT32_MIN));
  };
  return {widen(v >> (4 * kPair), v << (28 - 4 * kPair)),
          widen(v >> (16 + 4 * kPair), v << (12 - 4 * kPair))};
}
