// Rows times a panel of fp32 weights. Included by multiply-inl.h.
//
// An output is one chain of fused multiply-adds over K, ascending, on every ISA. Between two chunks of
// K its sum lies in the output, as exactly as in a register, so chunks change no bit either.

// Number of inputs that all rows of a call are multiplied with before the next inputs: 64 KiB of
// the panel, which stay in L2.
constexpr size_t kF32Chunk = 256;

// The inputs [first_k, last_k) of a panel that a call multiplies.
struct F32Span {
  size_t first_k, last_k;
};

template <int kRows, int kVectors>
void tile_f32(const Tile& tile, size_t first_row, size_t column, F32Span span) {
  const float* a[kRows];
  float* out[kRows];
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    const size_t row = row_at(tile.rows, first_row + r.value);
    a[r.value] = reinterpret_cast<const float*>(tile.a->data + row * tile.a->row_bytes);
    out[r.value] = tile.out + (first_row + r.value) * tile.out_stride + column;
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      sum[r.value][v.value] =
          span.first_k == 0 ? zero_f32() : load_f32(out[r.value] + v.value * kLanes);
    });
  });
  const uint8_t* p = tile.panel + span.first_k * kStepBytes + column * 4;
  for (size_t k = span.first_k; k < span.last_k; ++k, p += kStepBytes) {
    // The first columns prefetch the lines of all columns of a step: memory delivers a panel's
    // lines fast only in order.
    if (column == 0) prefetch_step<kPanelVectors>(p);
    F32 w[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      w[v.value] = load_f32(reinterpret_cast<const float*>(p) + v.value * kLanes);
    });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      const F32 x = set_f32(a[r.value][k]);
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sum[r.value][v.value] = fma(w[v.value], x, sum[r.value][v.value]);
      });
    });
  }
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      store_f32(out[r.value] + v.value * kLanes, sum[r.value][v.value]);
    });
  });
}

template <int kRows>
void run_rows_f32(const Tile& tile, size_t row, size_t count, F32Span span) {
  if (count == kRows) {
    constexpr int kVectors = f32_vectors_beside(kRows);
    static_assert(kPanelVectors % kVectors == 0);
    for (size_t c = 0; c < kPanelColumns; c += kVectors * kLanes)
      tile_f32<kRows, kVectors>(tile, row, c, span);
    return;
  }
  if constexpr (kRows > 1) run_rows_f32<kRows - 1>(tile, row, count, span);
}

void multiply_f32(const Tile& tile, size_t num_rows) {
  const size_t num_blocks = (num_rows + kMaxF32Rows - 1) / kMaxF32Rows;
  for (size_t k = 0; k < tile.size; k += kF32Chunk) {
    const F32Span span{k, tile.size - k < kF32Chunk ? tile.size : k + kF32Chunk};
    size_t row = 0;
    for (size_t left = num_blocks; left > 0; --left) {
      const size_t count = (num_rows - row + left - 1) / left;
      run_rows_f32<kMaxF32Rows>(tile, row, count, span);
      row += count;
    }
  }
}
