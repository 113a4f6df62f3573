// The body of low-rank adapters and of the rounding of sums, a part of row_ops-inl.h; see lora.h.

// Numbers of rows, and of ranks, whose sums stay in registers together.
constexpr size_t kTileRows = kLanes == 16 ? 4 : 2;
constexpr size_t kTileRanks = kLanes == 16 ? 4 : 2;
constexpr size_t kUpRows = kLanes == 16 ? 4 : 1;

template <class T, size_t kRows, size_t kRanks>
TANDEM_INLINE inline void down_tile(const LoraDown& piece, size_t row, size_t rank) {
  const T* x[kRows];
  const T* weights[kRanks];
  for (size_t r = 0; r < kRows; ++r)
    x[r] = static_cast<const T*>(piece.x) + static_cast<size_t>(piece.rows[row + r]) * piece.x_stride;
  for (size_t q = 0; q < kRanks; ++q)
    weights[q] = static_cast<const T*>(piece.down) + (rank + q) * piece.in_size;
  F32 sums[kRows][kRanks][kWordVectors];
  for (size_t r = 0; r < kRows; ++r)
    for (size_t q = 0; q < kRanks; ++q)
      for (size_t v = 0; v < kWordVectors; ++v) sums[r][q][v] = zero_f32();
  size_t i = 0;
  for (; i + 16 <= piece.in_size; i += 16)
    for (size_t v = 0; v < kWordVectors; ++v) {
      F32 values[kRows];
      for (size_t r = 0; r < kRows; ++r) values[r] = load_wide(x[r] + i + v * kLanes);
      for (size_t q = 0; q < kRanks; ++q) {
        const F32 weight = load_wide(weights[q] + i + v * kLanes);
        for (size_t r = 0; r < kRows; ++r) sums[r][q][v] = fma(values[r], weight, sums[r][q][v]);
      }
    }
  if (i < piece.in_size) {
    float x_tail[16], weight_tail[16];
    for (size_t q = 0; q < kRanks; ++q) {
      load_tail(weight_tail, weights[q] + i, piece.in_size - i, 16);
      for (size_t r = 0; r < kRows; ++r) {
        load_tail(x_tail, x[r] + i, piece.in_size - i, 16);
        for (size_t v = 0; v < kWordVectors; ++v)
          sums[r][q][v] = fma(load_f32(x_tail + v * kLanes), load_f32(weight_tail + v * kLanes),
                              sums[r][q][v]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r)
    for (size_t q = 0; q < kRanks; ++q) {
      const F32 total = fold(sums[r][q], [](F32 a, F32 b) TANDEM_INLINE { return a + b; });
      piece.low[(row + r) * piece.low_stride + rank + q] = total[0] * piece.scale;
    }
}

template <class T, size_t kRows>
TANDEM_INLINE inline void down_ranks(const LoraDown& piece, size_t row) {
  size_t rank = 0;
  for (; rank + kTileRanks <= piece.num_ranks; rank += kTileRanks)
    down_tile<T, kRows, kTileRanks>(piece, row, rank);
  for (; rank < piece.num_ranks; ++rank) down_tile<T, kRows, 1>(piece, row, rank);
}

template <class T>
void down_rows(const LoraDown& piece) {
  size_t row = 0;
  for (; row + kTileRows <= piece.num_rows; row += kTileRows) down_ranks<T, kTileRows>(piece, row);
  if constexpr (kTileRows > 2)
    for (; row + 2 <= piece.num_rows; row += 2) down_ranks<T, 2>(piece, row);
  for (; row < piece.num_rows; ++row) down_ranks<T, 1>(piece, row);
}

void lora_down(const LoraDown& piece) {
  if (piece.type == FloatType::kFloat32) return down_rows<float>(piece);
  down_rows<uint16_t>(piece);
}

template <class T, size_t kRows>
TANDEM_INLINE inline void up_tile(const LoraUp& piece, size_t row, size_t column) {
  const T* weights = static_cast<const T*>(piece.up) + column * piece.rank;
  const float* low = piece.low + row * piece.rank;
  F32 sums[kRows][kBlockVectors];
  for (size_t r = 0; r < kRows; ++r)
    for (size_t v = 0; v < kBlockVectors; ++v) sums[r][v] = zero_f32();
  for (size_t q = 0; q < piece.rank; ++q)
    for (size_t v = 0; v < kBlockVectors; ++v) {
      const F32 weight = load_wide(weights + q * kBlock + v * kLanes);
      for (size_t r = 0; r < kRows; ++r)
        sums[r][v] = fma(set_f32(low[r * piece.rank + q]), weight, sums[r][v]);
    }
  const size_t count = piece.num_columns - column;
  for (size_t r = 0; r < kRows; ++r) {
    float* out =
        piece.sums + static_cast<size_t>(piece.rows[row + r]) * piece.sums_stride + column;
    if (count >= kBlock) {
      for (size_t v = 0; v < kBlockVectors; ++v)
        store_f32(out + v * kLanes, load_f32(out + v * kLanes) + sums[r][v]);
      continue;
    }
    float tail[kBlock];
    for (size_t v = 0; v < kBlockVectors; ++v) store_f32(tail + v * kLanes, sums[r][v]);
    for (size_t i = 0; i < count; ++i) out[i] += tail[i];
  }
}

template <class T>
void up_rows(const LoraUp& piece) {
  for (size_t column = 0; column < piece.num_columns; column += kBlock) {
    size_t row = 0;
    for (; row + kUpRows <= piece.num_rows; row += kUpRows) up_tile<T, kUpRows>(piece, row, column);
    if constexpr (kUpRows > 2)
      for (; row + 2 <= piece.num_rows; row += 2) up_tile<T, 2>(piece, row, column);
    for (; row < piece.num_rows; ++row) up_tile<T, 1>(piece, row, column);
  }
}

void lora_up(const LoraUp& piece) {
  if (piece.type == FloatType::kFloat32) return up_rows<float>(piece);
  up_rows<uint16_t>(piece);
}

template <class T>
void round_rows(const RoundTask& task, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row)
    for (size_t head = 0; head < task.num_heads; ++head) {
      const float* sums = task.sums + row * task.sums_stride + head * task.sums_head_stride;
      T* out = static_cast<T*>(task.out) + row * task.out_stride + head * task.out_head_stride;
      if (task.is_added) {
        add_row(out, sums, task.size);
        continue;
      }
      size_t i = 0;
      for (; i + kLanes <= task.size; i += kLanes) store_narrow(out + i, load_f32(sums + i));
      for (; i < task.size; ++i) narrow_one(out + i, sums[i]);
    }
}

void round_sums(const RoundTask& task, size_t begin, size_t end) {
  if (task.out_type == FloatType::kFloat32) return round_rows<float>(task, begin, end);
  round_rows<uint16_t>(task, begin, end);
}
