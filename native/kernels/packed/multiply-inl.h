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

// The rows of an operand that a product reads: those listed in `ids`, or consecutive ones from
// `first` if `ids` is null.
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

// Bytes by which codes are prefetched. A panel is one sequence, which the hardware's own
// prefetching follows; but with several operations per cache line it falls behind: 4-bit weights
// came at half the speed with two rows. At the end of a panel the prefetch reaches into the panel
// behind it, which usually comes next. With AVX2 half the distance is used: one row of int8 then
// takes 1.03 times as long as reading its weights, instead of 1.33 times.
constexpr size_t kPrefetchBytes = kLanes == 8 ? 2048 : 4096;
template <int kVectors>
TANDEM_INLINE inline void prefetch_step(const uint8_t* codes) {
  for (size_t i = 0; i < kVectors * kLanes * 4; i += 64)
    __builtin_prefetch(codes + kPrefetchBytes + i);
}

#include "kernels/packed/unpack-inl.h"

// True if products of one row take over the signs of codebook entries.
template <class Format, int kRows>
constexpr bool takes_signs() {
#if defined(TANDEM_EIGHTS_HEADER)
  return kRows == 1 && Format::kIsBook;
#else
  return false;
#endif
}
#if defined(TANDEM_EIGHTS_HEADER)
#include TANDEM_EIGHTS_HEADER

#include "kernels/packed/book_entries-inl.h"
#endif

// Adds the products of a step; `codes(v)` returns the codes of a vector. Beside one row a vector's
// codes are used as soon as they are unpacked, since those of all vectors would fill the registers.
template <int kRows, int kVectors, class Codes>
TANDEM_INLINE inline void add_step(I32 (&acc)[kRows][kVectors], const uint8_t* const (&a)[kRows],
                                   size_t k, const Codes& codes) {
  if constexpr (kRows == 1) {
    const IntRow row = int_row(a[0] + k);
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      acc[0][v.value] = dot(acc[0][v.value], int_weights(codes(v)), row);
    });
  } else {
    IntWeights w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE { w[v.value] = int_weights(codes(v)); });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      const IntRow row = int_row(a[r.value] + k);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        acc[r.value][v.value] = dot(acc[r.value][v.value], w[v.value], row);
      });
    });
  }
}

// Does the same as add_step with products of 16 bits, which become `sums` or are added to them.
template <class Narrow, bool kIsFirst, int kRows, int kVectors, class Codes>
TANDEM_INLINE inline void add_narrow_step(I32 (&sums)[kRows][kVectors],
                                          const uint8_t* const (&a)[kRows], size_t k,
                                          const Codes& codes) {
  const auto add = [&](I32& sum, I32 w, I32 row) TANDEM_INLINE {
    const I32 products = Narrow::multiply(w, row);
    sum = kIsFirst ? products : Narrow::add(sum, products);
  };
  if constexpr (kRows == 1) {
    const I32 row = Narrow::row(a[0] + k);
    unroll<kVectors>([&](auto v) TANDEM_INLINE { add(sums[0][v.value], codes(v), row); });
  } else {
    I32 w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE { w[v.value] = codes(v); });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      const I32 row = Narrow::row(a[r.value] + k);
      unroll<kVectors>([&](auto v) TANDEM_INLINE { add(sums[r.value][v.value], w[v.value], row); });
    });
  }
}
template <class Narrow, int kRows, int kVectors>
TANDEM_INLINE inline void add_narrow_sums(I32 (&acc)[kRows][kVectors],
                                          const I32 (&sums)[kRows][kVectors]) {
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      acc[r.value][v.value] += Narrow::widen(sums[r.value][v.value]);
    });
  });
}

// Adds the products of a group as add_codes does, but sums the products of kNarrowSteps steps in 16
// bits first.
template <class Format, int kRows, int kVectors>
TANDEM_INLINE inline void add_narrow_codes(I32 (&acc)[kRows][kVectors],
                                           const uint8_t* const (&a)[kRows], size_t k,
                                           size_t group_size, const uint8_t* codes, size_t column) {
  using Narrow = NarrowSums<Format::kMaxCode>;
  constexpr size_t kSteps = Format::kNarrowSteps, kChunkSteps = Format::kChunk / 4;
  // Number of steps that are both whole chunks of codes and whole 16-bit sums.
  constexpr size_t kRun = kChunkSteps < kSteps ? kSteps : kChunkSteps;
  static_assert(kRun % kChunkSteps == 0 && kRun % kSteps == 0);
  I32 sums[kRows][kVectors];
  for (size_t done = 0; done < group_size; done += 4 * kRun) {
    unroll<kRun>([&](auto i) TANDEM_INLINE {
      if constexpr (i.value % kChunkSteps == 0)
        unroll<Format::kChunkBytes / kStepBytes>([&](auto j) TANDEM_INLINE {
          prefetch_step<kVectors>(codes + j.value * kStepBytes + column * 4);
        });
      add_narrow_step<Narrow, i.value % kSteps == 0>(
          sums, a, k + done + 4 * i.value, [&](auto v) TANDEM_INLINE {
            return unpack_codes<Format, i.value % kChunkSteps>(codes, column + v.value * kLanes);
          });
      if constexpr (i.value % kSteps == kSteps - 1) add_narrow_sums<Narrow>(acc, sums);
      if constexpr (i.value % kChunkSteps == kChunkSteps - 1) codes += Format::kChunkBytes;
    });
  }
}

// Adds the integer products of a group's codes, for kVectors vectors of columns from `column` on.
template <class Format, int kRows, int kVectors>
TANDEM_INLINE inline void add_codes(I32 (&acc)[kRows][kVectors], const uint8_t* const (&a)[kRows],
                                    size_t k, size_t group_size, const uint8_t* codes,
                                    size_t column) {
#if defined(TANDEM_EIGHTS_HEADER)
  if constexpr (takes_signs<Format, kRows>())
    return add_entries<Format>(acc[0], a[0] + k, codes, column);
#endif
  if constexpr (Format::kNarrowSteps != 0)
    return add_narrow_codes<Format>(acc, a, k, group_size, codes, column);
  for (size_t done = 0; done < group_size; done += Format::kChunk, codes += Format::kChunkBytes) {
    unroll<Format::kChunkBytes / kStepBytes>([&](auto i) TANDEM_INLINE {
      prefetch_step<kVectors>(codes + i.value * kStepBytes + column * 4);
    });
    // Codes are loaded again for each step and not kept, because the registers hold the sums.
    unroll<Format::kChunk / 4>([&](auto i) TANDEM_INLINE {
      add_step(acc, a, k + done + 4 * i.value, [&](auto v) TANDEM_INLINE {
        return unpack_codes<Format, i.value>(codes, column + v.value * kLanes);
      });
    });
  }
}

// Returns the float sum with a group added: its integer products times the scales of both sides,
// and the term of the minimum.
template <bool kHasMinimum>
TANDEM_INLINE inline F32 add_group(F32 sum, I32 products, F32 scale, F32 minimum,
                                   const Operand& operand, size_t group_id) {
  sum = fma(to_f32(products), scale * set_f32(operand.scales[group_id]), sum);
  if constexpr (kHasMinimum)
    sum = fma(minimum, set_f32(operand.offsets[group_id]), sum);
  return sum;
}

// Multiplies whole sums with the one scale that each output has, for formats with one scale per
// row.
inline void scale_row(float* out, const uint8_t* panel) {
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
  for (size_t c = 0; c < kPanelColumns; c += kLanes)
    store_f32(out + c, load_f32(out + c) * load_fp16(scales + c));
}

// Multiplies the scales of a group's columns with the factor of each output, which stands before
// the panel; a negative factor divides by its magnitude instead. Either is one rounding, as in the
// checkpoint's own decoder.
inline F32 apply_factor(F32 scale, const uint8_t* panel, size_t column) {
  const F32 factor = load_f32(reinterpret_cast<const float*>(panel) + column);
  const F32 divided = scale / (zero_f32() - factor);
  return as_f32(select(is_less(factor, zero_f32()), as_i32(divided), as_i32(scale * factor)));
}
inline void apply_factors(float* out, const uint8_t* panel) {
  for (size_t c = 0; c < kPanelColumns; c += kLanes)
    store_f32(out + c, load_f32(out + c) * apply_factor(set_f32(1.0f), panel, c));
}

// Does the same as scale_row for e4m3, whose scales are fp32.
inline void scale_float_row(float* out, const uint8_t* panel) {
  const float* scales = reinterpret_cast<const float*>(panel);
  for (size_t c = 0; c < kPanelColumns; c += kLanes)
    store_f32(out + c, load_f32(out + c) * load_f32(scales + c));
}

// Kind of scales of a float format: one for each group, or one for each row (output).
enum class FloatScales { kGroup, kRow };

template <FloatScales kScales>
constexpr size_t kFloatGroupHeader = kScales == FloatScales::kRow ? 0 : kFloatHeaderBytes;
template <FloatScales kScales>
constexpr size_t kFloatPanelHeader = kScales == FloatScales::kRow ? kRowHeaderBytes : 0;

// Returns the scales of columns [column, column + kLanes) for a group of a float format; without
// the scale of a row, which is applied at the end.
template <int kBits, FloatScales kScales>
TANDEM_INLINE inline F32 load_float_scale(const uint8_t* header, size_t column) {
  if constexpr (kScales == FloatScales::kRow)
    return set_f32(kE4m3Factor);
  else if constexpr (kBits == 8)
    return load_f32(reinterpret_cast<const float*>(header)) * set_f32(kE4m3Factor);
  else
    return as_f32(shift_left_23(load_u8(header + column)));
}

// Computes out[kRows, 64 columns]; groups are summed in ascending order. All columns of a group
// come before the next group, so that a panel is read once and in order, however many columns fit
// the registers.
template <int kRows, int kVectors, class Format>
void tile_int(const Tile& tile, size_t first_row) {
  const size_t group_size = Format::group_size(tile.format);
  const size_t code_bytes = group_size / Format::kChunk * Format::kChunkBytes;
  const Operand operand = *tile.a;
  const uint8_t* a[kRows];
  size_t group_id[kRows];
  // The float sums are kept in the output and touched once per group, because the registers hold
  // the integer sums.
  float* out[kRows];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    const size_t row = row_at(tile.rows, first_row + r.value);
    a[r.value] = operand.data + row * operand.row_bytes;
    group_id[r.value] = row * operand.num_groups;
    out[r.value] = tile.out + (first_row + r.value) * tile.out_stride;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) store_f32(out[r.value] + c, zero_f32());
  });
  GroupScales<Format> scales;
  const uint8_t* p = tile.panel + Format::kPanelHeaderBytes;
  for (size_t k = 0, group = 0; k < tile.size; k += group_size, ++group) {
    const uint8_t* codes = scales.enter(p, group);
    for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      I32 acc[kRows][kVectors];
      unroll<kRows>([&](auto r) TANDEM_INLINE {
        // Starting from the operand's correction, not from zero, undoes the offset of the unsigned
        // codes at no cost.
        constexpr bool kIsCorrected = !Format::kHasMinimum && !takes_signs<Format, kRows>();
        const I32 start =
            set_i32(kIsCorrected ? operand.corrections[group_id[r.value] + group] : 0);
        unroll<kVectors>([&](auto v) TANDEM_INLINE { acc[r.value][v.value] = start; });
      });
      add_codes<Format, kRows, kVectors>(acc, a, k, group_size, codes, column);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        const size_t at = column + v.value * kLanes;
        const F32 scale = scales.scale(at), minimum = scales.minimum(at);
        unroll<kRows>([&](auto r) TANDEM_INLINE {
          float* sum = out[r.value] + at;
          store_f32(sum, add_group<Format::kHasMinimum>(load_f32(sum), acc[r.value][v.value],
                                                        scale, minimum, operand,
                                                        group_id[r.value] + group));
        });
      });
    }
    p = codes + code_bytes;
  }
  if constexpr (Format::kIsRow)
    unroll<kRows>([&](auto r) TANDEM_INLINE { scale_row(out[r.value], tile.panel); });
  if constexpr (Format::kHasFactor)
    unroll<kRows>([&](auto r) TANDEM_INLINE { apply_factors(out[r.value], tile.panel); });
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

// Multiplies e4m3 or e2m1 weights, widened to bf16 in registers: like tile_int, but the sums of a
// group are fp32.
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
        // Weights are widened one vector at a time: all of them would not fit into registers beside
        // the sums.
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
  else
    run = visit_int_format(format, [](auto f) -> void (*)(const Tile&, size_t) {
      // Several rows of a format that is unpacked first are multiplied in multiply_unpacked-inl.h.
      if constexpr (kRows == 1 || !decltype(f)::kKeepsUnpacked)
        return tile_int<kRows, kVectors, decltype(f)>;
      return nullptr;
    });
  run(tile, row);
}

template <int kRows>
void run_rows(const Tile& tile, size_t row, size_t count) {
  if (count == kRows) return run_block<kRows>(tile, row);
  if constexpr (kRows > 1) run_rows<kRows - 1>(tile, row, count);
}

#include "kernels/packed/multiply_unpacked-inl.h"

// Computes out[num_rows, 64] = rows of a times the panel with vector instructions.
void multiply_vectors(const Tile& tile, size_t num_rows) {
  if (num_rows > 1 && keeps_unpacked(tile.format)) return multiply_unpacked(tile, num_rows);
  // Split the rows into blocks of nearly equal height: 8 rows as 4 + 4, not 6 + 2.
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

#include "kernels/packed/tiles/multiply_tiles-inl.h"
#else
inline void multiply(const Tile& tile, size_t num_rows) {
  if (tile.format.bits == 32) return multiply_f32(tile, num_rows);
  multiply_vectors(tile, num_rows);
}
#endif
