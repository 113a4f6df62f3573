// Kernels of the backward pass beside the products of the forward pass: turning (transposing) of
// panels, and the activation's derivative. Included inside the variant's anonymous namespace by
// packed-inl.h; packed_kernels.h describes the functions.
//
// A gradient is a product with a turned panel by the forward direction's own kernel, so its sums
// have one order as well, and a row's gradient does not depend on the other rows.

#include "kernels/weights/transpose-inl.h"

// Inputs that are dequantized at a time: a tile of 8 KiB in fp32.
constexpr size_t kTileInputs = 32;

// Rounds `size` floats, a multiple of 32, to bf16, to nearest even.
inline void store_bf16(uint16_t* out, const float* values, size_t size) {
#if TANDEM_BF16
  for (size_t i = 0; i < size; i += 2 * kLanes) round_pair(out + i, values + i);
#else
  for (size_t i = 0; i < size; ++i) out[i] = round_to_bf16(values[i]);
#endif
}

inline F32 widen_fp16(const uint8_t* p) { return load_fp16(reinterpret_cast<const uint16_t*>(p)); }

// Dequantizes whole chunks of kColumns outputs from `first_column` on: w = scale * (code - centre)
// + minimum, rounded once, as a GGUF decoder does. Products of scales and codes are exact in fp32,
// except the 25 bits of Q6_K's. REQUIRES: num_k <= kUnpackedInputs.
template <size_t kColumns>
void widen_ints(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                size_t first_column, float* tile) {
  Unpacked weights;
  choose_unpacking(format)(format, panel, first_k, num_k, weights);
  const size_t size = code_group_size(format);
  const F32 centre =
      set_f32(format.has_minimum ? 0.0f : static_cast<float>(code_centre(format)));
  for (size_t k = 0; k < num_k; k += 4) {
    const size_t group = (first_k + k) / size - first_k / size;
    for (size_t i = 0; i < kColumns; i += kLanes) {
      const size_t c = first_column + i;
      F32 scale = load_f32(weights.scales[group] + c);
      if (format.table == CodeTable::kE2m1) scale = apply_factor(scale, panel, c);
      const F32 minimum = load_f32(weights.minima[group] + c);
      const I32 words = load_i32(weights.codes + k * kPanelColumns + c * 4);
      unroll<4>([&](auto j) TANDEM_INLINE {
        const I32 code = (words >> (8 * j.value)) & set_i32(0xff);
        store_f32(tile + (k + j.value) * kColumns + i,
                  fma(scale, to_f32(code) - centre, minimum));
      });
    }
  }
}

// Copies the weights of a bf16 panel as [inputs][64 outputs].
void split_bf16(const uint8_t* panel, size_t first_k, size_t num_k, uint16_t* tile) {
  const uint8_t* p = panel + first_k / 2 * kStepBytes;
  for (size_t k = 0; k < num_k; k += 2, p += kStepBytes) {
    uint16_t pairs[2 * kPanelColumns];
    __builtin_memcpy(pairs, p, sizeof pairs);
    uint16_t* even = tile + k * kPanelColumns;
    for (size_t c = 0; c < kPanelColumns; ++c) {
      even[c] = pairs[2 * c];
      even[kPanelColumns + c] = pairs[2 * c + 1];
    }
  }
}

inline F32 even_of(Bf16Pair w) {
#if TANDEM_BF16
  return as_f32(w.v << 16);
#else
  return w.even;
#endif
}
inline F32 odd_of(Bf16Pair w) {
#if TANDEM_BF16
  return as_f32(w.v & set_i32(-65536));
#else
  return w.odd;
#endif
}

// Scaled weights are exact for powers of two, else rounded once.
template <size_t kColumns, int kBits, FloatScales kScales>
void widen_floats(const uint8_t* panel, size_t first_k, size_t num_k, size_t first_column,
                  float* tile) {
  constexpr size_t kGroup = kBits == 8 ? 128 : 32;
  constexpr size_t kStep = kBits == 8 ? 4 : 8;
  constexpr size_t kHeader = kFloatGroupHeader<kScales>;
  constexpr size_t kGroupBytes = kHeader + kPanelColumns * kGroup * kBits / 8;
  for (size_t i = 0; i < num_k; i += kStep) {
    const size_t k = first_k + i;
    const uint8_t* p = panel + kFloatPanelHeader<kScales> + k / kGroup * kGroupBytes;
    const uint8_t* codes = p + kHeader + k % kGroup / kStep * kStepBytes;
    for (size_t column = 0; column < kColumns; column += kLanes) {
      const size_t c = first_column + column;
      F32 scale = load_float_scale<kBits, kScales>(p, c);
      if constexpr (kScales == FloatScales::kRow)
        scale = scale * load_f32(reinterpret_cast<const float*>(panel) + c);
      const I32 words = load_i32(codes + c * 4);
      const auto put = [&](size_t at, Bf16Pair w) TANDEM_INLINE {
        store_f32(tile + (i + at) * kColumns + column, even_of(w) * scale);
        store_f32(tile + (i + at + 1) * kColumns + column, odd_of(w) * scale);
      };
      if constexpr (kBits == 8) {
        Bf16Pair w[2];
        e4m3_weights(words, w);
        put(0, w[0]);
        put(2, w[1]);
      } else {
        unroll<4>([&](auto j) TANDEM_INLINE { put(2 * j.value, e2m1_weights<j.value>(words)); });
      }
    }
  }
}

// Dequantizes a format with codes to [num_k][kColumns outputs] in fp32.
template <size_t kColumns>
void widen_values(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                  size_t first_column, float* out) {
  if (format.is_float && format.bits == 8 && format.group_size == 0)
    widen_floats<kColumns, 8, FloatScales::kRow>(panel, first_k, num_k, first_column, out);
  else if (format.is_float && format.bits == 8)
    widen_floats<kColumns, 8, FloatScales::kGroup>(panel, first_k, num_k, first_column, out);
  else if (format.is_float)
    widen_floats<kColumns, 4, FloatScales::kGroup>(panel, first_k, num_k, first_column, out);
  else
    widen_ints<kColumns>(format, panel, first_k, num_k, first_column, out);
}

// Dequantizes any format to [num_k][kRowColumns outputs] in fp32.
void widen_narrow(const WidenTask& task) {
  const uint8_t* panel = task.panel;
  if (task.format.bits < 16)
    return widen_values<kRowColumns>(task.format, panel, task.first_k, task.num_k,
                                     task.first_column, task.out);
  for (size_t k = 0; k < task.num_k; ++k) {
    for (size_t i = 0; i < kRowColumns; ++i) {
      const size_t at = task.first_k + k, column = task.first_column + i;
      float& value = task.out[k * kRowColumns + i];
      if (task.format.bits == 32)
        value = reinterpret_cast<const float*>(panel)[at * kPanelColumns + column];
      else
        value = float_of(uint32_t{reinterpret_cast<const uint16_t*>(
                             panel)[at / 2 * 2 * kPanelColumns + 2 * column + at % 2]}
                         << 16);
    }
  }
}

// Writes a panel's inputs from first_k on as [kTileInputs][64 outputs] in bf16; zeros beyond num_k.
void make_tile(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
               uint16_t* tile) {
  if (num_k < kTileInputs)
    __builtin_memset(tile + num_k * kPanelColumns, 0, (kTileInputs - num_k) * kPanelColumns * 2);
  if (format.bits == 16) return split_bf16(panel, first_k, num_k, tile);
  alignas(64) float wide[kTileInputs * kPanelColumns];
  widen_values<kPanelColumns>(format, panel, first_k, num_k, 0, wide);
  store_bf16(tile, wide, num_k * kPanelColumns);
}

void widen(const WidenTask& task) {
  if (task.is_narrow) return widen_narrow(task);
  const uint8_t* panel = task.panel;
  if (task.format.bits == 32) {
    const size_t count = task.num_k * kPanelColumns;
    __builtin_memcpy(task.out, panel + task.first_k * kStepBytes, count * sizeof(float));
  } else if (task.format.bits == 16) {
    for (size_t i = 0; i < task.num_k; i += kTileInputs) {
      alignas(64) uint16_t tile[kTileInputs * kPanelColumns];
      const size_t left = task.num_k - i, count = left < kTileInputs ? left : kTileInputs;
      split_bf16(panel, task.first_k + i, count, tile);
      for (size_t c = 0; c < count * kPanelColumns; ++c)
        task.out[i * kPanelColumns + c] = float_of(uint32_t{tile[c]} << 16);
    }
  } else {
    widen_values<kPanelColumns>(task.format, panel, task.first_k, task.num_k, 0, task.out);
  }
}

#if TANDEM_BF16
#include "kernels/weights/turn_avx512-inl.h"
#else
inline bool turn_in_registers(const WeightFormat&, const uint8_t*, size_t, size_t, size_t,
                              uint8_t*) {
  return false;
}
#endif

// Turns a part of an fp32 panel: copies it to [outputs][64 inputs].
void turn_f32(const TurnTask& task) {
  float* out = reinterpret_cast<float*>(task.out);
  for (size_t p = 0; p < task.num_panels; ++p, out += kPanelColumns * kPanelColumns) {
    const uint8_t* panel = task.panels + p * task.panel_stride + task.first_k * kStepBytes;
    for (size_t k = 0; k < kPanelColumns; k += kLanes) {
      for (size_t c = 0; c < kPanelColumns; c += kLanes) {
        I32 square[kLanes];
        unroll<kLanes>([&](auto i) TANDEM_INLINE {
          const size_t at = k + i.value;
          square[i.value] =
              at < task.num_k ? load_i32(panel + at * kStepBytes + c * 4) : set_i32(0);
        });
        transpose(square);
        unroll<kLanes>([&](auto i) TANDEM_INLINE {
          store_i32(out + (c + i.value) * kPanelColumns + k, square[i.value]);
        });
      }
    }
  }
}

void turn(const TurnTask& task) {
  if (task.format.bits == 32) return turn_f32(task);
  constexpr size_t kTileWords = kPanelColumns / 2;  // Of a row: two outputs each.
  alignas(64) uint16_t tile[kTileInputs * kPanelColumns];
  uint8_t* out = task.out;
  for (size_t p = 0; p < task.num_panels; ++p, out += kTileWords * kStepBytes) {
    const uint8_t* panel = task.panels + p * task.panel_stride;
    for (size_t k = 0; k < kPanelColumns; k += kTileInputs) {
      const size_t left = task.num_k > k ? task.num_k - k : 0;
      const size_t num_k = left < kTileInputs ? left : kTileInputs;
      if (turn_in_registers(task.format, panel, task.panel_stride, task.first_k + k, num_k,
                            out + k * 4))
        continue;
      make_tile(task.format, panel, task.first_k + k, num_k, tile);
      for (size_t row = 0; row < kTileInputs; row += kLanes) {
        for (size_t word = 0; word < kTileWords; word += kLanes) {
          I32 square[kLanes];
          unroll<kLanes>([&](auto i) TANDEM_INLINE {
            square[i.value] = load_i32(tile + (row + i.value) * kPanelColumns + 2 * word);
          });
          transpose(square);
          unroll<kLanes>([&](auto i) TANDEM_INLINE {
            store_i32(out + (word + i.value) * kStepBytes + (k + row) * 4, square[i.value]);
          });
        }
      }
    }
  }
}

// An activation function with a limited gate: its value and its derivative.
struct Slope {
  F32 value, slope;
};
inline Slope differentiate(const Activation& activation, F32 g) {
  const F32 one = set_f32(1.0f), lowest = set_f32(-87.0f);
  if (activation.kind == ActivationKind::kGeluErf) {
    g = at_least(g, set_f32(-20.0f));
    const F32 half = set_f32(0.5f);
    const F32 part = fma(half, erf_f32(g * set_f32(0.707106781187f), exp_f32), half);
    const F32 density = exp_f32(at_least(zero_f32() - half * g * g, lowest));
    return {g * part, fma(g * set_f32(0.398942280401f), density, part)};
  }
  F32 z, dz;
  if (activation.kind == ActivationKind::kGeluTanh) {
    g = at_least(g, set_f32(-10.0f));
    const F32 square = g * g;
    z = g * fma(square, set_f32(0.0713548162726f), set_f32(1.59576912161f));
    dz = fma(square, set_f32(0.2140644488178f), set_f32(1.59576912161f));
  } else {
    g = at_least(g, set_f32(-87.0f / activation.alpha));
    dz = set_f32(activation.alpha);
    z = dz * g;
  }
  const F32 s = one / (one + exp_f32(at_least(zero_f32() - z, lowest)));
  return {g * s, s * fma(g * dz, one - s, one)};
}

inline F32 load_value(const float* p) { return load_f32(p); }
inline F32 load_value(const uint16_t* p) { return load_bf16(p); }
inline void store_values(float* out, const float* values, size_t size) {
  __builtin_memcpy(out, values, size * sizeof(float));
}
inline void store_values(uint16_t* out, const float* values, size_t size) {
  store_bf16(out, values, size);
}

template <class T>
void activate_rows_back(const ActivateBackTask& task) {
  const F32 limit = set_f32(task.activation.limit), offset = set_f32(task.activation.up_offset);
  alignas(64) float d_gate[kPanelColumns], d_up[kPanelColumns];
  for (size_t row = 0; row < task.num_rows; ++row) {
    const size_t at = row * task.row_stride;
    const F32 weight = set_f32(task.weights[row]);
    F32 sum = zero_f32();
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      const F32 gate = load_value(static_cast<const T*>(task.gate) + at + c);
      const F32 up = load_value(static_cast<const T*>(task.up) + at + c);
      const F32 u = at_most(at_least(up, zero_f32() - limit), limit) + offset;
      const Slope f = differentiate(task.activation, at_most(gate, limit));
      const F32 dh = load_f32(task.dh + row * kPanelColumns + c);
      sum = fma(dh, f.value * u, sum);
      F32 scaled = dh * weight;
      if (task.extra != nullptr)
        scaled = scaled + load_f32(task.extra + row * task.extra_stride + c);
      // Beyond the limit the gate is constant, so its derivative is 0.
      const I32 is_cut = is_less(limit, gate);
      const I32 is_up_cut = is_less(limit, as_f32(as_i32(up) & set_i32(INT32_MAX)));
      store_f32(d_gate + c, as_f32(select(is_cut, set_i32(0), as_i32(scaled * u * f.slope))));
      store_f32(d_up + c, as_f32(select(is_up_cut, set_i32(0), as_i32(scaled * f.value))));
    }
    store_values(static_cast<T*>(task.d_gate) + at, d_gate, kPanelColumns);
    store_values(static_cast<T*>(task.d_up) + at, d_up, kPanelColumns);
    float lanes[kLanes], total = 0.0f;
    store_f32(lanes, sum);
    for (size_t i = 0; i < kLanes; ++i) total += lanes[i];
    task.d_weights[row] = total;
  }
}

void activate_back(const ActivateBackTask& task) {
  if (task.is_f32) return activate_rows_back<float>(task);
  activate_rows_back<uint16_t>(task);
}
