// Turning panels in registers, where there are AVX-512 and its bf16: the weights of two outputs are
// an item of 64 bits, and squares of 8 x 8 such items are transposed. Included by backward-inl.h.

// Byte order that, within two words of two values each, puts the first values before the second
// ones.
constexpr uint8_t kByHalves[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
// Byte order that, within two words of four bytes each, puts the first bytes first, then the second
// ones, and so on.
constexpr uint8_t kByBytes[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
// Byte order that does the same as kByBytes for e4m3's layout, where 128 bits hold k = 0, 1 of four
// outputs, then k = 2, 3.
constexpr uint8_t kFromE4m3[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

TANDEM_INLINE inline I32 order_bytes(I32 v, const uint8_t (&order)[16]) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  return (I32)_mm512_shuffle_epi8(raw(v), _mm512_broadcast_i32x4(bytes));
}

// Transposes a square of 8 x 8 items of 64 bits: item i of vector j becomes item j of vector i.
TANDEM_INLINE inline void transpose_items(I32 (&m)[8]) {
  I32 half[2][4];
  unroll<4>([&](auto i) TANDEM_INLINE {
    half[0][i.value] = unpack<2, 0>(m[2 * i.value], m[2 * i.value + 1], Lanes{});
    half[1][i.value] = unpack<2, 1>(m[2 * i.value], m[2 * i.value + 1], Lanes{});
  });
  unroll<2>([&](auto odd) TANDEM_INLINE {
    constexpr int h = decltype(odd)::value;
    const I32 even01 = pick_quarters<0>(half[h][0], half[h][1], Lanes{});
    const I32 odd01 = pick_quarters<1>(half[h][0], half[h][1], Lanes{});
    const I32 even23 = pick_quarters<0>(half[h][2], half[h][3], Lanes{});
    const I32 odd23 = pick_quarters<1>(half[h][2], half[h][3], Lanes{});
    m[h] = pick_quarters<0>(even01, even23, Lanes{});
    m[4 + h] = pick_quarters<1>(even01, even23, Lanes{});
    m[2 + h] = pick_quarters<0>(odd01, odd23, Lanes{});
    m[6 + h] = pick_quarters<1>(odd01, odd23, Lanes{});
  });
}

// Loads eight steps of a panel's words, and prefetches those that are `next` bytes further.
TANDEM_INLINE inline void load_steps(const uint8_t* p, size_t next, I32 (&m)[8],
                                     const uint8_t (&order)[16]) {
  unroll<8>([&](auto i) TANDEM_INLINE {
    __builtin_prefetch(p + i.value * kStepBytes + next);
    m[i.value] = order_bytes(load_i32(p + i.value * kStepBytes), order);
  });
}

// Turns inputs [first_k, first_k + 32) of a bf16 panel.
void turn_bf16(const uint8_t* panel, size_t next, size_t first_k, uint8_t* out) {
  for (size_t k = 0; k < kTileInputs; k += 16)
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      I32 m[8];
      load_steps(panel + (first_k + k) / 2 * kStepBytes + c * 4, next, m, kByHalves);
      transpose_items(m);
      unroll<8>([&](auto i) TANDEM_INLINE {
        store_i32(out + (c / 2 + i.value) * kStepBytes + k * 4, m[i.value]);
      });
    }
}

TANDEM_INLINE inline F32 load_pair(const float* p) {
  int64_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return _mm512_castsi512_ps(_mm512_set1_epi64(pair));
}

// Loads sixteen e4m3 codes as floats, times 2^-8; the conversion from fp16 normalises subnormal
// ones.
TANDEM_INLINE inline F32 load_e4m3(const uint8_t* p) {
  const __m256i codes =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i fields = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1), fields));
}

// Scales and minima of all outputs of a panel, for sixteen of its inputs.
struct PanelScales {
  alignas(64) float scale[kPanelColumns];
  alignas(64) float minimum[kPanelColumns];
};

// Widens the codes of 32 inputs of two outputs to words of two bf16, the outputs in turn.
template <bool kIsE4m3>
TANDEM_INLINE inline void widen_codes(I32 codes, size_t column, F32 offset,
                                      const PanelScales (&scales)[2], uint8_t* out) {
  alignas(64) uint8_t bytes[64];
  store_i32(bytes, codes);
  for (size_t half = 0; half < 2; ++half) {
    const F32 scale = load_pair(scales[half].scale + column);
    const F32 minimum = load_pair(scales[half].minimum + column);
    F32 w[2];
    unroll<2>([&](auto i) TANDEM_INLINE {
      const uint8_t* p = bytes + 32 * half + 16 * i.value;
      if constexpr (kIsE4m3)
        w[i.value] = load_e4m3(p) * scale;
      else
        w[i.value] = fma(scale, to_f32(load_u8(p)) - offset, minimum);
    });
    _mm512_storeu_si512(out + 64 * half, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
  }
}

// Turns inputs [first_k, first_k + 32) of a panel of int8, int4 or e4m3 codes.
template <int kBits, bool kIsE4m3>
void turn_codes(const WeightFormat& format, const uint8_t* panel, size_t next, size_t first_k,
                uint8_t* out) {
  const bool is_row = format.group_size == 0;
  const size_t group =
      kIsE4m3 ? 128 : static_cast<size_t>(is_row ? kRowGroupSize : format.group_size);
  const size_t group_header =
      kIsE4m3 ? kFloatHeaderBytes : kScaleBytes * (format.has_minimum ? 2 : 1);
  const size_t header = is_row ? 0 : group_header;
  const size_t group_bytes = header + kPanelColumns * group * kBits / 8;
  const uint8_t* groups = panel + (is_row ? (kIsE4m3 ? kRowHeaderBytes : kScaleBytes) : 0);
  const F32 offset = set_f32(format.has_minimum ? 0.0f : static_cast<float>(1 << (kBits - 1)));
  PanelScales scales[2];
  const uint8_t* codes[2];
  for (size_t half = 0; half < 2; ++half) {
    const size_t k = first_k + 16 * half;
    const uint8_t* p = groups + k / group * group_bytes;
    const uint8_t* from = is_row ? panel : p;
    codes[half] = p + header + k % group * kPanelColumns * kBits / 8;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      F32 scale;
      if constexpr (kIsE4m3)  // A block's header is the same 16 numbers for all columns.
        scale = load_f32(reinterpret_cast<const float*>(from) + (is_row ? c : 0)) * set_f32(256.0f);
      else
        scale = widen_fp16(from + c * 2);
      store_f32(scales[half].scale + c, scale);
      store_f32(scales[half].minimum + c, !kIsE4m3 && format.has_minimum
                                              ? widen_fp16(from + kScaleBytes + c * 2)
                                              : zero_f32());
    }
  }
  constexpr size_t kHalfSteps = 16 * kBits / 32;  // Of sixteen inputs.
  for (size_t c = 0; c < kPanelColumns; c += kLanes) {
    I32 m[8];
    unroll<2 * kHalfSteps>([&](auto i) TANDEM_INLINE {
      const uint8_t* p = codes[i.value / kHalfSteps] + i.value % kHalfSteps * kStepBytes + c * 4;
      __builtin_prefetch(p + next);
      const I32 words = order_bytes(load_i32(p), kIsE4m3 ? kFromE4m3 : kByBytes);
      if constexpr (kBits == 8) {
        m[i.value] = words;
      } else {
        m[2 * i.value] = low_nibbles(words);
        m[2 * i.value + 1] = high_nibbles(words);
      }
    });
    transpose_items(m);
    unroll<8>([&](auto i) TANDEM_INLINE {
      const size_t pair = c / 2 + i.value;
      widen_codes<kIsE4m3>(m[i.value], 2 * pair, offset, scales, out + pair * kStepBytes);
    });
  }
}

// Turns a range of inputs in registers; returns false if the format cannot be turned here.
bool turn_in_registers(const WeightFormat& format, const uint8_t* panel, size_t next,
                       size_t first_k, size_t num_k, uint8_t* out) {
  const bool is_nibbles = format.bits == 4 && !format.is_float && format.table == CodeTable::kNone &&
                          !format.has_zeros;
  if (num_k < kTileInputs || format.scale_bits != 0) return false;
  if (format.bits != 16 && format.bits != 8 && !is_nibbles) return false;
  if (format.bits == 16)
    turn_bf16(panel, next, first_k, out);
  else if (format.is_float)
    turn_codes<8, true>(format, panel, next, first_k, out);
  else if (format.bits == 8)
    turn_codes<8, false>(format, panel, next, first_k, out);
  else
    turn_codes<4, false>(format, panel, next, first_k, out);
  return true;
}
