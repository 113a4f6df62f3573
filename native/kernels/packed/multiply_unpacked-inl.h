// Rows times a panel whose integer codes are unpacked first: some inputs of all columns at a time, in
// L1, as codes of 8 bits beside fp32 scales and minima. Included by multiply-inl.h.
//
// One body for all formats that are not multiplied straight from their panels; a single row unpacks in registers instead
// (tile_int), with the same sums: those of integers are exact, and the numbers after them are equal.

constexpr size_t kUnpackedInputs = 128;
constexpr size_t kUnpackedGroups = kUnpackedInputs / 16;

struct Unpacked {
  alignas(64) uint8_t codes[kUnpackedInputs * kPanelColumns];
  alignas(64) float scales[kUnpackedGroups][kPanelColumns];
  alignas(64) float minima[kUnpackedGroups][kPanelColumns];
};

// Returns true if products of several rows unpack the weights first.
inline bool keeps_unpacked(const WeightFormat& format) {
  if (format.bits >= 16 || format.is_float) return false;
  return visit_int_format(format, [](auto f) { return decltype(f)::kKeepsUnpacked; });
}

// Unpacks inputs [first_k, first_k + num_k) of a panel: at most kUnpackedInputs, whole chunks, all
// of one superblock.
template <class Format>
void unpack_span(const WeightFormat& format, const uint8_t* panel, size_t first_k, size_t num_k,
                 Unpacked& out) {
  const size_t group_size = Format::group_size(format);
  // Number of inputs whose scales are read together: a superblock, or a group.
  const size_t span = Format::kIsSuper ? kSuperblockSize : group_size;
  GroupScales<Format> scales;
  const uint8_t* codes = nullptr;
  uint8_t* to = out.codes;
  size_t count = 0;  // Of groups.
  for (size_t k = first_k; k < first_k + num_k; k += Format::kChunk) {
    if (k == first_k || k % span == 0) codes = scales.enter(find_group<Format>(format, panel, k), 0);
    if (k == first_k || k % group_size == 0) {
      scales.choose(k % span / group_size);
      for (size_t c = 0; c < kPanelColumns; c += kLanes) {
        F32 scale = scales.scale(c);
        if constexpr (Format::kIsRow)
          scale = load_fp16(reinterpret_cast<const uint16_t*>(panel) + c);
        store_f32(out.scales[count] + c, scale);
        store_f32(out.minima[count] + c, scales.minimum(c));
      }
      ++count;
    }
    const uint8_t* chunk = codes + k % span / Format::kChunk * Format::kChunkBytes;
    for (size_t i = 0; i < Format::kChunkBytes; i += 64)
      __builtin_prefetch(chunk + kPrefetchBytes + i);
#if defined(TANDEM_EIGHTS_HEADER)
    if constexpr (Format::kIsBook) {
      unpack_chunk<Format>(chunk, to);
      to += Format::kChunk * kPanelColumns;
      continue;
    }
#endif
    unroll<Format::kChunk / 4>([&](auto i) TANDEM_INLINE {
      for (size_t c = 0; c < kPanelColumns; c += kLanes)
        store_i32(to + c * 4, unpack_codes<Format, i.value>(chunk, c));
      to += kStepBytes;
    });
  }
}

typedef void (*UnpackSpan)(const WeightFormat&, const uint8_t*, size_t, size_t, Unpacked&);
inline UnpackSpan choose_unpacking(const WeightFormat& format) {
  return visit_int_format(format, [](auto f) -> UnpackSpan { return unpack_span<decltype(f)>; });
}

// Returns the largest code for which `steps` products with int8 can be summed in 16 bits without
// overflow.
constexpr int max_narrow_code(int steps) { return 32767 / 256 / steps; }

// Adds the integer products of one group of unpacked codes.
template <int kNarrowSteps, int kRows, int kVectors>
TANDEM_INLINE inline void add_unpacked_group(I32 (&acc)[kRows][kVectors],
                                             const uint8_t* const (&a)[kRows], size_t k,
                                             size_t group_size, const uint8_t* codes) {
  if constexpr (kNarrowSteps == 0) {
    for (size_t i = 0; i < group_size; i += 4, codes += kStepBytes) {
      add_step(acc, a, k + i, [&](auto v) TANDEM_INLINE {
        return load_i32(codes + v.value * kLanes * 4);
      });
    }
  } else {
    using Narrow = NarrowSums<max_narrow_code(kNarrowSteps)>;
    I32 sums[kRows][kVectors];
    for (size_t i = 0; i < group_size; i += 4 * kNarrowSteps) {
      unroll<kNarrowSteps>([&](auto step) TANDEM_INLINE {
        add_narrow_step<Narrow, step.value == 0>(
            sums, a, k + i + 4 * step.value,
            [&](auto v) TANDEM_INLINE { return load_i32(codes + v.value * kLanes * 4); });
        codes += kStepBytes;
      });
      add_narrow_sums<Narrow>(acc, sums);
    }
  }
}

// A range of unpacked inputs, from `first_k` on, whose products are added to the output.
struct UnpackedSpan {
  const Unpacked* weights;
  size_t first_k, num_k, group_size;
  int narrow_steps;
};
template <int kRows, int kVectors, bool kHasMinimum, int kNarrowSteps>
void add_unpacked(const Tile& tile, const UnpackedSpan& span, size_t first_row) {
  const Operand operand = *tile.a;
  const uint8_t* a[kRows];
  size_t group_id[kRows];
  float* out[kRows];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    const size_t row = row_at(tile.rows, first_row + r.value);
    a[r.value] = operand.data + row * operand.row_bytes + span.first_k;
    group_id[r.value] = row * operand.num_groups + span.first_k / span.group_size;
    out[r.value] = tile.out + (first_row + r.value) * tile.out_stride;
  });
  for (size_t k = 0, group = 0; k < span.num_k; k += span.group_size, ++group) {
    for (size_t column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      I32 acc[kRows][kVectors];
      unroll<kRows>([&](auto r) TANDEM_INLINE {
        const I32 start =
            set_i32(kHasMinimum ? 0 : operand.corrections[group_id[r.value] + group]);
        unroll<kVectors>([&](auto v) TANDEM_INLINE { acc[r.value][v.value] = start; });
      });
      const uint8_t* codes = span.weights->codes + k * kPanelColumns + column * 4;
      add_unpacked_group<kNarrowSteps>(acc, a, k, span.group_size, codes);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        const size_t at = column + v.value * kLanes;
        const F32 scale = load_f32(span.weights->scales[group] + at);
        F32 minimum = zero_f32();
        if constexpr (kHasMinimum) minimum = load_f32(span.weights->minima[group] + at);
        unroll<kRows>([&](auto r) TANDEM_INLINE {
          float* sum = out[r.value] + at;
          store_f32(sum, add_group<kHasMinimum>(load_f32(sum), acc[r.value][v.value], scale,
                                                minimum, operand, group_id[r.value] + group));
        });
      });
    }
  }
}

template <int kRows, int kNarrowSteps>
void run_block_unpacked(const Tile& tile, const UnpackedSpan& span, size_t row) {
  constexpr int kVectors = vectors_beside(kRows);
  if (tile.format.has_minimum)
    return add_unpacked<kRows, kVectors, true, kNarrowSteps>(tile, span, row);
  return add_unpacked<kRows, kVectors, false, kNarrowSteps>(tile, span, row);
}

template <int kRows>
void run_rows_unpacked(const Tile& tile, const UnpackedSpan& span, size_t row, size_t count) {
  if (count == kRows) {
    // A target without 16-bit sums (kSteps 0) never gets a format that asks for them.
    if constexpr (NarrowSums<1>::kSteps != 0) {
      if (span.narrow_steps == 8) return run_block_unpacked<kRows, 8>(tile, span, row);
      if (span.narrow_steps == 4) return run_block_unpacked<kRows, 4>(tile, span, row);
      if (span.narrow_steps == 2) return run_block_unpacked<kRows, 2>(tile, span, row);
    }
    return run_block_unpacked<kRows, 0>(tile, span, row);
  }
  if constexpr (kRows > 1) run_rows_unpacked<kRows - 1>(tile, span, row, count);
}

void multiply_unpacked(const Tile& tile, size_t num_rows) {
  const UnpackSpan unpack = choose_unpacking(tile.format);
  const int narrow_steps =
      visit_int_format(tile.format, [](auto f) { return decltype(f)::kNarrowSteps; });
  Unpacked weights;
  for (size_t row = 0; row < num_rows; ++row)
    for (size_t c = 0; c < kPanelColumns; c += kLanes)
      store_f32(tile.out + row * tile.out_stride + c, zero_f32());
  const size_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  for (size_t k = 0; k < tile.size; k += kUnpackedInputs) {
    const size_t num_k = tile.size - k < kUnpackedInputs ? tile.size - k : kUnpackedInputs;
    unpack(tile.format, tile.panel, k, num_k, weights);
    const UnpackedSpan span{&weights, k, num_k, static_cast<size_t>(tile.format.group_size),
                            narrow_steps};
    size_t row = 0;
    for (size_t left = num_blocks; left > 0; --left) {
      const size_t count = (num_rows - row + left - 1) / left;
      run_rows_unpacked<kMaxRows>(tile, span, row, count);
      row += count;
    }
  }
  if (tile.format.table != CodeTable::kE2m1) return;
  for (size_t row = 0; row < num_rows; ++row)
    apply_factors(tile.out + row * tile.out_stride, tile.panel);
}
