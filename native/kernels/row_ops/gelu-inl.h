// GELU of a register, in both of its forms. Included inside a variant's anonymous namespace, after
// vec_float-inl.h and erf-inl.h. Cut off where the result is 0 to within 1e-36.

// Computes GELU's tanh form with an absolute error below 4 units of 2^-24, as x / (1 + exp(-z)),
// because tanh(z / 2) = 2 sigmoid(z) - 1.
TANDEM_INLINE inline F32 gelu_tanh(F32 x) {
  x = at_least(x, set_f32(-10.0f));
  // 2 sqrt(2 / pi) (x + 0.044715 x^3).
  const F32 cubic = fma(x * x, set_f32(0.0713548162726f), set_f32(1.59576912161f));
  return x * sigmoid(x * cubic);
}

TANDEM_INLINE inline F32 gelu_erf(F32 x) {
  // Limit x: at -infinity the product would be NaN.
  x = at_least(x, set_f32(-20.0f));
  const F32 half = set_f32(0.5f) * x;
  return fma(half, erf_f32(x * set_f32(0.707106781187f), exp_nonpositive), half);
}
