// Sixteen lanes of AVX-512 (F, BW, DQ, VL); meanings in vec_plain-inl.h. TANDEM_VNNI and
// TANDEM_BF16 choose the dot products that the unit has, over those made of wider steps.

inline constexpr size_t kLanes = 16;
typedef __m512 F32;
// Not __m512i, whose lanes GCC takes for 64 bits: sums that change their type at every step would
// be kept in memory.
typedef int32_t I32 __attribute__((vector_size(64)));
inline __m512i raw(I32 v) { return (__m512i)v; }

inline constexpr int kMaxRows = 6;
// 24 sums, 4 vectors of weights and a row fill 29 of the 32 registers. All columns at once read whole lines of a panel, in order,
// which the L1 prefetcher follows; two columns at a time ran at half the speed.
constexpr int vectors_beside(int) { return 4; }
constexpr int bf16_vectors_beside(int) { return 4; }

inline F32 zero_f32() { return _mm512_setzero_ps(); }
inline F32 set_f32(float x) { return _mm512_set1_ps(x); }
inline I32 set_i32(int32_t x) { return (I32)_mm512_set1_epi32(x); }
inline F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
inline I32 load_i32(const void* p) { return (I32)_mm512_loadu_si512(p); }
inline void store_f32(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(raw(v)); }
inline F32 at_least(F32 x, F32 low) { return _mm512_max_ps(low, x); }
inline F32 at_most(F32 x, F32 high) { return _mm512_min_ps(high, x); }
inline F32 as_f32(I32 v) { return _mm512_castsi512_ps(raw(v)); }
inline I32 as_i32(F32 v) { return (I32)_mm512_castps_si512(v); }
inline I32 shift_left_23(I32 v) { return (I32)_mm512_slli_epi32(raw(v), 23); }
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
#endif
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
#else
struct Bf16Pair {
  F32 even, odd;
};
inline Bf16Pair bf16_weights(I32 v) {
  return {as_f32(v << 16), as_f32(v & static_cast<int32_t>(0xffff0000))};
}
inline Bf16Pair bf16_row(const uint8_t* p) { return bf16_weights(broadcast(p)); }
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  return fma(w.odd, a.odd, fma(w.even, a.even, acc));
}
#endif
