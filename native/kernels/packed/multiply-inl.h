// Rows times a panel of packed weights: the product that all kernels over packed weights share.
// Included inside the variant's anonymous namespace by packed-inl.h.
//
// Every output has one chain of operations over K, written once, in tile_int, tile_bf16, tile_float
// and tile_f32: the number of rows or columns computed beside it changes registers, never the order
// or the rounding. That is the whole of batch invariance. Integer sums are exact, and everything
// after them is IEEE operations in a fixed order (the sources are compiled without contraction of
// a * b + c), so integer formats and fp32 agree bitwise across ISAs as well.

constexpr size_t kStepBytes = kPanelColumns * 4;  // One step over K of a whole panel.
constexpr size_t kPanelVectors = kPanelColumns / kLanes;

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
  size_t size;  // K, whole groups.
  const Operand* a;
  RowList rows;
  const uint8_t* panel;
  float* out;  // [rows][out_stride]
  size_t out_stride;
};

#include "kernels/vectors/unroll-inl.h"

// The hardware follows the one sequence that a panel is, but with several operations for each line
// it falls behind: 4-bit weights came at half the speed for two rows. At the end of a panel this
// reaches into the one that mostly comes next.
// With AVX2 half of that: one row of int8 then takes 1.03 times as long as reading it, and not 1.33.
constexpr size_t kPrefetchBytes = kLanes == 8 ? 2048 : 4096;
template <int kVectors>
TANDEM_INLINE inline void prefetch_step(const uint8_t* codes) {
  for (size_t i = 0; i < kVectors * kLanes * 4; i += 64)
    __builtin_prefetch(codes + kPrefetchBytes + i);
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
    prefetch_step<kVectors>(codes);
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
    prefetch_step<kVectors>(codes);
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

// What stands beside the codes of an integer format.
enum class Scales { kGroup, kGroupMinimum, kRow };

constexpr size_t kScaleBytes = kPanelColumns * 2;
// Bytes before the codes of each group.
template <Scales kScales>
constexpr size_t kHeaderBytes =
    kScales == Scales::kRow ? 0 : (kScales == Scales::kGroupMinimum ? 2 : 1) * kScaleBytes;

// The sum with a group added: products of codes times both steps, and what the minimum adds.
template <Scales kScales>
TANDEM_INLINE inline F32 add_group(F32 sum, I32 products, F32 scale, F32 minimum,
                                   const Operand& operand, size_t group_id) {
  sum = fma(to_f32(products), scale * set_f32(operand.scales[group_id]), sum);
  if constexpr (kScales == Scales::kGroupMinimum)
    sum = fma(minimum, set_f32(operand.offsets[group_id]), sum);
  return sum;
}

// One scale a row: applied to the whole sum.
inline void scale_row(float* out, const uint8_t* panel) {
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
  for (size_t c = 0; c < kPanelColumns; c += kLanes)
    store_f32(out + c, load_f32(out + c) * load_fp16(scales + c));
}

// The same of e4m3, whose scales are fp32.
inline void scale_float_row(float* out, const uint8_t* panel) {
  const float* scales = reinterpret_cast<const float*>(panel);
  for (size_t c = 0; c < kPanelColumns; c += kLanes)
    store_f32(out + c, load_f32(out + c) * load_f32(scales + c));
}

// What stands beside the codes of a float format.
enum class FloatScales { kGroup, kRow };

template <FloatScales kScales>
constexpr size_t kFloatGroupHeader = kScales == FloatScales::kRow ? 0 : kFloatHeaderBytes;
template <FloatScales kScales>
constexpr size_t kFloatPanelHeader = kScales == FloatScales::kRow ? kRowHeaderBytes : 0;

// The scales of columns [column, column + kLanes) of a group of a float format, but for the one of a
// row.
template <int kBits, FloatScales kScales>
TANDEM_INLINE inline F32 load_float_scale(const uint8_t* header, size_t column) {
  if constexpr (kScales == FloatScales::kRow)
    return set_f32(kE4m3Factor);
  else if constexpr (kBits == 8)
    return load_f32(reinterpret_cast<const float*>(header)) * set_f32(kE4m3Factor);
  else
    return as_f32(shift_left_23(load_u8(header + column)));
}

// out[kRows, 64 columns]; groups are summed in ascending order. All columns of a group come before
// the next group, so that a panel is read once, in order, however many columns the registers hold.
template <int kRows, int kVectors, int kBits, Scales kScales>
void tile_int(const Tile& tile, size_t first_row) {
  constexpr bool kHasMinimum = kScales == Scales::kGroupMinimum;
  constexpr bool kIsRow = kScales == Scales::kRow;
  const size_t group_size = static_cast<size_t>(kIsRow ? kRowGroupSize : tile.format.group_size);
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
  const uint8_t* p = tile.panel + (kIsRow ? kScaleBytes : 0);
  for (size_t k = 0, group = 0; k < tile.size; k += group_size, ++group) {
    for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(p) + column;
      const uint8_t* codes = p + kHeaderBytes<kScales> + column * 4;
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
        F32 scale = set_f32(1.0f), minimum = zero_f32();
        if constexpr (!kIsRow) scale = load_fp16(scales + v.value * kLanes);
        if constexpr (kHasMinimum) minimum = load_fp16(scales + kPanelColumns + v.value * kLanes);
        unroll<kRows>([&](auto r) TANDEM_INLINE {
          float* at = out[r.value] + column + v.value * kLanes;
          store_f32(at, add_group<kScales>(load_f32(at), acc[r.value][v.value], scale, minimum,
                                           operand, group_id[r.value] + group));
        });
      });
    }
    p += kHeaderBytes<kScales> + code_bytes;
  }
  if constexpr (kIsRow)
    unroll<kRows>([&](auto r) TANDEM_INLINE { scale_row(out[r.value], tile.panel); });
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
    prefetch_step<kVectors>(p);
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

// e4m3 and e2m1, widened to bf16 in registers: as tile_int, with sums of a group in fp32.
template <int kRows, int kVectors, int kBits, FloatScales kScales>
void tile_float(const Tile& tile, size_t first_row) {
  constexpr size_t kGroup = kBits == 8 ? 128 : 32;
  constexpr size_t kStep = kBits == 8 ? 4 : 8;
  const uint8_t* a[kRows];
  float* out[kRows];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    a[r.value] = tile.a->data + row_at(tile.rows, first_row + r.value) * tile.a->row_bytes;
    out[r.value] = tile.out + (first_row + r.value) * tile.out_stride;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) store_f32(out[r.value] + c, zero_f32());
  });
  const uint8_t* p = tile.panel + kFloatPanelHeader<kScales>;
  for (size_t first = 0; first < tile.size; first += kGroup) {
    for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      F32 acc[kRows][kVectors];
      unroll<kRows>([&](auto r) TANDEM_INLINE {
        unroll<kVectors>([&](auto v) TANDEM_INLINE { acc[r.value][v.value] = zero_f32(); });
      });
      const uint8_t* codes = p + kFloatGroupHeader<kScales> + column * 4;
      for (size_t k = first; k < first + kGroup; k += kStep, codes += kStepBytes) {
        prefetch_step<kVectors>(codes);
        // A vector of weights at a time: widened, all of them would not fit beside the sums.
        unroll<kVectors>([&](auto v) TANDEM_INLINE {
          const I32 packed = load_i32(codes + v.value * kLanes * 4);
          const auto add = [&](size_t at, Bf16Pair w) TANDEM_INLINE {
            unroll<kRows>([&](auto r) TANDEM_INLINE {
              F32& sum = acc[r.value][v.value];
              sum = dot(sum, w, bf16_row(a[r.value] + at * 2));
            });
          };
          if constexpr (kBits == 8) {
            Bf16Pair w[2];
            e4m3_weights(packed, w);
            add(k, w[0]);
            add(k + 2, w[1]);
          } else {
            unroll<4>([&](auto i) TANDEM_INLINE {
              add(k + 2 * i.value, e2m1_weights<i.value>(packed));
            });
          }
        });
      }
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        const size_t at = column + v.value * kLanes;
        const F32 scale = load_float_scale<kBits, kScales>(p, at);
        unroll<kRows>([&](auto r) TANDEM_INLINE {
          float* sum = out[r.value] + at;
          store_f32(sum, fma(acc[r.value][v.value], scale, load_f32(sum)));
        });
      });
    }
    p += kFloatGroupHeader<kScales> + kPanelColumns * kGroup * kBits / 8;
  }
  if constexpr (kScales == FloatScales::kRow)
    unroll<kRows>([&](auto r) TANDEM_INLINE { scale_float_row(out[r.value], tile.panel); });
}

template <int kRows>
void run_block(const Tile& tile, size_t row) {
  constexpr int kVectors = vectors_beside(kRows);
  constexpr int kBf16Vectors = bf16_vectors_beside(kRows);
  static_assert(kPanelVectors % kVectors == 0 && kPanelVectors % kBf16Vectors == 0);
  const WeightFormat& format = tile.format;
  if (format.bits == 16) {
    for (size_t c = 0; c < kPanelColumns; c += kBf16Vectors * kLanes)
      tile_bf16<kRows, kBf16Vectors>(tile, row, c);
    return;
  }
  void (*run)(const Tile&, size_t);
  if (format.is_float && format.bits == 8)
    run = format.group_size == 0 ? tile_float<kRows, kBf16Vectors, 8, FloatScales::kRow>
                                 : tile_float<kRows, kBf16Vectors, 8, FloatScales::kGroup>;
  else if (format.is_float)
    run = tile_float<kRows, kBf16Vectors, 4, FloatScales::kGroup>;
  else if (format.bits == 8 && format.group_size == 0)
    run = tile_int<kRows, kVectors, 8, Scales::kRow>;
  else if (format.bits == 8)
    run = format.has_minimum ? tile_int<kRows, kVectors, 8, Scales::kGroupMinimum>
                             : tile_int<kRows, kVectors, 8, Scales::kGroup>;
  else
    run = format.has_minimum ? tile_int<kRows, kVectors, 4, Scales::kGroupMinimum>
                             : tile_int<kRows, kVectors, 4, Scales::kGroup>;
  run(tile, row);
}

template <int kRows>
void run_rows(const Tile& tile, size_t row, size_t count) {
  if (count == kRows) return run_block<kRows>(tile, row);
  if constexpr (kRows > 1) run_rows<kRows - 1>(tile, row, count);
}

// out[num_rows, 64] = rows of a times the panel, with vectors.
void multiply_vectors(const Tile& tile, size_t num_rows) {
  // Blocks of equal height: 8 rows as 4 + 4 rather than 6 + 2.
  const size_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  size_t row = 0;
  for (size_t left = num_blocks; left > 0; --left) {
    const size_t count = (num_rows - row + left - 1) / left;
    run_rows<kMaxRows>(tile, row, count);
    row += count;
  }
}

#include "kernels/packed/multiply_f32-inl.h"

#if defined(TANDEM_TILE_HEADER)
#include TANDEM_TILE_HEADER

#include "kernels/packed/multiply_tiles-inl.h"
#else
inline void multiply(const Tile& tile, size_t num_rows) {
  if (tile.format.bits == 32) return multiply_f32(tile, num_rows);
  multiply_vectors(tile, num_rows);
}
#endif
