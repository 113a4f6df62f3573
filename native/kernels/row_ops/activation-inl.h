// The activations of a feed-forward block. Included inside the variant's anonymous namespace by
// packed-inl.h.

// Computes exp to 2 ulp for x in [-87, 88], with the coefficients of Cephes' expf. NaN stays NaN.
inline F32 exp_f32(F32 x) {
  // The exponent's bias is added with the rounding constant, so the low bits are ready to shift.
  const F32 rounder = set_f32(kRounder + 127.0f);
  const F32 biased = fma(x, set_f32(1.44269504088896341f), rounder);
  const F32 n = biased - rounder;
  F32 r = fma(n, set_f32(-0.693359375f), x);
  r = fma(n, set_f32(2.12194440e-4f), r);
  F32 p = set_f32(1.9875691500e-4f);
  p = fma(p, r, set_f32(1.3981999507e-3f));
  p = fma(p, r, set_f32(8.3334519073e-3f));
  p = fma(p, r, set_f32(4.1665795894e-2f));
  p = fma(p, r, set_f32(1.6666665459e-1f));
  p = fma(p, r, set_f32(5.0000001201e-1f));
  p = fma(p, r * r, r) + set_f32(1.0f);
  return p * as_f32(shift_left_23(as_i32(biased)));
}

// Computes x * sigmoid(z) for x and z of the same sign. z is limited to -87 or more; the result
// there is 0 to within 1e-36 if x is limited at the same place.
inline F32 gate_by(F32 x, F32 z) {
  const F32 lowest = set_f32(-87.0f);
  return x / (set_f32(1.0f) + exp_f32(at_least(zero_f32() - z, lowest)));
}

inline F32 silu(F32 g, float alpha) {
  g = at_least(g, set_f32(-87.0f / alpha));
  return gate_by(g, set_f32(alpha) * g);
}

// g is limited to -10 or more: at -10 the tanh form of GELU is 1e-37.
inline F32 gelu_tanh(F32 g) {
  g = at_least(g, set_f32(-10.0f));
  // 2 sqrt(2 / pi) (g + 0.044715 g^3): tanh(z / 2) is 2 sigmoid(z) - 1.
  const F32 cubic = fma(g * g, set_f32(0.0713548162726f), set_f32(1.59576912161f));
  return gate_by(g, g * cubic);
}

inline F32 gelu_erf(F32 g) {
  // Limit g: beyond the limit the result is 0, and for -infinity the formula would not give 0.
  g = at_least(g, set_f32(-20.0f));
  const F32 half = set_f32(0.5f) * g;
  return fma(half, erf_f32(g * set_f32(0.707106781187f), exp_f32), half);
}

// Replaces each gate by the activation of gate and up; see packed_kernels.h.
void activate(const Activation& activation, float* gate, const float* up, size_t size) {
  const F32 limit = set_f32(activation.limit), offset = set_f32(activation.up_offset);
  for (size_t i = 0; i < size; i += kLanes) {
    F32 g = at_most(load_f32(gate + i), limit);
    const F32 u = at_most(at_least(load_f32(up + i), zero_f32() - limit), limit) + offset;
    if (activation.kind == ActivationKind::kSilu)
      g = silu(g, activation.alpha);
    else if (activation.kind == ActivationKind::kGeluTanh)
      g = gelu_tanh(g);
    else
      g = gelu_erf(g);
    store_f32(gate + i, g * u);
  }
}
