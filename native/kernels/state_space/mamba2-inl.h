// The body of Mamba2's state space; see mamba2.h. Included inside the variant's anonymous namespace.
//
// A tile of tokens passes over a panel of the state at a time. Tiles change no bit: each element and each column's sum
// go through the same operations, in the order of the items of B and C, even and odd ones apart.

// Computes the time steps and decays of a head for a tile's tokens.
template <class T>
inline void compute_steps(const Mamba2Task& task, size_t first_row, size_t num_tokens, size_t head,
                          Mamba2Tile& tile) {
  float dt[kMamba2Tokens];
  for (size_t t = 0; t < kMamba2Tokens; ++t) {
    const size_t row = first_row + (t < num_tokens ? t : 0);
    dt[t] = widen_one(static_cast<const T*>(task.dt)[row * task.dt_stride + head]);
  }
  const F32 rate = set_f32(task.weights.decay_rate[head]);
  const F32 bias = set_f32(task.weights.dt_bias[head]);
  const F32 low = set_f32(task.weights.dt_min), high = set_f32(task.weights.dt_max);
  for (size_t t = 0; t < kMamba2Tokens; t += kLanes) {
    const F32 raw = softplus(load_f32(dt + t) + bias);
    // The comparisons are written so that a NaN passes through.
    const F32 raised = raw < low ? low : raw;
    const F32 step = raised > high ? high : raised;
    store_f32(tile.dt + t, step);
    store_f32(tile.decay + t, exp_nonpositive(zero_f32() - rate * step));
  }
}

inline constexpr size_t kScanVectors = 2;
inline constexpr size_t kScanColumns = kScanVectors * kLanes;

template <int kChain>
TANDEM_INLINE inline void scan_row(float* row, F32 decay, const F32 (&update)[kScanVectors],
                                   float key, float query, F32 (&sums)[2][kScanVectors]) {
  const F32 k = set_f32(key), q = set_f32(query);
  unroll<kScanVectors>([&](auto index) TANDEM_INLINE {
    constexpr int v = decltype(index)::value;
    const F32 s = fma(k, update[v], load_f32(row + v * kLanes) * decay);
    store_f32(row + v * kLanes, s);
    sums[kChain][v] = fma(s, q, sums[kChain][v]);
  });
}

// Runs a tile's tokens over `kScanColumns` columns of a state; `values` become the outputs, in rows
// `stride` apart.
inline void scan_tokens(float* state, size_t state_dim, const Mamba2Tile& tile, size_t num_tokens,
                        float skip, float* values, size_t stride) {
  for (size_t t = 0; t < num_tokens; ++t) {
    const float* key = tile.keys + t * state_dim;
    const float* query = tile.queries + t * state_dim;
    const F32 decay = set_f32(tile.decay[t]), dt = set_f32(tile.dt[t]);
    float* row = values + t * stride;
    F32 update[kScanVectors], sums[2][kScanVectors];
    unroll<kScanVectors>([&](auto index) TANDEM_INLINE {
      constexpr int v = decltype(index)::value;
      update[v] = dt * load_f32(row + v * kLanes);
      sums[0][v] = sums[1][v] = zero_f32();
    });
    size_t i = 0;
    for (; i + 2 <= state_dim; i += 2) {
      scan_row<0>(state + i * kStatePanel, decay, update, key[i], query[i], sums);
      scan_row<1>(state + (i + 1) * kStatePanel, decay, update, key[i + 1], query[i + 1], sums);
    }
    if (i < state_dim) scan_row<0>(state + i * kStatePanel, decay, update, key[i], query[i], sums);
    unroll<kScanVectors>([&](auto index) TANDEM_INLINE {
      constexpr int v = decltype(index)::value;
      const F32 read = sums[0][v] + sums[1][v];
      store_f32(row + v * kLanes, fma(set_f32(skip), load_f32(row + v * kLanes), read));
    });
  }
}

template <class T>
void run_mamba2_item(const Mamba2Task& task, const Mamba2Item& item, float* scratch) {
  const Mamba2Shape& shape = task.shape;
  const size_t begin = static_cast<size_t>(task.query_start[item.sequence]);
  const size_t count = static_cast<size_t>(task.query_start[item.sequence + 1]) - begin;
  const size_t slot = static_cast<size_t>(task.slots[item.sequence]);
  const Convolution<T> conv = {
      task.weights.conv,
      task.weights.conv_bias,
      shape.conv_width,
      num_channels_of(shape),
      static_cast<const T*>(task.x) + begin * task.x_stride,
      task.x_stride,
      static_cast<const T*>(task.carried) + slot * task.carried_stride};
  const size_t values = num_values_of(shape), keys = shape.num_groups * shape.state_dim;
  const size_t value_stride = value_stride_of(shape);
  const size_t head_state = num_panels_of(shape) * shape.state_dim * kStatePanel;
  Mamba2Tile tile = split_scratch(shape, scratch);
  for (size_t first = 0; first < count; first += kMamba2Tokens) {
    const size_t num_tokens = count - first < kMamba2Tokens ? count - first : kMamba2Tokens;
    const size_t key_first = values + item.group * shape.state_dim;
    convolve(conv, first, num_tokens, key_first, shape.state_dim, tile.keys, shape.state_dim);
    convolve(conv, first, num_tokens, key_first + keys, shape.state_dim, tile.queries,
             shape.state_dim);
    for (size_t head = item.begin; head < item.end; ++head) {
      if (task.dt_type == FloatType::kFloat32)
        compute_steps<float>(task, begin + first, num_tokens, head, tile);
      else
        compute_steps<uint16_t>(task, begin + first, num_tokens, head, tile);
      convolve(conv, first, num_tokens, head * shape.head_dim, shape.head_dim, tile.values,
               value_stride);
      float* state = task.states + slot * task.state_stride + head * head_state;
      for (size_t column = 0; column < value_stride; column += kScanColumns) {
        float* panel = state + column / kStatePanel * shape.state_dim * kStatePanel;
        scan_tokens(panel + column % kStatePanel, shape.state_dim, tile, num_tokens,
                    task.weights.skip[head], tile.values + column, value_stride);
      }
      for (size_t t = 0; t < num_tokens; ++t)
        __builtin_memcpy(task.mixed + (begin + first + t) * values + head * shape.head_dim,
                         tile.values + t * value_stride, shape.head_dim * sizeof(float));
    }
  }
}

void mamba2(const Mamba2Task& task, const Mamba2Item& item, float* scratch) {
  if (task.type == FloatType::kFloat32) return run_mamba2_item<float>(task, item, scratch);
  run_mamba2_item<uint16_t>(task, item, scratch);
}

// Multiplies with the gate, then norms a group of a row.
template <class T>
void norm_group(const Mamba2Task& task, size_t row, size_t group) {
  const size_t all = num_values_of(task.shape), size = all / task.shape.num_groups;
  const size_t first = group * size;
  float* mixed = task.mixed + row * all + first;
  const T* z = static_cast<const T*>(task.z) + row * task.z_stride + first;
  const float* weight = task.weights.norm + first;
  T* out = static_cast<T*>(task.out) + row * task.out_stride + first;
  for (size_t i = 0; i < size; i += kLanes) {
    const size_t rest = size - i;
    store_part(mixed + i, load_part(mixed + i, rest) * silu(load_part(z + i, rest)), rest);
  }
  const F32 factor = set_f32(inverse_rms(mixed, size, task.weights.norm_eps));
  for (size_t i = 0; i < size; i += kLanes) {
    const size_t rest = size - i;
    store_part(out + i, load_part(mixed + i, rest) * factor * load_part(weight + i, rest), rest);
  }
}

void mamba2_norm(const Mamba2Task& task, size_t row, size_t group) {
  if (task.type == FloatType::kFloat32) return norm_group<float>(task, row, group);
  norm_group<uint16_t>(task, row, group);
}
