// Pairs of bf16 in a lane, widened to two floats, for targets without an instruction that
// multiplies such pairs. Included inside the variant's anonymous namespace by vec_*-inl.h, which
// has their `dot`.

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
