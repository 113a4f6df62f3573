// Vectors of four lanes in the compiler's own vector type, for any target. Included inside the
// variant's anonymous namespace, as vec_avx2-inl.h and vec_avx512-inl.h are; the comments here say
// what each function does in all of them.

inline constexpr size_t kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));

// Size of a register block of a product: rows, and vectors of columns beside them.
inline constexpr int kMaxRows = 2;
constexpr int vectors_beside(int) { return 1; }
constexpr int bf16_vectors_beside(int) { return 1; }
// Size of a register block for products of fp32.
inline constexpr int kMaxF32Rows = 2;
constexpr int f32_vectors_beside(int) { return 1; }

inline F32 zero_f32() { return F32{}; }
inline F32 set_f32(float x) { return F32{x, x, x, x}; }
inline I32 set_i32(int32_t x) { return I32{x, x, x, x}; }
inline F32 load_f32(const float* p) {
  F32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline I32 load_i32(const void* p) {
  I32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// load_u8 loads one byte per lane, zero-extended; store_u8 stores lanes below 256 as bytes.
inline I32 load_u8(const uint8_t* p) { return I32{p[0], p[1], p[2], p[3]}; }
inline void store_u8(uint8_t* p, I32 v) {
  for (size_t i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(v[i]);
}
inline void store_i32(void* p, I32 v) { __builtin_memcpy(p, &v, sizeof v); }
inline void store_f32(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }
// Fused multiply-add with one rounding, as in hardware, so that integer formats agree bitwise
// across ISAs.
inline F32 fma(F32 a, F32 b, F32 c) {
  F32 r;
  for (size_t i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
inline F32 to_f32(I32 v) {
  F32 r;
  for (size_t i = 0; i < kLanes; ++i) r[i] = static_cast<float>(v[i]);
  return r;
}
// Limit x from below or above: the result is the bound if x is beyond it, and x itself if it is
// NaN.
inline F32 at_least(F32 x, F32 low) {
  for (size_t i = 0; i < kLanes; ++i) x[i] = x[i] < low[i] ? low[i] : x[i];
  return x;
}
inline F32 at_most(F32 x, F32 high) {
  for (size_t i = 0; i < kLanes; ++i) x[i] = x[i] > high[i] ? high[i] : x[i];
  return x;
}
inline F32 as_f32(I32 v) { return (F32)v; }
inline I32 as_i32(F32 v) { return (I32)v; }
inline I32 shift_left_23(I32 v) { return v << 23; }
// is_less returns all ones in lanes where a < b; select takes a where the mask is set, b elsewhere.
inline I32 is_less(F32 a, F32 b) { return (I32)(a < b); }
inline I32 select(I32 mask, I32 a, I32 b) { return (a & mask) | (b & ~mask); }
inline I32 max_i32(I32 a, I32 b) { return select((I32)(a > b), a, b); }
inline int32_t reduce_max(I32 v) {
  int32_t most = v[0];
  for (size_t i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
inline float reduce_max(F32 v) {
  float most = v[0];
  for (size_t i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
inline float reduce_min(F32 v) {
  float least = v[0];
  for (size_t i = 1; i < kLanes; ++i) least = v[i] < least ? v[i] : least;
  return least;
}
inline F32 load_bf16(const uint16_t* p) {
  return (F32)I32{p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16};
}

inline F32 load_fp16(const uint16_t* p) {
  F32 r;
  for (size_t i = 0; i < kLanes; ++i) {
    // The exponent is moved to float's by a multiplication, which also normalises subnormal
    // numbers.
    const uint32_t magnitude = static_cast<uint32_t>(p[i] & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16;
    float value;
    __builtin_memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    r[i] = sign ? -value : value;
  }
  return r;
}

// Weights and activations of one step: four products of 8 bits per lane, weights unsigned,
// activations signed.
struct IntWeights {
  I32 v;
};
struct IntRow {
  int8_t code[4];
};
inline IntWeights int_weights(I32 v) { return {v}; }
inline IntRow int_row(const uint8_t* p) {
  IntRow row;
  __builtin_memcpy(row.code, p, 4);
  return row;
}
inline I32 dot(I32 acc, IntWeights w, IntRow a) {
  for (size_t i = 0; i < kLanes; ++i) {
    const uint32_t u = static_cast<uint32_t>(w.v[i]);
    for (int k = 0; k < 4; ++k) acc[i] += static_cast<int32_t>((u >> (8 * k)) & 0xff) * a.code[k];
  }
  return acc;
}
// Sums of products in 16 bits, on targets where that is faster: kSteps is the number of steps that
// can be summed with codes up to kMaxCode; 0: none, as here.
template <int kMaxCode>
struct NarrowSums {
  static constexpr int kSteps = 0;
};
// Loads 16 bits per lane, zero-extended.
inline I32 load_u16(const uint8_t* p) {
  uint16_t halves[kLanes];
  __builtin_memcpy(halves, p, sizeof halves);
  return I32{halves[0], halves[1], halves[2], halves[3]};
}
// Replaces each byte, which is below 16, by the entry of a table.
inline I32 look_up(const uint8_t (&table)[16], I32 v) {
  uint8_t bytes[sizeof v];
  __builtin_memcpy(bytes, &v, sizeof v);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_i32(bytes);
}
// Loads for each lane the table's word at kStride times the lane's index.
template <int kStride>
inline I32 gather(const uint32_t* table, I32 index) {
  uint32_t words[kLanes];
  for (size_t i = 0; i < kLanes; ++i) words[i] = table[static_cast<size_t>(index[i]) * kStride];
  return load_i32(words);
}
// Negates byte i of a lane, in eight bits, if bit i of the lane of `signs` is set.
inline I32 negate_bytes(I32 v, I32 signs) {
  uint8_t bytes[sizeof v];
  __builtin_memcpy(bytes, &v, sizeof v);
  for (size_t i = 0; i < sizeof v; ++i)
    if (signs[i / 4] >> (i % 4) & 1) bytes[i] = static_cast<uint8_t>(-bytes[i]);
  return load_i32(bytes);
}
inline I32 low_nibbles(I32 v) { return v & 0x0f0f0f0f; }
inline I32 high_nibbles(I32 v) { return (v >> 4) & 0x0f0f0f0f; }

// Two bf16 products per lane. Each product is exact in fp32, so adding it rounds as an fma does.
#include "kernels/vectors/bf16_pairs-inl.h"
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  acc = w.even * a.even + acc;
  return w.odd * a.odd + acc;
}

// e4m3_weights widens a vector of codes to the pairs k = 0, 1 and k = 2, 3 of each column, divided
// by kE4m3Factor; e2m1_weights widens the pair k = 2 kPair, 2 kPair + 1. weight_format.h describes
// the layouts.
inline constexpr float kE4m3Factor = 1.0f;
inline void e4m3_weights(I32 v, Bf16Pair (&w)[2]) {
  uint8_t codes[16];
  __builtin_memcpy(codes, &v, sizeof v);
  // Shifted to fp32's exponent, an e4m3 number is too small by 2^120; the multiplication normalises
  // subnormal ones.
  const auto widen = [](uint8_t code) {
    const uint32_t bits = static_cast<uint32_t>(code & 0x7f) << 20;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    value *= 0x1p120f;
    return code & 0x80 ? -value : value;
  };
  float values[16];
  for (size_t i = 0; i < 16; ++i) values[i] = widen(codes[i]);
  for (size_t half = 0; half < 2; ++half) {
    const float* at = values + half * 8;
    w[half] = {F32{at[0], at[2], at[4], at[6]}, F32{at[1], at[3], at[5], at[7]}};
  }
}
template <int kPair>
inline Bf16Pair e2m1_weights(I32 v) {
  constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const auto widen = [&](int32_t code) { return code & 8 ? -kValues[code & 7] : kValues[code & 7]; };
  Bf16Pair w{};
  for (size_t i = 0; i < kLanes; ++i) {
    w.even[i] = widen(v[i] >> (4 * kPair));
    w.odd[i] = widen(v[i] >> (16 + 4 * kPair));
  }
  return w;
}
// Stores a pair of weights as bf16, which represents them exactly, in the form that bf16_weights
// loads.
inline void store_pair(uint8_t* p, Bf16Pair w) {
  const I32 even = as_i32(w.even), odd = as_i32(w.odd);
  for (size_t i = 0; i < kLanes; ++i) {
    const uint32_t word = static_cast<uint32_t>(even[i]) >> 16 | (static_cast<uint32_t>(odd[i]) &
                                                                  0xffff0000);
    __builtin_memcpy(p + i * 4, &word, 4);
  }
}
