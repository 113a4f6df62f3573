// Sums over rows in one order of 64 virtual lanes. Included inside the variant's anonymous namespace,
// after vec_float-inl.h.

constexpr size_t kBlock = 64;

// Reads `count` items as floats into a buffer, which is filled up with zeros.
template <class T>
inline void load_tail(float* tail, const T* x, size_t count, size_t size) {
  for (size_t i = 0; i < count; ++i) tail[i] = widen_one(x[i]);
  for (size_t i = count; i < size; ++i) tail[i] = 0.0f;
}

template <class T>
TANDEM_INLINE inline void add_squares(F32 (&sums)[kBlockVectors], const T* x) {
  for (size_t v = 0; v < kBlockVectors; ++v) {
    const F32 values = load_wide(x + v * kLanes);
    sums[v] = sums[v] + values * values;
  }
}

template <class T>
inline float inverse_rms(const T* x, size_t size, float eps) {
  F32 sums[kBlockVectors];
  for (size_t v = 0; v < kBlockVectors; ++v) sums[v] = zero_f32();
  size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) add_squares(sums, x + i);
  if (i < size) {
    float tail[kBlock];
    load_tail(tail, x + i, size - i, kBlock);
    add_squares(sums, tail);
  }
  const float mean = sum_block(sums) / static_cast<float>(size);
  return 1.0f / __builtin_sqrtf(mean + eps);
}

// Returns the sum of a[i] * b[i] over `size` items, a multiple of 64.
inline float dot_block(const float* a, const float* b, size_t size) {
  F32 sums[kBlockVectors];
  for (size_t v = 0; v < kBlockVectors; ++v) sums[v] = zero_f32();
  for (size_t i = 0; i < size; i += kBlock)
    for (size_t v = 0; v < kBlockVectors; ++v)
      sums[v] = fma(load_f32(a + i + v * kLanes), load_f32(b + i + v * kLanes), sums[v]);
  return sum_block(sums);
}
