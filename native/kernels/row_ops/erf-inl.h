// The error function of a register. Included inside a variant's anonymous namespace, after
// TANDEM_VEC_HEADER.

// Computes erf to 2 ulp: by a polynomial near 0, and by 1 - exp(polynomial) beyond 0.92. The
// coefficients are minimax fits; a test compares with the C library's erf. `exp_of` takes values in
// [-87, 0].
template <class Exp>
TANDEM_INLINE inline F32 erf_f32(F32 x, Exp exp_of) {
  const I32 sign = as_i32(x) & set_i32(INT32_MIN);
  const F32 t = at_most(as_f32(as_i32(x) & set_i32(INT32_MAX)), set_f32(10.0f));
  const F32 s = t * t;
  F32 far = fma(set_f32(-1.72853470e-5f), t, set_f32(3.83197126e-4f));
  const F32 u = fma(set_f32(-3.88396438e-3f), t, set_f32(2.42546219e-2f));
  far = fma(far, s, u);
  far = fma(far, t, set_f32(-1.06777877e-1f));
  far = fma(far, t, set_f32(-6.34846687e-1f));
  far = fma(far, t, set_f32(-1.28717512e-1f));
  far = fma(far, t, zero_f32() - t);
  far = set_f32(1.0f) - exp_of(at_least(far, set_f32(-87.0f)));
  F32 near = set_f32(-5.96761703e-4f);
  near = fma(near, s, set_f32(4.99119423e-3f));
  near = fma(near, s, set_f32(-2.67681349e-2f));
  near = fma(near, s, set_f32(1.12819925e-1f));
  near = fma(near, s, set_f32(-3.76125336e-1f));
  near = fma(near, s, set_f32(1.28379166e-1f));
  near = fma(near, t, t);
  return as_f32(select(is_less(set_f32(0.921875f), t), as_i32(far), as_i32(near)) | sign);
}
