// GELU of a register, in both of its forms. Included inside a variant's anonymous namespace, after
// vec_float-inl.h. Cut off where the result is 0 to within 1e-36.

// Absolute error below 4 units of 2^-24; from x / (1 + exp(-z)) with tanh(z / 2) = 2 sigmoid(z) - 1.
TANDEM_INLINE inline F32 gelu_tanh(F32 x) {
  x = at_least(x, set_f32(-10.0f));
  // 2 sqrt(2 / pi) (x + 0.044715 x^3).
  const F32 cubic = fma(x * x, set_f32(0.0713548162726f), set_f32(1.59576912161f));
  return x * sigmoid(x * cubic);
}

// erf to 2 ulp: a polynomial about 0, and 1 - exp(polynomial) beyond 0.92. The coefficients are
// minimax fits; a test compares with the C library's erf.
TANDEM_INLINE inline F32 erf_of(F32 x) {
  const F32 t = at_most(x < 0.0f ? zero_f32() - x : x, set_f32(10.0f));
  const F32 s = t * t;
  F32 far = fma(set_f32(-1.72853470e-5f), t, set_f32(3.83197126e-4f));
  const F32 u = fma(set_f32(-3.88396438e-3f), t, set_f32(2.42546219e-2f));
  far = fma(far, s, u);
  far = fma(far, t, set_f32(-1.06777877e-1f));
  far = fma(far, t, set_f32(-6.34846687e-1f));
  far = fma(far, t, set_f32(-1.28717512e-1f));
  far = fma(far, t, zero_f32() - t);
  far = set_f32(1.0f) - exp_nonpositive(far);
  F32 near = set_f32(-5.96761703e-4f);
  near = fma(near, s, set_f32(4.99119423e-3f));
  near = fma(near, s, set_f32(-2.67681349e-2f));
  near = fma(near, s, set_f32(1.12819925e-1f));
  near = fma(near, s, set_f32(-3.76125336e-1f));
  near = fma(near, s, set_f32(1.28379166e-1f));
  near = fma(near, t, t);
  const F32 result = t > 0.921875f ? far : near;
  return x < 0.0f ? zero_f32() - result : result;
}

TANDEM_INLINE inline F32 gelu_erf(F32 x) {
  // At infinity the product would be NaN.
  x = at_least(x, set_f32(-20.0f));
  const F32 half = set_f32(0.5f) * x;
  return fma(half, erf_of(x * set_f32(0.707106781187f)), half);
}
