// The body of the expert kernels, compiled once per ISA; see experts_kernels.h for what they do.
//
// Every output has one chain of operations over K, written once, in tile_int and tile_bf16: the
// number of rows or columns computed beside it changes registers, never the order or the rounding.
// That is the whole of batch invariance. Integer sums are exact, and everything after them is
// IEEE operations in a fixed order (the sources are compiled without contraction of a * b + c), so
// integer formats agree bitwise across ISAs as well.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/experts_kernels.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

// Rows that one task holds in fp32 at a time: 48 x 128 gate and up values are 48 KiB, in L2.
constexpr size_t kRowChunk = 48;
constexpr size_t kStepBytes = kPanelColumns * 4;  // One step over K of a whole panel.
constexpr size_t kPanelVectors = kPanelColumns / kLanes;
// Added to a small float, leaves it rounded to an integer in the low bits (1.5 * 2^23).
constexpr float kRounder = 12582912.0f;
// Groups of activations below are coded as zeros: the inverse of their step would overflow.
constexpr float kSmallestAmax = 1e-30f;
constexpr float kLargestFloat = 3.402823466e38f;

// Rows of an operand: those listed, or consecutive ones where the list is null.
struct RowList {
  const int32_t* ids;
  size_t first;
};
inline size_t row_at(RowList rows, size_t i) {
  return rows.ids ? static_cast<size_t>(rows.ids[i]) : rows.first + i;
}

struct Tile {
  WeightFormat format;
  size_t size;  // K.
  const Operand* a;
  RowList rows;
  const uint8_t* panel;
  float* out;  // [rows][out_stride]
  size_t out_stride;
};

// Loops over a register block, unrolled before the compiler decides what lives in registers: with
// ordinary loops GCC keeps the sums in memory.
#define TANDEM_INLINE __attribute__((always_inline))
template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class Body>
TANDEM_INLINE inline void unroll(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    unroll<kCount, kFirst + 1>(body);
  }
}

template <int kRows, int kVectors>
TANDEM_INLINE inline void add_step(I32 (&acc)[kRows][kVectors], const uint8_t* const (&a)[kRows],
                                   size_t k, const IntWeights (&w)[kVectors]) {
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    const IntRow row = int_row(a[r.value] + k);
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      acc[r.value][v.value] = dot(acc[r.value][v.value], w[v.value], row);
    });
  });
}

template <int kRows, int kVectors>
TANDEM_INLINE inline void add_int8(I32 (&acc)[kRows][kVectors], const uint8_t* const (&a)[kRows],
                                   size_t k, size_t group_size, const uint8_t* codes) {
  for (size_t step = 0; step < group_size / 4; ++step, k += 4, codes += kStepBytes) {
    IntWeights w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      w[v.value] = int_weights(load_i32(codes + v.value * kLanes * 4));
    });
    add_step(acc, a, k, w);
  }
}

template <int kRows, int kVectors>
TANDEM_INLINE inline void add_int4(I32 (&acc)[kRows][kVectors], const uint8_t* const (&a)[kRows],
                                   size_t k, size_t group_size, const uint8_t* codes) {
  for (size_t step = 0; step < group_size / 8; ++step, k += 8, codes += kStepBytes) {
    IntWeights w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      w[v.value] = int_weights(low_nibbles(load_i32(codes + v.value * kLanes * 4)));
    });
    add_step(acc, a, k, w);
    // Loaded again rather than kept: the registers hold sums.
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      w[v.value] = int_weights(high_nibbles(load_i32(codes + v.value * kLanes * 4)));
    });
    add_step(acc, a, k + 4, w);
  }
}

// out[kRows, 64 columns]; groups are summed in ascending order. All columns of a group come before
// the next group, so that a panel is read once, in order, however many columns the registers hold.
template <int kRows, int kVectors, int kBits, bool kHasMinimum>
void tile_int(const Tile& tile, size_t first_row) {
  constexpr size_t kHeaderBytes = (kHasMinimum ? 2 : 1) * kPanelColumns * 2;
  const size_t group_size = static_cast<size_t>(tile.format.group_size);
  const size_t code_bytes = kPanelColumns * group_size * kBits / 8;
  const Operand operand = *tile.a;
  const uint8_t* a[kRows];
  size_t group_id[kRows];
  // The fp32 sums live in the output, touched once a group: the registers hold the integer sums.
  float* out[kRows];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    const size_t row = row_at(tile.rows, first_row + r.value);
    a[r.value] = operand.data + row * operand.row_bytes;
    group_id[r.value] = row * operand.num_groups;
    out[r.value] = tile.out + (first_row + r.value) * tile.out_stride;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) store_f32(out[r.value] + c, zero_f32());
  });
  const uint8_t* p = tile.panel;
  for (size_t k = 0, group = 0; k < tile.size; k += group_size, ++group) {
    for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(p) + column;
      const uint8_t* codes = p + kHeaderBytes + column * 4;
      I32 acc[kRows][kVectors];
      unroll<kRows>([&](auto r) TANDEM_INLINE {
        // Starting from the correction undoes the codes' offset at no cost.
        const I32 start = set_i32(kHasMinimum ? 0 : operand.corrections[group_id[r.value] + group]);
        unroll<kVectors>([&](auto v) TANDEM_INLINE { acc[r.value][v.value] = start; });
      });
      if constexpr (kBits == 8)
        add_int8<kRows, kVectors>(acc, a, k, group_size, codes);
      else
        add_int4<kRows, kVectors>(acc, a, k, group_size, codes);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        const F32 scale = load_fp16(scales + v.value * kLanes);
        F32 minimum = zero_f32();
        if constexpr (kHasMinimum) minimum = load_fp16(scales + kPanelColumns + v.value * kLanes);
        unroll<kRows>([&](auto r) TANDEM_INLINE {
          const size_t id = group_id[r.value] + group;
          float* at = out[r.value] + column + v.value * kLanes;
          const F32 step = set_f32(operand.scales[id]);
          F32 sum = fma(to_f32(acc[r.value][v.value]), scale * step, load_f32(at));
          if constexpr (kHasMinimum) sum = fma(minimum, set_f32(operand.offsets[id]), sum);
          store_f32(at, sum);
        });
      });
    }
    p += kHeaderBytes + code_bytes;
  }
}

template <int kRows, int kVectors>
void tile_bf16(const Tile& tile, size_t first_row, size_t column) {
  const uint8_t* a[kRows];
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    a[r.value] = tile.a->data + row_at(tile.rows, first_row + r.value) * tile.a->row_bytes;
    unroll<kVectors>([&](auto v) TANDEM_INLINE { sum[r.value][v.value] = zero_f32(); });
  });
  const uint8_t* p = tile.panel + column * 4;
  for (size_t k = 0; k < tile.size; k += 2, p += kStepBytes) {
    Bf16Pair w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      w[v.value] = bf16_weights(load_i32(p + v.value * kLanes * 4));
    });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      const Bf16Pair row = bf16_row(a[r.value] + k * 2);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sum[r.value][v.value] = dot(sum[r.value][v.value], w[v.value], row);
      });
    });
  }
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    float* out = tile.out + (first_row + r.value) * tile.out_stride + column;
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      store_f32(out + v.value * kLanes, sum[r.value][v.value]);
    });
  });
}

template <int kRows>
void run_block(const Tile& tile, size_t row) {
  constexpr int kVectors = vectors_beside(kRows);
  constexpr int kBf16Vectors = bf16_vectors_beside(kRows);
  static_assert(kPanelVectors % kVectors == 0 && kPanelVectors % kBf16Vectors == 0);
  if (tile.format.bits == 16) {
    for (size_t c = 0; c < kPanelColumns; c += kBf16Vectors * kLanes)
      tile_bf16<kRows, kBf16Vectors>(tile, row, c);
    return;
  }
  void (*run)(const Tile&, size_t);
  if (tile.format.bits == 8)
    run = tile.format.has_minimum ? tile_int<kRows, kVectors, 8, true>
                                  : tile_int<kRows, kVectors, 8, false>;
  else
    run = tile.format.has_minimum ? tile_int<kRows, kVectors, 4, true>
                                  : tile_int<kRows, kVectors, 4, false>;
  run(tile, row);
}

template <int kRows>
void run_rows(const Tile& tile, size_t row, size_t count) {
  if (count == kRows) return run_block<kRows>(tile, row);
  if constexpr (kRows > 1) run_rows<kRows - 1>(tile, row, count);
}

// out[num_rows, 64] = rows of a times the panel.
void multiply(const Tile& tile, size_t num_rows) {
  // Blocks of equal height: 8 rows as 4 + 4 rather than 6 + 2.
  const size_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  size_t row = 0;
  for (size_t left = num_blocks; left > 0; --left) {
    const size_t count = (num_rows - row + left - 1) / left;
    run_rows<kMaxRows>(tile, row, count);
    row += count;
  }
}

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

// One group as int8 codes and a step. A group that holds NaN or infinity gets the step NaN, which
// makes its own row NaN and no other.
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

// Codes `size` values as row `row`, columns [column, column + size) of an operand.
void code_row(WeightFormat format, const float* x, size_t size, Operand out, size_t row,
              size_t column) {
  uint8_t* data = out.data + row * out.row_bytes;
  if (format.bits == 16) {
    uint16_t* values = reinterpret_cast<uint16_t*>(data) + column;
    for (size_t i = 0; i < size; ++i) values[i] = round_to_bf16(x[i]);
    return;
  }
  const size_t group_size = static_cast<size_t>(format.group_size);
  int8_t* codes = reinterpret_cast<int8_t*>(data) + column;
  size_t group_id = row * out.num_groups + column / group_size;
  for (size_t i = 0; i < size; i += group_size, ++group_id) {
    int32_t sum;
    const float step = code_group(x + i, group_size, codes + i, &sum);
    out.scales[group_id] = step;
    if (format.has_minimum)
      out.offsets[group_id] = step * static_cast<float>(sum);
    else
      out.corrections[group_id] = -(1 << (format.bits - 1)) * sum;
  }
}

void prepare(const PrepareTask& task) {
  alignas(64) float values[kMaxGroupSize];
  const size_t chunk =
      task.format.bits == 16 ? size_t{kMaxGroupSize} : static_cast<size_t>(task.format.group_size);
  for (size_t row = task.first_row; row < task.last_row; ++row) {
    for (size_t k = 0; k < task.size; k += chunk) {
      const size_t count = task.size - k < chunk ? task.size - k : chunk;
      const size_t at = row * task.size + k;
      if (task.is_bf16) {
        const uint16_t* x = static_cast<const uint16_t*>(task.x) + at;
        for (size_t i = 0; i < count; ++i) values[i] = float_of(uint32_t{x[i]} << 16);
        code_row(task.format, values, count, task.out, row, k);
      } else {
        code_row(task.format, static_cast<const float*>(task.x) + at, count, task.out, row, k);
      }
    }
    // Pairs of bf16 are multiplied at once; an odd size is completed by a zero.
    if (task.format.bits == 16 && task.size % 2 == 1)
      reinterpret_cast<uint16_t*>(task.out.data + row * task.out.row_bytes)[task.size] = 0;
  }
}

// exp to 2 ulp for x in [-87, 88]; coefficients from Cephes expf. NaN stays NaN.
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

// gate becomes silu(gate) * up. Below -87 silu is 0 to within 1e-36, whatever the gate.
void activate(float* gate, const float* up, size_t size) {
  const F32 limit = set_f32(87.0f);
  for (size_t i = 0; i < size; i += kLanes) {
    const F32 g = at_least(load_f32(gate + i), zero_f32() - limit);
    const F32 denominator = set_f32(1.0f) + exp_f32(at_least(zero_f32() - g, zero_f32() - limit));
    store_f32(gate + i, g / denominator * load_f32(up + i));
  }
}

void gate_up(const GateUpTask& task) {
  alignas(64) float gate[kRowChunk * kMaxBlockPanels * kPanelColumns];
  alignas(64) float up[kRowChunk * kMaxBlockPanels * kPanelColumns];
  const size_t width = task.num_panels * kPanelColumns;
  for (size_t row = 0; row < task.num_rows; row += kRowChunk) {
    const size_t count = task.num_rows - row < kRowChunk ? task.num_rows - row : kRowChunk;
    const RowList rows{task.row_ids + row, 0};
    const uint8_t* panel = task.panels;
    for (size_t i = 0; i < task.num_panels; ++i) {
      multiply({task.format, task.size, &task.x, rows, panel, gate + i * kPanelColumns, width},
               count);
      panel += task.panel_bytes;
      multiply({task.format, task.size, &task.x, rows, panel, up + i * kPanelColumns, width},
               count);
      panel += task.panel_bytes;
    }
    activate(gate, up, count * width);
    for (size_t i = 0; i < count; ++i)
      code_row(task.format, gate + i * width, width, task.h, task.first_row + row + i,
               task.first_column);
  }
}

inline void add_scaled(float* out, const float* y, float weight, size_t size) {
  const F32 w = set_f32(weight);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store_f32(out + i, fma(w, load_f32(y + i), load_f32(out + i)));
  for (; i < size; ++i) out[i] = __builtin_fmaf(weight, y[i], out[i]);
}

void down(const DownTask& task) {
  alignas(64) float y[kRowChunk * kPanelColumns];
  for (size_t token = 0; token < task.num_tokens; ++token)
    __builtin_memset(task.out + token * task.out_stride, 0, task.num_columns * sizeof(float));
  for (size_t e = 0; e < task.num_experts; ++e) {
    const ExpertRows& expert = task.experts[e];
    for (size_t row = 0; row < expert.num_pairs; row += kRowChunk) {
      const size_t left = expert.num_pairs - row;
      const size_t count = left < kRowChunk ? left : kRowChunk;
      const size_t pair = expert.first_pair + row;
      multiply({task.format, task.size, &task.h, {nullptr, pair}, expert.panel, y, kPanelColumns},
               count);
      for (size_t i = 0; i < count; ++i)
        add_scaled(task.out + static_cast<size_t>(task.tokens[pair + i]) * task.out_stride,
                   y + i * kPanelColumns, task.weights[pair + i], task.num_columns);
    }
  }
}

// REQUIRES: size_bytes is a multiple of 256.
int32_t read_memory(const uint8_t* data, size_t size_bytes) {
  constexpr size_t kVectors = 256 / sizeof(I32);
  I32 sum[kVectors];
  for (size_t v = 0; v < kVectors; ++v) sum[v] = set_i32(0);
  for (size_t i = 0; i < size_bytes; i += 256) {
    for (size_t v = 0; v < kVectors; ++v) sum[v] |= load_i32(data + i + v * sizeof(I32));
  }
  for (size_t v = 1; v < kVectors; ++v) sum[0] |= sum[v];
  int32_t first;
  __builtin_memcpy(&first, &sum[0], sizeof first);
  return first;
}

int32_t multiply_registers(int32_t bits, size_t num_steps) {
  // Twelve chains of 16 lanes: enough to hide the latency of any dot product here.
  constexpr size_t kChains = 12;
  constexpr size_t kParts = 16 / kLanes;
  const uint8_t bytes[4] = {1, 2, 3, 4};
  const I32 w = set_i32(static_cast<int32_t>(num_steps) | 0x01010101);
  int32_t result = 0;
  for (size_t part = 0; part < kParts; ++part) {
    I32 ints[kChains];
    F32 floats[kChains];
    for (size_t c = 0; c < kChains; ++c) {
      ints[c] = set_i32(static_cast<int32_t>(c));
      floats[c] = set_f32(static_cast<float>(c));
    }
    for (size_t i = 0; i < num_steps; ++i) {
      if (bits == 16)
        for (size_t c = 0; c < kChains; ++c)
          floats[c] = dot(floats[c], bf16_weights(w), bf16_row(bytes));
      else
        for (size_t c = 0; c < kChains; ++c) ints[c] = dot(ints[c], int_weights(w), int_row(bytes));
    }
    for (size_t c = 0; c < kChains; ++c) {
      int32_t word;
      __builtin_memcpy(&word, &ints[c], sizeof word);
      result ^= word;
      __builtin_memcpy(&word, &floats[c], sizeof word);
      result ^= word;
    }
  }
  return result;
}

}  // namespace

const ExpertKernels TANDEM_EXPERT_KERNELS = {prepare, gate_up, down, read_memory,
                                             multiply_registers};

}  // namespace tandem
