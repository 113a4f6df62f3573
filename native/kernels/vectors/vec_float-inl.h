// Floats in registers: what row and attention kernels need beyond vec_*-inl.h. Included inside the
// variant's anonymous namespace, after TANDEM_VEC_HEADER.
//
// Sums run over 16 virtual lanes whatever the register's width, and halves are added to halves, so
// that a result is the same on every ISA.

#include "kernels/vectors/unroll-inl.h"

typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

// Numbers of registers that hold 16 and 64 floats.
inline constexpr size_t kWordVectors = 16 / kLanes;
inline constexpr size_t kBlockVectors = 64 / kLanes;
// 1.5 * 2^23: adding it to a small float leaves the float, rounded to an integer, in the low bits
// of the sum.
inline constexpr float kRounder = 12582912.0f;
inline constexpr float kInfinity = __builtin_inff();

#include "kernels/weights/transpose-inl.h"

template <size_t kStep, size_t... kIndex>
TANDEM_INLINE inline F32 rotate(F32 v, Indices<kIndex...>) {
  return __builtin_shufflevector(v, v, ((kIndex + kStep) % kLanes)...);
}
// Rotates the lanes: lane i of the result is lane (i + kStep) modulo kLanes of `v`.
template <size_t kStep>
TANDEM_INLINE inline F32 rotate(F32 v) {
  return rotate<kStep>(v, Lanes{});
}

inline F32 load_wide(const float* p) { return load_f32(p); }
inline I32 load_shorts(const uint16_t* p) {
  U16 s;
  __builtin_memcpy(&s, p, sizeof s);
  return __builtin_convertvector(s, I32);
}
// Widens bytes to 32 bits in two steps, because GCC 12 takes a vector apart when it is widened
// fourfold at once.
inline I32 load_bytes_wide(const void* p) {
  U8 s;
  __builtin_memcpy(&s, p, sizeof s);
  return __builtin_convertvector(__builtin_convertvector(s, U16), I32);
}
// bfloat16 is the upper half of a float.
inline F32 load_wide(const uint16_t* p) { return as_f32(load_shorts(p) << 16); }

inline float widen_one(float x) { return x; }
inline float widen_one(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds floats to bf16 in the upper half of each lane, to nearest even; NaN stays NaN.
inline I32 round_bf16(F32 v) {
  const I32 bits = as_i32(v);
  const I32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return v == v ? rounded : (bits | 0x400000);
}
inline void store_narrow(float* p, F32 v) { store_f32(p, v); }
inline void store_narrow(uint16_t* p, F32 v) {
  const U16 s = __builtin_convertvector(round_bf16(v) >> 16, U16);
  __builtin_memcpy(p, &s, sizeof s);
}
inline void narrow_one(float* p, float x) { *p = x; }
inline void narrow_one(uint16_t* p, float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : (bits | 0x400000u);
  *p = static_cast<uint16_t>(bits >> 16);
}

template <class Combine>
TANDEM_INLINE inline F32 fold(const F32 (&v)[kWordVectors], Combine combine) {
  F32 s = v[0];
  if constexpr (kLanes == 8) s = combine(v[0], v[kWordVectors - 1]);
  if constexpr (kLanes == 4)
    s = combine(combine(v[0], v[kWordVectors / 2]),
                combine(v[kWordVectors / 4], v[kWordVectors - 1]));
  if constexpr (kLanes == 16) s = combine(s, rotate<8 % kLanes>(s));
  if constexpr (kLanes >= 8) s = combine(s, rotate<4 % kLanes>(s));
  s = combine(s, rotate<2>(s));
  return combine(s, rotate<1>(s));
}
// Returns the sum of 64 lanes: first four words of 16 are added, then halves to halves.
TANDEM_INLINE inline float sum_block(const F32 (&v)[kBlockVectors]) {
  F32 word[kWordVectors];
  for (size_t i = 0; i < kWordVectors; ++i)
    word[i] = (v[i] + v[i + kWordVectors]) + (v[i + 2 * kWordVectors] + v[i + 3 * kWordVectors]);
  return fold(word, [](F32 a, F32 b) TANDEM_INLINE { return a + b; })[0];
}
// Returns the largest of 64 lanes; the result is unspecified if some are NaN.
TANDEM_INLINE inline float max_block(const F32 (&v)[kBlockVectors]) {
  F32 word[kWordVectors];
  for (size_t i = 0; i < kWordVectors; ++i)
    word[i] = at_least(at_least(v[i], v[i + kWordVectors]),
                       at_least(v[i + 2 * kWordVectors], v[i + 3 * kWordVectors]));
  return fold(word, [](F32 a, F32 b) TANDEM_INLINE { return at_least(a, b); })[0];
}

// Computes exp(x) for x <= 0, within 2 ulp, as 2^n * 2^f, where 2^f is a Taylor polynomial on
// [-1/2, 1/2]. Below -87 the result would be denormal and is 0; NaN stays NaN.
TANDEM_INLINE inline F32 exp_nonpositive(F32 x) {
  const F32 zero = zero_f32();
  const F32 bounded = at_least(x, set_f32(-87.0f));
  const F32 shifted = fma(bounded, set_f32(1.44269504f), set_f32(kRounder));
  const F32 n = shifted - kRounder;
  // log2(e) is used in two parts, so that f is exact to its last bit however large n is.
  F32 f = fma(bounded, set_f32(1.44269502162933349609f), zero - n);
  f = fma(bounded, set_f32(1.92596299112661746e-8f), f);
  F32 p = set_f32(1.52527338e-5f);
  p = fma(p, f, set_f32(1.54035304e-4f));
  p = fma(p, f, set_f32(1.33335581e-3f));
  p = fma(p, f, set_f32(9.61812911e-3f));
  p = fma(p, f, set_f32(5.55041087e-2f));
  p = fma(p, f, set_f32(2.40226507e-1f));
  p = fma(p, f, set_f32(6.93147181e-1f));
  p = fma(p, f, set_f32(1.0f));
  // The low bits of `shifted` are n, which is added to the exponent of p.
  const F32 result = as_f32(as_i32(p) + shift_left_23(as_i32(shifted)));
  const F32 bounded_result = x < -87.0f ? zero : result;
  return x == x ? bounded_result : x;
}

// Computes 1 / (1 + exp(-x)), without overflow.
TANDEM_INLINE inline F32 sigmoid(F32 x) {
  const F32 e = exp_nonpositive(x < 0.0f ? x : zero_f32() - x);
  const F32 one = set_f32(1.0f);
  return (x < 0.0f ? e : one) / (one + e);
}

// Computes tanh with an absolute error below 4 units of 2^-24; a small x loses relative accuracy.
TANDEM_INLINE inline F32 tanh_of(F32 x) {
  const F32 one = set_f32(1.0f);
  const F32 e = exp_nonpositive(x < 0.0f ? x + x : zero_f32() - (x + x));
  const F32 t = (one - e) / (one + e);
  return x < 0.0f ? zero_f32() - t : t;
}
