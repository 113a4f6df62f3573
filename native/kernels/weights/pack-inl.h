// Coding weights and laying them out as weight_format.h says. Included inside the variant's
// anonymous namespace by packed-inl.h.
//
// All arithmetic is single IEEE operations on fp32, so that packed bytes are the same on every ISA
// and can be checked against any other program that does the same.

constexpr float kLargestFp16 = 65504.0f;
constexpr float kLargestE4m3 = 448.0f;
// Columns and inputs that are packed together. 16 columns share the cache lines of a panel that a
// chunk of inputs writes, so these stay in L1; and a chunk reads whole lines of each column's
// weights.
constexpr size_t kPackColumns = 16;
constexpr size_t kPackChunk = 512;
// Number of columns ahead whose weights are prefetched.
constexpr size_t kPackAhead = 2;

// Rounds a float to fp16. REQUIRES: |value| <= kLargestFp16.
inline uint16_t narrow_to_fp16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) {
    // The value is subnormal in fp16, where a step is 2^-24: adding 0.5 in fp32 rounds to that
    // step.
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

inline float widen_fp16(uint16_t half) {
  const float magnitude = float_of(static_cast<uint32_t>(half & 0x7fff) << 13);
  return (half & 0x8000 ? -0x1p112f : 0x1p112f) * magnitude;
}

// Reads `count` weights of a row as floats, zeros beyond the row's end. REQUIRES: `count` is a
// multiple of 16.
inline void widen_weights(const PackTask& task, size_t row, size_t k, size_t count, float* out) {
  const size_t at = row * task.row_size + k;
  const size_t in_row = task.row_size - k < count ? task.row_size - k : count;
  if (in_row < count) {
    for (size_t i = 0; i < count; ++i) {
      float value = 0;
      if (i < in_row)
        value = task.is_bf16
                    ? float_of(uint32_t{static_cast<const uint16_t*>(task.weights)[at + i]} << 16)
                    : static_cast<const float*>(task.weights)[at + i];
      out[i] = value;
    }
  } else if (task.is_bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(task.weights) + at;
    for (size_t i = 0; i < count; i += kLanes) store_f32(out + i, load_bf16(source + i));
  } else {
    const float* source = static_cast<const float*>(task.weights) + at;
    for (size_t i = 0; i < count; i += kLanes) store_f32(out + i, load_f32(source + i));
  }
}

// Prefetches the next weights of a row, because a chunk of a row is too short for the hardware's
// own prefetching to follow.
inline void prefetch_weights(const PackTask& task, size_t row, size_t k) {
  const size_t size = task.is_bf16 ? 2 : 4;
  const size_t count = task.row_size - k < kPackChunk ? task.row_size - k : kPackChunk;
  const uint8_t* p = static_cast<const uint8_t*>(task.weights) + (row * task.row_size + k) * size;
  for (size_t i = 0; i < count * size; i += 64) __builtin_prefetch(p + i);
}

// Returns the largest magnitude as bits, which are ordered like the values; NaN is above infinity.
inline uint32_t max_magnitude(const float* w, size_t count) {
  I32 peak = set_i32(0);
  for (size_t i = 0; i < count; i += kLanes)
    peak = max_i32(peak, as_i32(load_f32(w + i)) & set_i32(INT32_MAX));
  return static_cast<uint32_t>(reduce_max(peak));
}

struct Range {
  float low, high;
};
inline Range find_range(const float* w, size_t count) {
  F32 low = load_f32(w), high = low;
  for (size_t i = kLanes; i < count; i += kLanes) {
    low = at_most(load_f32(w + i), low);
    high = at_least(load_f32(w + i), high);
  }
  return {reduce_min(low), reduce_max(high)};
}

// Quantization of a group to integers: u = clamp(round((w - minimum) * inverse), low, high) +
// offset.
struct IntCoder {
  float minimum, inverse, low, high;
  int32_t offset;
};

// Chooses the scale and the minimum of a group. Returns false if a weight is not finite, or if
// scale or minimum exceed fp16.
inline bool choose_int_scale(const WeightFormat& format, const float* w, size_t count,
                             uint32_t amax_bits, uint16_t* scale, uint16_t* minimum,
                             IntCoder* coder) {
  const float amax = float_of(amax_bits);
  if (amax_bits > bits_of(kLargestFloat)) return false;
  const int32_t levels = 1 << format.bits;
  float wanted, base = 0.0f;
  if (format.has_minimum) {
    const Range range = find_range(w, count);
    base = range.low;
    wanted = (range.high - base) / static_cast<float>(levels - 1);
  } else if (format.bits == 8) {
    // With eight bits the code range is left symmetric about zero, and one code stays unused.
    wanted = amax / 127.0f;
  } else {
    // With fewer bits all codes are used: the weight of largest magnitude (the first of several)
    // gets the code 0, the most negative one, whatever its sign. If it is positive, the scale is
    // negative.
    const Range range = find_range(w, count);
    float peak = range.high == amax ? amax : -amax;
    if (range.high == -range.low) {
      size_t i = 0;
      while ((bits_of(w[i]) & 0x7fffffff) != amax_bits) ++i;
      peak = w[i];
    }
    wanted = peak / static_cast<float>(-levels / 2);
  }
  if (!(__builtin_fabsf(wanted) <= kLargestFp16 && __builtin_fabsf(base) <= kLargestFp16))
    return false;
  // Codes are computed from the rounded scale and minimum, so that rounding these adds no error.
  *scale = narrow_to_fp16(wanted);
  *minimum = narrow_to_fp16(base);
  const float step = widen_fp16(*scale);
  coder->minimum = widen_fp16(*minimum);
  coder->inverse = step == 0.0f ? 0.0f : 1.0f / step;
  coder->offset = format.has_minimum ? 0 : levels / 2;
  const int32_t lowest = format.bits == 8 && !format.has_minimum ? 1 : 0;
  coder->low = static_cast<float>(lowest - coder->offset);
  coder->high = static_cast<float>(levels - 1 - coder->offset);
  return true;
}

inline void code_ints(const IntCoder& coder, const float* w, size_t count, uint8_t* codes) {
  const F32 minimum = set_f32(coder.minimum), inverse = set_f32(coder.inverse);
  const F32 low = set_f32(coder.low), high = set_f32(coder.high), rounder = set_f32(kRounder);
  const I32 base = set_i32(static_cast<int32_t>(bits_of(kRounder)) - coder.offset);
  for (size_t i = 0; i < count; i += kLanes) {
    const F32 ratio = (load_f32(w + i) - minimum) * inverse;
    store_u8(codes + i, as_i32(at_most(at_least(ratio, low), high) + rounder) - base);
  }
}

// Packs groups of one column: [first, first + count) of the panel's inputs.
bool pack_int_groups(const PackTask& task, const float* w, size_t first, size_t count,
                     size_t column) {
  const WeightFormat& format = task.format;
  const size_t size = static_cast<size_t>(format.group_size);
  const size_t scale_bytes = kPanelColumns * 2;
  const size_t header = (format.has_minimum ? 2 : 1) * scale_bytes;
  const size_t group_bytes =
      header + kPanelColumns * size * static_cast<size_t>(format.bits) / 8;
  uint8_t* out = task.panel + first / size * group_bytes;
  alignas(64) uint8_t codes[kMaxGroupSize];
  for (size_t k = 0; k < count; k += size, out += group_bytes) {
    uint16_t scale, minimum;
    IntCoder coder;
    if (!choose_int_scale(format, w + k, size, max_magnitude(w + k, size), &scale, &minimum,
                          &coder))
      return false;
    code_ints(coder, w + k, size, codes);
    __builtin_memcpy(out + column * 2, &scale, 2);
    if (format.has_minimum) __builtin_memcpy(out + scale_bytes + column * 2, &minimum, 2);
    place_int_codes(format.bits, codes, size, column, out + header);
  }
  return true;
}

// Returns the largest magnitude, as bits, in a part of the matrix, which need not be whole vectors.
uint32_t scan_block(const PackTask& task, size_t first_row, size_t last_row, size_t first_k,
                    size_t last_k) {
  alignas(64) float w[kPackChunk];
  uint32_t peak = 0;
  for (size_t row = first_row; row < last_row; ++row) {
    for (size_t k = first_k; k < last_k; k += kPackChunk) {
      const size_t left = last_k - k < kPackChunk ? last_k - k : kPackChunk;
      const size_t count = (left + 15) / 16 * 16;
      widen_weights(task, row, k, count, w);
      for (size_t i = left; i < count; ++i) w[i] = 0.0f;
      const uint32_t magnitude = max_magnitude(w, count);
      peak = magnitude > peak ? magnitude : peak;
    }
  }
  return peak;
}

bool pack_bf16(const PackTask& task, const float* w, size_t first, size_t count, size_t column) {
  // Refuse weights that would be rounded to infinity.
  if (max_magnitude(w, count) >= 0x7f7f8000) return false;
  alignas(64) uint16_t values[kPackChunk];
  for (size_t k = 0; k < count; ++k) {
    const uint32_t bits = bits_of(w[k]);
    values[k] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  uint8_t* at = task.panel + first / 2 * kStepBytes + column * 4;
  for (size_t k = 0; k < count; k += 2, at += kStepBytes) __builtin_memcpy(at, values + k, 4);
  return true;
}

bool pack_f32(const PackTask& task, const float* w, size_t first, size_t count, size_t column) {
  if (max_magnitude(w, count) > bits_of(kLargestFloat)) return false;
  uint8_t* at = task.panel + first * kStepBytes + column * 4;
  for (size_t k = 0; k < count; ++k, at += kStepBytes) __builtin_memcpy(at, w + k, 4);
  return true;
}

// Rounds magnitudes to nearest even, to a float of `mantissa` bits whose numbers below
// `smallest_normal` are `step` apart. Those are rounded by adding 2^23 steps.
inline I32 narrow_float(F32 magnitude, int32_t mantissa, int32_t bias, float smallest_normal,
                        float step) {
  const I32 bits = as_i32(magnitude);
  const int32_t shift = 23 - mantissa;
  const I32 odd = (bits >> shift) & set_i32(1);
  const I32 rounded = (bits + set_i32((1 << (shift - 1)) - 1) + odd) >> shift;
  const I32 normal = rounded - set_i32((127 - bias) << mantissa);
  const F32 rounder = set_f32(step * 8388608.0f);
  const I32 subnormal = as_i32(magnitude + rounder) - as_i32(rounder);
  return select(is_less(magnitude, set_f32(smallest_normal)), subnormal, normal);
}

// Packs e4m3 codes. Chunks are whole groups of 128 inputs; all outputs of a block of 128 share a
// scale, or each row has its own.
bool pack_e4m3(const PackTask& task, const float* w, size_t first, size_t count, size_t column) {
  constexpr size_t kGroup = 128;
  const bool is_row = task.format.group_size == 0;
  const size_t header = is_row ? 0 : kFloatHeaderBytes;
  uint8_t* groups = task.panel + (is_row ? kRowHeaderBytes : 0);
  alignas(64) uint8_t codes[kGroup];
  for (size_t k = 0; k < count; k += kGroup) {
    uint8_t* out = groups + (first + k) / kGroup * (header + kPanelColumns * kGroup);
    float scale;
    __builtin_memcpy(&scale, is_row ? task.panel + column * sizeof scale : out, sizeof scale);
    // The scale was written by pack() before the columns; NaN means that the block's weights do not
    // fit.
    if (!(scale == scale)) return false;
    const F32 divisor = set_f32(scale == 0.0f ? 1.0f : scale);
    for (size_t i = 0; i < kGroup; i += kLanes) {
      const F32 value = load_f32(w + k + i);
      const F32 ratio = as_f32(as_i32(value) & set_i32(INT32_MAX)) / divisor;
      const I32 code = narrow_float(at_most(ratio, set_f32(kLargestE4m3)), 3, 7, 0x1p-6f, 0x1p-9f);
      store_u8(codes + i, code | ((as_i32(value) >> 24) & set_i32(0x80)));
    }
    uint8_t* at = out + header + column / 4 * 16 + column % 4 * 2;
    for (size_t i = 0; i < kGroup; i += 4, at += kStepBytes) {
      __builtin_memcpy(at, codes + i, 2);
      __builtin_memcpy(at + 8, codes + i + 2, 2);
    }
  }
  return true;
}

bool pack_e2m1(const PackTask& task, const float* w, size_t first, size_t count, size_t column) {
  constexpr size_t kGroup = 32;
  constexpr size_t kGroupBytes = kFloatHeaderBytes + kPanelColumns * kGroup / 2;
  alignas(64) uint8_t codes[kGroup];
  for (size_t k = 0; k < count; k += kGroup) {
    const uint32_t amax_bits = max_magnitude(w + k, kGroup);
    if (amax_bits > bits_of(kLargestFloat)) return false;
    // Choose the scale, a power of two, with which the largest weight is less than 8, so that it
    // gets the code of 4 or 6. Double the scale if that weight would be rounded to 6 with a larger
    // error than weights between 4 and 6 can have.
    int32_t exponent = static_cast<int32_t>(amax_bits >> 23) - 2;
    if ((amax_bits & 0x7fffff) > 0x600000) ++exponent;
    exponent = exponent < 1 ? 1 : exponent;
    const F32 inverse = set_f32(float_of(static_cast<uint32_t>(254 - exponent) << 23));
    for (size_t i = 0; i < kGroup; i += kLanes) {
      const F32 value = load_f32(w + k + i);
      const F32 ratio = as_f32(as_i32(value) & set_i32(INT32_MAX)) * inverse;
      const I32 code = narrow_float(at_most(ratio, set_f32(6.0f)), 1, 1, 1.0f, 0.5f);
      store_u8(codes + i, code | ((as_i32(value) >> 28) & set_i32(8)));
    }
    uint8_t* out = task.panel + (first + k) / kGroup * kGroupBytes;
    out[column] = static_cast<uint8_t>(exponent);
    uint8_t* at = out + kFloatHeaderBytes + column * 4;
    for (size_t i = 0; i < kGroup; i += 8, at += kStepBytes) {
      uint32_t word = 0;
      for (size_t j = 0; j < 4; ++j)
        word |= (uint32_t{codes[i + 2 * j]} | uint32_t{codes[i + 2 * j + 1]} << 16) << (4 * j);
      __builtin_memcpy(at, &word, 4);
    }
  }
  return true;
}

// Quantization of each row with one scale, which is chosen over the whole row, whatever part of it
// the panel holds.
struct RowCoders {
  IntCoder coder[kPanelColumns];
};

bool choose_row_scale(const PackTask& task, size_t column, RowCoders* rows) {
  const size_t row = task.first_row + column;
  const uint32_t amax_bits = scan_block(task, row, row + 1, 0, task.row_size);
  uint16_t scale, minimum;
  if (!choose_int_scale(task.format, nullptr, 0, amax_bits, &scale, &minimum,
                        &rows->coder[column]))
    return false;
  __builtin_memcpy(task.panel + column * 2, &scale, 2);
  return true;
}

void pack_row_codes(const PackTask& task, const RowCoders& rows, const float* w, size_t first,
                    size_t count, size_t column) {
  alignas(64) uint8_t codes[kPackChunk];
  code_ints(rows.coder[column], w, count, codes);
  place_int_codes(8, codes, count, column, task.panel + kPanelColumns * 2 + first * kPanelColumns);
}

// Returns the e4m3 scale of a block by its largest magnitude, which gets the largest code; NaN if
// it is not finite.
float choose_e4m3_scale(uint32_t amax_bits) {
  const bool is_finite = amax_bits <= bits_of(kLargestFloat);
  return is_finite ? float_of(amax_bits) / kLargestE4m3 : __builtin_nanf("");
}

// Writes e4m3 scales: one per row before the panel, or those of blocks into the headers of the
// groups.
void write_e4m3_scales(const PackTask& task, size_t num_columns) {
  if (task.format.group_size == 0) {
    for (size_t c = 0; c < num_columns; ++c) {
      const size_t row = task.first_row + c;
      const float scale = choose_e4m3_scale(scan_block(task, row, row + 1, 0, task.row_size));
      __builtin_memcpy(task.panel + c * sizeof scale, &scale, sizeof scale);
    }
    return;
  }
  constexpr size_t kGroup = 128;
  const size_t first_row = task.first_row / kGroup * kGroup;
  const size_t last_row = task.num_rows < first_row + kGroup ? task.num_rows : first_row + kGroup;
  uint8_t* out = task.panel;
  for (size_t k = task.first_k; k < task.last_k; k += kGroup) {
    const size_t last_k = task.last_k < k + kGroup ? task.last_k : k + kGroup;
    const float scale = choose_e4m3_scale(scan_block(task, first_row, last_row, k, last_k));
    for (size_t i = 0; i < kFloatHeaderBytes; i += sizeof scale)
      __builtin_memcpy(out + i, &scale, sizeof scale);
    out += kFloatHeaderBytes + kPanelColumns * kGroup;
  }
}

size_t panel_size_bytes(const PackTask& task) {
  const WeightFormat& format = task.format;
  const size_t codes = kPanelColumns * task.size * static_cast<size_t>(format.bits) / 8;
  if (format.bits >= 16) return codes;
  if (format.is_float && format.group_size == 0) return codes + kRowHeaderBytes;
  if (format.is_float)
    return codes + task.size / static_cast<size_t>(format.group_size) * kFloatHeaderBytes;
  const size_t scales = kPanelColumns * 2 * (format.has_minimum ? 2 : 1);
  if (format.group_size == 0) return codes + scales;
  return codes + task.size / static_cast<size_t>(format.group_size) * scales;
}

int64_t pack(const PackTask& task) {
  alignas(64) float w[kPackChunk];
  const WeightFormat& format = task.format;
  const size_t left = task.num_rows - task.first_row;
  const size_t num_columns = left < kPanelColumns ? left : kPanelColumns;
  const bool is_e4m3 = format.is_float && format.bits == 8;
  const bool is_row = has_codes(format) && format.group_size == 0;
  if (num_columns < kPanelColumns) __builtin_memset(task.panel, 0, panel_size_bytes(task));
  if (is_e4m3) write_e4m3_scales(task, num_columns);
  RowCoders rows;
  if (is_row)
    for (size_t c = 0; c < num_columns; ++c)
      if (!choose_row_scale(task, c, &rows)) return static_cast<int64_t>(task.first_row + c);
  for (size_t begin = 0; begin < num_columns; begin += kPackColumns) {
    const size_t end = begin + kPackColumns < num_columns ? begin + kPackColumns : num_columns;
    for (size_t first = 0; first < task.size; first += kPackChunk) {
      const size_t count = task.size - first < kPackChunk ? task.size - first : kPackChunk;
      const size_t wide = (count + 15) / 16 * 16;
      for (size_t c = begin; c < end; ++c) {
        if (c + kPackAhead < end)
          prefetch_weights(task, task.first_row + c + kPackAhead, task.first_k + first);
        // Beyond the part of the inputs that the panel holds, weights are zero, even if the row
        // continues.
        widen_weights(task, task.first_row + c, task.first_k + first, wide, w);
        const size_t in_part = task.last_k - task.first_k - first;
        for (size_t i = in_part; i < wide; ++i) w[i] = 0.0f;
        bool is_held = true;
        if (format.bits == 32)
          is_held = pack_f32(task, w, first, count, c);
        else if (format.bits == 16)
          is_held = pack_bf16(task, w, first, count, c);
        else if (is_row)
          pack_row_codes(task, rows, w, first, count, c);
        else if (is_e4m3)
          is_held = pack_e4m3(task, w, first, count, c);
        else if (format.is_float)
          is_held = pack_e2m1(task, w, first, count, c);
        else
          is_held = pack_int_groups(task, w, first, count, c);
        if (!is_held) return static_cast<int64_t>(task.first_row + c);
      }
    }
  }
  return -1;
}
