// Products with packed weights in fp32, for gradients. Included inside the variant's anonymous
// namespace by packed-inl.h; what the functions do is said in packed_kernels.h.
//
// A block of kGradInputs inputs of a panel is widened into L1, [inputs][64 outputs], and multiplied
// there: nothing larger is ever dequantized. Every output has one chain of fused multiply-adds,
// panels and outputs (or inputs) ascending, so a row's gradient does not depend on the other rows.

constexpr size_t kTileSize = kGradInputs * kPanelColumns;

inline F32 widen_fp16(const uint8_t* p) { return load_fp16(reinterpret_cast<const uint16_t*>(p)); }

// w = scale * (code - offset) is exact in fp32; with a minimum it is rounded once.
void widen_ints(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                float* tile) {
  const bool is_row = format.group_size == 0;
  const size_t group = static_cast<size_t>(is_row ? kRowGroupSize : format.group_size);
  const size_t header = is_row ? 0 : kScaleBytes * (format.has_minimum ? 2 : 1);
  const size_t group_bytes =
      header + kPanelColumns * group * static_cast<size_t>(format.bits) / 8;
  const uint8_t* groups = panel + (is_row ? kScaleBytes : 0);
  const F32 offset = set_f32(format.has_minimum ? 0.0f : static_cast<float>(1 << (format.bits - 1)));
  const size_t step = format.bits == 8 ? 4 : 8;
  for (size_t k = 0; k < num_k; k += step) {
    const uint8_t* p = groups + (first_k + k) / group * group_bytes;
    const uint8_t* scales = is_row ? panel : p;
    const uint8_t* codes = p + header + (first_k + k) % group / step * kStepBytes;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      const F32 scale = widen_fp16(scales + c * 2);
      const F32 minimum = format.has_minimum ? widen_fp16(scales + kScaleBytes + c * 2) : zero_f32();
      const I32 words = load_i32(codes + c * 4);
      const auto put = [&](size_t i, I32 code) TANDEM_INLINE {
        store_f32(tile + (k + i) * kPanelColumns + c, fma(scale, to_f32(code) - offset, minimum));
      };
      for (int i = 0; i < 4; ++i) {
        const I32 byte = (words >> (8 * i)) & set_i32(0xff);
        if (format.bits == 8) {
          put(static_cast<size_t>(i), byte);
        } else {
          put(static_cast<size_t>(i), byte & set_i32(0x0f));
          put(static_cast<size_t>(i) + 4, byte >> 4);
        }
      }
    }
  }
}

void widen_bf16(const uint8_t* panel, size_t first_k, size_t num_k, float* tile) {
  const uint8_t* p = panel + first_k / 2 * kStepBytes;
  for (size_t k = 0; k < num_k; k += 2, p += kStepBytes) {
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      const I32 pair = load_i32(p + c * 4);
      store_f32(tile + k * kPanelColumns + c, as_f32(pair << 16));
      store_f32(tile + (k + 1) * kPanelColumns + c, as_f32(pair & set_i32(-65536)));
    }
  }
}

// e4m3 and e2m1 by a table, one code at a time.
void widen_floats(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                  float* tile) {
  const bool is_e4m3 = format.bits == 8;
  const uint32_t mantissa = is_e4m3 ? 3 : 1;
  const int32_t bias = is_e4m3 ? 7 : 1;
  float values[128];
  for (uint32_t code = 0; code < (is_e4m3 ? 128u : 8u); ++code) {
    const uint32_t exponent = code >> mantissa, fraction = code & ((1u << mantissa) - 1);
    const float whole = static_cast<float>(fraction + (exponent ? 1u << mantissa : 0));
    const int32_t power = static_cast<int32_t>(exponent ? exponent : 1) - bias -
                          static_cast<int32_t>(mantissa);
    values[code] = whole * float_of(static_cast<uint32_t>(127 + power) << 23);
  }
  const size_t group = is_e4m3 ? 128 : 32;
  const size_t group_bytes =
      kFloatHeaderBytes + kPanelColumns * group * static_cast<size_t>(format.bits) / 8;
  for (size_t i = 0; i < num_k; ++i) {
    const size_t k = first_k + i;
    const uint8_t* p = panel + k / group * group_bytes;
    for (size_t c = 0; c < kPanelColumns; ++c) {
      float value, scale;
      bool is_negative;
      if (is_e4m3) {
        const uint8_t code = p[kFloatHeaderBytes + k % group / 4 * kStepBytes + c / 4 * 16 +
                               k % 4 / 2 * 8 + c % 4 * 2 + k % 2];
        value = values[code & 127];
        is_negative = code > 127;
        __builtin_memcpy(&scale, p, sizeof scale);
      } else {
        const uint8_t* at = p + kFloatHeaderBytes + k % group / 8 * kStepBytes + c * 4;
        uint32_t word;
        __builtin_memcpy(&word, at, sizeof word);
        const uint32_t code = word >> (16 * (k % 2) + 4 * (k % 8 / 2)) & 15;
        value = values[code & 7];
        is_negative = code > 7;
        scale = float_of(static_cast<uint32_t>(p[c]) << 23);
      }
      tile[i * kPanelColumns + c] = scale * (is_negative ? -value : value);
    }
  }
}

// tile[k][64] for inputs [first_k, first_k + num_k) of a panel.
void widen_panel(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                 float* tile) {
  if (format.bits == 16)
    widen_bf16(panel, first_k, num_k, tile);
  else if (format.is_float)
    widen_floats(format, panel, first_k, num_k, tile);
  else
    widen_ints(format, panel, first_k, num_k, tile);
}

// out[row][64] += sum over num_k inputs of x[row][k] * tile[k][64].
template <int kRows>
void add_rows(const float* const* x, size_t first_k, size_t num_k, const float* tile, float* out) {
  F32 sum[kRows][kPanelVectors > 4 ? 4 : kPanelVectors];
  constexpr int kVectors = sizeof(sum[0]) / sizeof(F32);
  for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sum[r.value][v.value] =
            load_f32(out + r.value * kPanelColumns + column + v.value * kLanes);
      });
    });
    for (size_t k = 0; k < num_k; ++k) {
      const float* w = tile + k * kPanelColumns + column;
      unroll<kRows>([&](auto r) TANDEM_INLINE {
        const F32 value = set_f32(x[r.value][first_k + k]);
        unroll<kVectors>([&](auto v) TANDEM_INLINE {
          sum[r.value][v.value] = fma(value, load_f32(w + v.value * kLanes), sum[r.value][v.value]);
        });
      });
    }
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        store_f32(out + r.value * kPanelColumns + column + v.value * kLanes,
                  sum[r.value][v.value]);
      });
    });
  }
}

constexpr size_t kGradRows = kLanes == 16 ? 6 : 2;

void recompute(const RecomputeTask& task) {
  alignas(64) float tile[kTileSize];
  __builtin_memset(task.out, 0, task.num_rows * kPanelColumns * sizeof(float));
  for (size_t k = 0; k < task.num_inputs; k += kGradInputs) {
    const size_t left = task.size - k;
    const size_t num_k = left < kGradInputs ? left : kGradInputs;
    // Panels hold whole groups; of x there are the inputs alone.
    const size_t inputs_left = task.num_inputs - k;
    const size_t num_inputs = inputs_left < num_k ? inputs_left : num_k;
    widen_panel(task.format, task.panel, k, num_k, tile);
    for (size_t row = 0; row < task.num_rows;) {
      const float* x[kGradRows];
      const size_t rest = task.num_rows - row;
      const size_t count = rest < kGradRows ? 1 : kGradRows;
      for (size_t i = 0; i < count; ++i)
        x[i] = task.x + static_cast<size_t>(task.row_ids[row + i]) * task.x_stride;
      float* out = task.out + row * kPanelColumns;
      if (count == 1)
        add_rows<1>(x, k, num_inputs, tile, out);
      else
        add_rows<kGradRows>(x, k, num_inputs, tile, out);
      row += count;
    }
  }
}

// out[kInputs][kVectors * kLanes rows] += sum over 64 outputs n of tile[k][n] * a[n][rows].
constexpr size_t kGradBlock = kLanes == 16 ? 8 : 4;
template <int kVectors>
void add_outputs(const float* tile, const float* a, size_t stride, float* out) {
  F32 sum[kGradBlock][kVectors];
  unroll<kGradBlock>([&](auto k) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      sum[k.value][v.value] = load_f32(out + k.value * stride + v.value * kLanes);
    });
  });
  for (size_t n = 0; n < kPanelColumns; ++n) {
    F32 row[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      row[v.value] = load_f32(a + n * stride + v.value * kLanes);
    });
    unroll<kGradBlock>([&](auto k) TANDEM_INLINE {
      const F32 w = set_f32(tile[k.value * kPanelColumns + n]);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sum[k.value][v.value] = fma(w, row[v.value], sum[k.value][v.value]);
      });
    });
  }
  unroll<kGradBlock>([&](auto k) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      store_f32(out + k.value * stride + v.value * kLanes, sum[k.value][v.value]);
    });
  });
}

void multiply_back(const BackTask& task) {
  alignas(64) float tile[kTileSize];
  const size_t num_k = (task.num_k + kGradBlock - 1) / kGradBlock * kGradBlock;
  __builtin_memset(tile + task.num_k * kPanelColumns, 0,
                   (num_k - task.num_k) * kPanelColumns * sizeof(float));
  for (size_t p = 0; p < task.num_panels; ++p) {
    widen_panel(task.format, task.panels + p * task.panel_stride, task.first_k, task.num_k, tile);
    const float* a = task.a + p * kPanelColumns * task.row_stride;
    for (size_t k = 0; k < num_k; k += kGradBlock) {
      const float* w = tile + k * kPanelColumns;
      float* out = task.out + k * task.row_stride;
      size_t row = 0;
      for (; row + 3 * kLanes <= task.row_stride; row += 3 * kLanes)
        add_outputs<3>(w, a + row, task.row_stride, out + row);
      for (; row < task.row_stride; row += kLanes)
        add_outputs<1>(w, a + row, task.row_stride, out + row);
    }
  }
}

// One gate and up column of all rows: gradients before the activation, and of the router weights.
void activate_back(const ActivateBackTask& task) {
  const float alpha = task.activation.alpha;
  const F32 limit = set_f32(task.activation.limit), offset = set_f32(task.activation.up_offset);
  const F32 one = set_f32(1.0f);
  for (size_t i = 0; i < task.size; i += task.row_stride) {
    for (size_t row = 0; row < task.row_stride; row += kLanes) {
      const F32 gate = load_f32(task.gate + i + row), up = load_f32(task.up + i + row);
      const F32 g = at_least(at_most(gate, limit), set_f32(-87.0f / alpha));
      const F32 u = at_most(at_least(up, zero_f32() - limit), limit) + offset;
      const F32 s = one / (one + exp_f32(at_least(zero_f32() - set_f32(alpha) * g, set_f32(-87.0f))));
      const F32 f = g * s;
      const F32 slope = s * fma(set_f32(alpha) * g, one - s, one);
      const F32 dh = load_f32(task.dh + i + row);
      const F32 scaled = dh * load_f32(task.weights + row);
      const F32 sum = load_f32(task.d_weights + row);
      store_f32(task.d_weights + row, fma(dh, f * u, sum));
      // Beyond the limit nothing changes.
      const I32 is_cut = is_less(limit, gate);
      const I32 is_up_cut = is_less(limit, as_f32(as_i32(up) & set_i32(INT32_MAX)));
      store_f32(task.d_gate + i + row,
                as_f32(select(is_cut, set_i32(0), as_i32(scaled * u * slope))));
      store_f32(task.d_up + i + row, as_f32(select(is_up_cut, set_i32(0), as_i32(scaled * f))));
    }
  }
}
