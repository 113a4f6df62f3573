// Conversion of activations to the operand of a product with packed weights. Included inside the
// variant's anonymous namespace by packed-inl.h.

// 1.5 * 2^23: adding it to a small float leaves the float, rounded to an integer, in the low bits
// of the sum.
constexpr float kRounder = 12582912.0f;
// Largest magnitude in a group of activations below which all its codes are zero: the inverse of
// its quantization step would overflow.
constexpr float kSmallestAmax = 1e-30f;
constexpr float kLargestFloat = 3.402823466e38f;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint16_t round_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

// True if activations are quantized to int8 codes; otherwise they are bf16, or fp32 for fp32
// weights.
inline bool has_codes(const WeightFormat& format) { return format.bits < 16 && !format.is_float; }
inline size_t code_group_size(const WeightFormat& format) {
  return static_cast<size_t>(format.group_size == 0 ? kRowGroupSize : format.group_size);
}

// Returns the code that stands for zero.
inline int32_t code_centre(const WeightFormat& format) {
  if (format.table == CodeTable::kE2m1) return kE2m1Centre;
  return format.table != CodeTable::kNone ? 128 : 1 << (format.bits - 1);
}

// Quantizes one group of activations to int8 codes with one step. A group that holds NaN or
// infinity gets the step NaN, which makes its own row NaN and no other.
float code_group(const float* x, size_t size, int8_t* codes, int32_t* sum) {
  uint32_t max_bits = 0;
  for (size_t i = 0; i < size; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
    max_bits = bits > max_bits ? bits : max_bits;
  }
  const float amax = float_of(max_bits);
  const bool is_finite = max_bits <= bits_of(kLargestFloat);
  *sum = 0;
  if (!is_finite || amax < kSmallestAmax) {
    __builtin_memset(codes, 0, size);
    return is_finite ? 0.0f : __builtin_nanf("");
  }
  const float inverse = 127.0f / amax;
  int32_t total = 0;
  for (size_t i = 0; i < size; ++i) {
    const float rounded = x[i] * inverse + kRounder;
    const int32_t code = static_cast<int32_t>(bits_of(rounded)) -
                         static_cast<int32_t>(bits_of(kRounder));
    codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  *sum = total;
  return amax / 127.0f;
}

// Writes `size` values, whole groups, into row `row`, columns [column, column + size), of an
// operand.
void code_row(WeightFormat format, const float* x, size_t size, Operand out, size_t row,
              size_t column) {
  uint8_t* data = out.data + row * out.row_bytes;
  if (format.bits == 32) {
    __builtin_memcpy(data + column * sizeof(float), x, size * sizeof(float));
    return;
  }
  if (!has_codes(format)) {
    uint16_t* values = reinterpret_cast<uint16_t*>(data) + column;
    for (size_t i = 0; i < size; ++i) values[i] = round_to_bf16(x[i]);
    return;
  }
  const size_t group_size = code_group_size(format);
  int8_t* codes = reinterpret_cast<int8_t*>(data) + column;
  size_t group_id = row * out.num_groups + column / group_size;
  for (size_t i = 0; i < size; i += group_size, ++group_id) {
    int32_t sum;
    const float step = code_group(x + i, group_size, codes + i, &sum);
    out.scales[group_id] = step;
    if (format.has_minimum)
      out.offsets[group_id] = step * static_cast<float>(sum);
    else
      out.corrections[group_id] = -code_centre(format) * sum;
  }
}

void prepare(const PrepareTask& task) {
  alignas(64) float values[kMaxGroupSize];
  const size_t chunk =
      has_codes(task.format) ? code_group_size(task.format) : size_t{kMaxGroupSize};
  for (size_t row = task.first_row; row < task.last_row; ++row) {
    const size_t start = task.head_rows == 0
                             ? row * task.size
                             : row / task.head_rows * task.head_stride +
                                   row % task.head_rows * task.token_stride;
    for (size_t k = 0; k < task.out.row_size; k += chunk) {
      const size_t wanted = task.out.row_size - k < chunk ? task.out.row_size - k : chunk;
      const size_t left = task.size > k ? task.size - k : 0;
      const size_t count = left < wanted ? left : wanted;
      const size_t at = start + k;
      if (task.is_bf16) {
        const uint16_t* x = static_cast<const uint16_t*>(task.x) + at;
        for (size_t i = 0; i < count; ++i) values[i] = float_of(uint32_t{x[i]} << 16);
      } else if (count == wanted) {
        code_row(task.format, static_cast<const float*>(task.x) + at, count, task.out, row, k);
        continue;
      } else {
        __builtin_memcpy(values, static_cast<const float*>(task.x) + at, count * sizeof(float));
      }
      for (size_t i = count; i < wanted; ++i) values[i] = 0.0f;
      code_row(task.format, values, wanted, task.out, row, k);
    }
  }
}
