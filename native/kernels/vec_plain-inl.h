// Four lanes in the compiler's own vector type: any target. Included inside the variant's
// anonymous namespace, as its siblings are; what each function means is said here.

inline constexpr size_t kLanes = 4;
typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));

// Rows of a register block, and vectors of columns beside them.
inline constexpr int kMaxRows = 2;
constexpr int vectors_beside(int) { return 1; }
constexpr int bf16_vectors_beside(int) { return 1; }

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
inline void store_f32(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }
// One rounding, as in hardware, so that integer formats agree bitwise across ISAs.
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
// The bound where x is beyond it; x itself where it is NaN.
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

inline F32 load_fp16(const uint16_t* p) {
  F32 r;
  for (size_t i = 0; i < kLanes; ++i) {
    // The exponent is rebased by a multiplication, which also normalises subnormals.
    const uint32_t magnitude = static_cast<uint32_t>(p[i] & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16;
    float value;
    __builtin_memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    r[i] = sign ? -value : value;
  }
  return r;
}

// Four 8-bit products per lane: weights unsigned, activations signed.
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
inline I32 low_nibbles(I32 v) { return v & 0x0f0f0f0f; }
inline I32 high_nibbles(I32 v) { return (v >> 4) & 0x0f0f0f0f; }

// Two bf16 products per lane. Each product is exact in fp32, so adding it rounds as an fma does.
struct Bf16Pair {
  F32 even, odd;
};
inline Bf16Pair bf16_weights(I32 v) {
  return {as_f32(v << 16), as_f32(v & static_cast<int32_t>(0xffff0000))};
}
inline Bf16Pair bf16_row(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return bf16_weights(set_i32(word));
}
inline F32 dot(F32 acc, Bf16Pair w, Bf16Pair a) {
  acc = w.even * a.even + acc;
  return w.odd * a.odd + acc;
}
