// Rows times a panel with the tile registers of AMX, which read panels as they lie: 16 rows beside
// 64 columns, four tiles of sums. Included by multiply-inl.h where the variant has tiles.
//
// There are no tiles of fp32. Integer sums are exact, so a few rows may take the vectors instead, with equal results; products of
// bf16 are rounded in another order than the vectors' and always take the tiles. A tile computes
// each row for itself, so a result does not depend on the rows beside it.

constexpr size_t kTileRows = 16;
constexpr size_t kMaxStepBytes = 64;
// Largest number of rows for which vectors are used instead of tiles: the weights come from memory,
// and vectors multiply as fast as they arrive.
constexpr size_t kMaxVectorRows = 4;

struct TileScratch {
  alignas(64) uint8_t rows[kTileRows * kMaxStepBytes];
  // The weights of a group, widened: 128 inputs of 64 columns in bf16.
  alignas(64) uint8_t weights[kMaxGroupSize * kPanelColumns * 2];
  alignas(64) int32_t sums[kTileRows][kPanelColumns];
};

// A range of an operand's rows: `count` rows from `first_row` on.
struct TileRows {
  const Tile* tile;
  size_t first_row;
  size_t count;
};

// Returns the bytes [offset, offset + size) of the rows; they are copied together if the rows are
// not at equal distances in memory.
inline const uint8_t* find_rows(const TileRows& rows, size_t offset, size_t size,
                                TileScratch& scratch, size_t* stride) {
  const Operand& a = *rows.tile->a;
  if (rows.tile->rows.ids == nullptr) {
    *stride = a.row_bytes;
    return a.data + row_at(rows.tile->rows, rows.first_row) * a.row_bytes + offset;
  }
  *stride = kMaxStepBytes;
  for (size_t i = 0; i < rows.count; ++i) {
    const size_t row = row_at(rows.tile->rows, rows.first_row + i);
    __builtin_memcpy(scratch.rows + i * kMaxStepBytes, a.data + row * a.row_bytes + offset, size);
  }
  return scratch.rows;
}

inline void store_tiles(const Tiles& tiles, TileScratch& scratch) {
  constexpr size_t kStride = sizeof scratch.sums[0];
  tiles.store<0>(&scratch.sums[0][0], kStride);
  tiles.store<1>(&scratch.sums[0][16], kStride);
  tiles.store<2>(&scratch.sums[0][32], kStride);
  tiles.store<3>(&scratch.sums[0][48], kStride);
}

inline float* find_out(const TileRows& rows, size_t i) {
  return rows.tile->out + (rows.first_row + i) * rows.tile->out_stride;
}

inline void clear_out(const TileRows& rows) {
  for (size_t i = 0; i < rows.count; ++i)
    for (size_t c = 0; c < kPanelColumns; c += kLanes) store_f32(find_out(rows, i) + c, zero_f32());
}

// Reads the scales and minima of a group of 8-bit codes; returns the codes, which tiles read in
// place.
inline const uint8_t* enter_int8(const Tile& tile, size_t group, size_t group_size, Unpacked& out) {
  const bool is_row = tile.format.group_size == 0;
  const size_t header = is_row ? 0 : (tile.format.has_minimum ? 2 : 1) * kScaleBytes;
  const uint8_t* p = tile.panel + (is_row ? kScaleBytes : 0) +
                     group * (header + kPanelColumns * group_size);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  for (size_t c = 0; !is_row && c < kPanelColumns; c += kLanes) {
    store_f32(out.scales[0] + c, load_fp16(halves + c));
    if (tile.format.has_minimum)
      store_f32(out.minima[0] + c, load_fp16(halves + kPanelColumns + c));
  }
  return p + header;
}

// Multiplies integer formats; codes of less than 8 bits are unpacked, some inputs at a time, once
// for 16 rows.
void tiles_int(const TileRows& rows) {
  const Tile& tile = *rows.tile;
  const Operand& operand = *tile.a;
  const WeightFormat& format = tile.format;
  const bool is_row = format.group_size == 0;
  const size_t group_size = static_cast<size_t>(is_row ? kRowGroupSize : format.group_size);
  const size_t step = group_size < kMaxStepBytes ? group_size : kMaxStepBytes;
  const UnpackSpan unpack = choose_unpacking(format);
  Unpacked weights;
  TileScratch scratch;
  Tiles tiles(rows.count, step);
  clear_out(rows);
  for (size_t k = 0, group = 0; k < tile.size; k += group_size, ++group) {
    const size_t in_span = format.bits == 8 ? 0 : k % kUnpackedInputs;
    const uint8_t* codes = weights.codes + in_span * kPanelColumns;
    if (format.bits == 8) {
      codes = enter_int8(tile, group, group_size, weights);
    } else if (in_span == 0) {
      const size_t left = tile.size - k;
      unpack(format, tile.panel, k, left < kUnpackedInputs ? left : kUnpackedInputs, weights);
    }
    tiles.clear();
    for (size_t i = 0; i < group_size; i += step, codes += step / 4 * kStepBytes) {
      size_t stride;
      const uint8_t* a = find_rows(rows, k + i, step, scratch, &stride);
      tiles.add_int8<0>(a, stride, codes, kStepBytes);
      tiles.add_int8<1>(a, stride, codes + 64, kStepBytes);
      tiles.add_int8<2>(a, stride, codes + 128, kStepBytes);
      tiles.add_int8<3>(a, stride, codes + 192, kStepBytes);
    }
    store_tiles(tiles, scratch);
    const float* scales = weights.scales[in_span / group_size];
    const float* minima = weights.minima[in_span / group_size];
    for (size_t i = 0; i < rows.count; ++i) {
      const size_t row = row_at(tile.rows, rows.first_row + i);
      const size_t id = row * operand.num_groups + group;
      float* out = find_out(rows, i);
      for (size_t c = 0; c < kPanelColumns; c += kLanes) {
        const I32 products = load_i32(&scratch.sums[i][c]);
        const F32 sum = load_f32(out + c);
        if (format.has_minimum) {
          store_f32(out + c, add_group<true>(sum, products, load_f32(scales + c),
                                             load_f32(minima + c), operand, id));
        } else {
          // With one scale per row the scale is applied at the end, as with vectors.
          const F32 scale = is_row ? set_f32(1.0f) : load_f32(scales + c);
          store_f32(out + c, add_group<false>(sum, products + set_i32(operand.corrections[id]),
                                              scale, zero_f32(), operand, id));
        }
      }
    }
  }
  if (is_row)
    for (size_t i = 0; i < rows.count; ++i) scale_row(find_out(rows, i), tile.panel);
  if (format.table == CodeTable::kE2m1)
    for (size_t i = 0; i < rows.count; ++i) apply_factors(find_out(rows, i), tile.panel);
}

// Adds the products of inputs [first, last) of the rows to the tiles, in steps of `step` bf16
// values.
inline void add_bf16_steps(Tiles& tiles, const TileRows& rows, size_t first, size_t last, size_t step,
                           const uint8_t* values, TileScratch& scratch) {
  for (size_t k = first; k < last; k += step, values += step / 2 * kStepBytes) {
    size_t stride;
    const uint8_t* a = find_rows(rows, k * 2, step * 2, scratch, &stride);
    tiles.add_bf16<0>(a, stride, values, kStepBytes);
    tiles.add_bf16<1>(a, stride, values + 64, kStepBytes);
    tiles.add_bf16<2>(a, stride, values + 128, kStepBytes);
    tiles.add_bf16<3>(a, stride, values + 192, kStepBytes);
  }
}

// Adds scale * sums of the tiles to the output.
template <class Scale>
inline void add_sums(const TileRows& rows, const TileScratch& scratch, const Scale& scale) {
  for (size_t i = 0; i < rows.count; ++i) {
    float* out = find_out(rows, i);
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      const F32 sum = as_f32(load_i32(&scratch.sums[i][c]));
      store_f32(out + c, fma(sum, scale(c), load_f32(out + c)));
    }
  }
}

void tiles_bf16(const TileRows& rows) {
  constexpr size_t kStep = kMaxStepBytes / 2;
  TileScratch scratch;
  const size_t size = rows.tile->size, whole = size / kStep * kStep;
  const auto one = [](size_t) { return set_f32(1.0f); };
  clear_out(rows);
  if (whole > 0) {
    Tiles tiles(rows.count, kMaxStepBytes);
    tiles.clear();
    add_bf16_steps(tiles, rows, 0, whole, kStep, rows.tile->panel, scratch);
    store_tiles(tiles, scratch);
    add_sums(rows, scratch, one);
  }
  if (whole < size) {
    Tiles tiles(rows.count, (size - whole) * 2);
    tiles.clear();
    add_bf16_steps(tiles, rows, whole, size, size - whole,
                   rows.tile->panel + whole / 2 * kStepBytes, scratch);
    store_tiles(tiles, scratch);
    add_sums(rows, scratch, one);
  }
}

template <int kBits>
inline void widen_floats(const uint8_t* codes, size_t group_size, uint8_t* out) {
  constexpr size_t kStep = kBits == 8 ? 4 : 8;
  for (size_t k = 0; k < group_size; k += kStep, codes += kStepBytes, out += kStep / 2 * kStepBytes) {
    for (size_t i = 0; i < kStepBytes; i += kLanes * 4) {
      const I32 packed = load_i32(codes + i);
      if constexpr (kBits == 8) {
        Bf16Pair w[2];
        e4m3_weights(packed, w);
        store_pair(out + i, w[0]);
        store_pair(out + kStepBytes + i, w[1]);
      } else {
        unroll<4>([&](auto j) TANDEM_INLINE {
          store_pair(out + j.value * kStepBytes + i, e2m1_weights<j.value>(packed));
        });
      }
    }
  }
}

template <int kBits, FloatScales kScales>
void tiles_float(const TileRows& rows) {
  constexpr size_t kGroup = kBits == 8 ? 128 : 32;
  TileScratch scratch;
  Tiles tiles(rows.count, kMaxStepBytes);
  clear_out(rows);
  const uint8_t* p = rows.tile->panel + kFloatPanelHeader<kScales>;
  for (size_t k = 0; k < rows.tile->size; k += kGroup) {
    widen_floats<kBits>(p + kFloatGroupHeader<kScales>, kGroup, scratch.weights);
    tiles.clear();
    add_bf16_steps(tiles, rows, k, k + kGroup, kMaxStepBytes / 2, scratch.weights, scratch);
    store_tiles(tiles, scratch);
    add_sums(rows, scratch,
             [&](size_t column) { return load_float_scale<kBits, kScales>(p, column); });
    p += kFloatGroupHeader<kScales> + kPanelColumns * kGroup * kBits / 8;
  }
  if constexpr (kScales == FloatScales::kRow)
    for (size_t i = 0; i < rows.count; ++i) scale_float_row(find_out(rows, i), rows.tile->panel);
}

void run_tiles(const TileRows& rows) {
  const WeightFormat& format = rows.tile->format;
  if (format.bits == 16) return tiles_bf16(rows);
  if (format.is_float && format.bits == 4) return tiles_float<4, FloatScales::kGroup>(rows);
  if (format.is_float)
    return format.group_size == 0 ? tiles_float<8, FloatScales::kRow>(rows)
                                  : tiles_float<8, FloatScales::kGroup>(rows);
  tiles_int(rows);
}

void multiply(const Tile& tile, size_t num_rows) {
  if (tile.format.bits == 32) return multiply_f32(tile, num_rows);
  const bool has_exact_sums = tile.format.bits < 16 && !tile.format.is_float;
  if (has_exact_sums && num_rows <= kMaxVectorRows) return multiply_vectors(tile, num_rows);
  for (size_t row = 0; row < num_rows; row += kTileRows)
    run_tiles({&tile, row, num_rows - row < kTileRows ? num_rows - row : kTileRows});
}
