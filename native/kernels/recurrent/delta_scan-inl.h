// The recurrence alone, and its gradients. Included inside the variant's anonymous namespace by gated_delta-inl.h.

// Copies the rows of a tile, filled up with zeros.
inline void copy_rows(float* out, size_t out_stride, const float* x, size_t x_stride, size_t size,
                      size_t num_rows) {
  for (size_t t = 0; t < num_rows; ++t) {
    float* row = out + t * out_stride;
    for (size_t i = 0; i < size; ++i) row[i] = x[t * x_stride + i];
    for (size_t i = size; i < out_stride; ++i) row[i] = 0.0f;
  }
}

void scan_head(const DeltaScanTask& task, size_t head, float* scratch) {
  const GatedDeltaShape& shape = task.shape;
  const size_t heads = shape.num_v_heads, k_head = head / (heads / shape.num_k_heads);
  const size_t key_step = shape.num_k_heads * shape.key_dim, value_step = heads * shape.value_dim;
  const size_t key_stride = key_stride_of(shape), value_stride = value_stride_of(shape);
  const size_t all_decays = all_decays_of(shape);
  DeltaTile tile = split_scratch(shape, scratch);
  float* state = task.state + head * num_panels_of(shape) * shape.key_dim * kStatePanel;
  for (size_t first = 0; first < task.num_tokens; first += kDeltaTokens) {
    const size_t left = task.num_tokens - first, count = left < kDeltaTokens ? left : kDeltaTokens;
    const size_t key_place = first * key_step + k_head * shape.key_dim;
    copy_rows(tile.queries, key_stride, task.queries + key_place, key_step, shape.key_dim, count);
    copy_rows(tile.keys, key_stride, task.keys + key_place, key_step, shape.key_dim, count);
    const size_t value_place = first * value_step + head * shape.value_dim;
    copy_rows(tile.values, value_stride, task.values + value_place, value_step, shape.value_dim,
              count);
    for (size_t t = 0; t < count; ++t) {
      tile.decay[t] = task.decay[(first + t) * all_decays + head * shape.num_decays];
      tile.beta[t] = task.beta[(first + t) * heads + head];
      tile.product[t] =
          dot_block(tile.queries + t * key_stride, tile.keys + t * key_stride, key_stride);
    }
    if (decays_by_item(shape)) {
      copy_rows(tile.decays, key_stride, task.decay + first * all_decays + head * shape.key_dim,
                all_decays, shape.key_dim, count);
      decay_rows(key_stride, count, tile);
    }
    pass_head(shape, state, tile, count);
    for (size_t t = 0; t < count; ++t)
      for (size_t i = 0; i < shape.value_dim; ++i)
        task.out[value_place + t * value_step + i] = tile.values[t * value_stride + i];
  }
}

// Number of vectors in one row of a state's panel.
inline constexpr size_t kRowVectors = kStatePanel / kLanes;

// Returns the sum of each row of a square of kLanes x kLanes floats, one in each lane.
TANDEM_INLINE inline F32 sum_rows(const F32 (&rows)[kLanes]) {
  I32 square[kLanes];
  for (size_t i = 0; i < kLanes; ++i) square[i] = as_i32(rows[i]);
  transpose(square);
  F32 sum = as_f32(square[0]);
  for (size_t i = 1; i < kLanes; ++i) sum = sum + as_f32(square[i]);
  return sum;
}

inline void load_row(F32 (&v)[kRowVectors], const float* p) {
  for (size_t i = 0; i < kRowVectors; ++i) v[i] = load_f32(p + i * kLanes);
}
inline void load_values(F32 (&v)[kRowVectors], const float* p, size_t count) {
  float whole[kStatePanel];
  load_tail(whole, p, count, kStatePanel);
  load_row(v, whole);
}
inline float sum_columns(const F32 (&v)[kRowVectors]) {
  float sums[kStatePanel], total = 0.0f;
  for (size_t i = 0; i < kRowVectors; ++i) store_f32(sums + i * kLanes, v[i]);
  for (size_t i = 0; i < kStatePanel; ++i) total += sums[i];
  return total;
}

// The inputs of one token for one value head.
struct ScanToken {
  const float* query;
  const float* key;
  F32 values[kRowVectors];
  const float* decays;  // One, or one for each item of the key.
  float beta;
};

// Computes next = decay state + key (beta gap)^T, where gap = values - decay state^T key; `next`
// may be `state`.
template <bool kByItem>
inline void step_state(const ScanToken& token, size_t key_dim, const float* state, float* next,
                       float* gaps) {
  F32 sums[kRowVectors], update[kRowVectors];
  for (size_t v = 0; v < kRowVectors; ++v) sums[v] = zero_f32();
  for (size_t i = 0; i < key_dim; ++i) {
    const F32 k = set_f32(kByItem ? token.key[i] * token.decays[i] : token.key[i]);
    for (size_t v = 0; v < kRowVectors; ++v)
      sums[v] = fma(load_f32(state + i * kStatePanel + v * kLanes), k, sums[v]);
  }
  const F32 share = set_f32(kByItem ? 1.0f : token.decays[0]), beta = set_f32(token.beta);
  for (size_t v = 0; v < kRowVectors; ++v) {
    const F32 gap = fma(zero_f32() - share, sums[v], token.values[v]);
    store_f32(gaps + v * kLanes, gap);
    update[v] = beta * gap;
  }
  for (size_t i = 0; i < key_dim; ++i) {
    const F32 k = set_f32(token.key[i]), decay = set_f32(token.decays[kByItem ? i : 0]);
    for (size_t v = 0; v < kRowVectors; ++v) {
      const size_t place = i * kStatePanel + v * kLanes;
      store_f32(next + place, fma(k, update[v], load_f32(state + place) * decay));
    }
  }
}

// The contributions of one token to the gradients of its key, its query and its gates.
struct TokenSlopes {
  float* d_query;
  float* d_key;
  float* d_decays;  // As many as a token has.
  float d_beta;
  F32 d_values[kRowVectors];
};

// Moves the gradient of the state backwards over one token: `slope` is first the gradient of
// `next`, then that of `state`.
template <bool kByItem>
inline void step_slope(const ScanToken& token, size_t key_dim, const float* state,
                       const float* next, const float* gaps, const F32 (&d_out)[kRowVectors],
                       float* slope, TokenSlopes& slopes) {
  F32 d_update[kRowVectors], d_seen[kRowVectors], update[kRowVectors];
  for (size_t v = 0; v < kRowVectors; ++v) d_update[v] = zero_f32();
  // First the part that comes from the gradient of the output, next^T query.
  for (size_t first = 0; first < key_dim; first += kLanes) {
    const size_t count = key_dim - first < kLanes ? key_dim - first : kLanes;
    F32 rows[kLanes];
    for (size_t i = 0; i < kLanes; ++i) rows[i] = zero_f32();
    for (size_t i = 0; i < count; ++i) {
      const F32 q = set_f32(token.query[first + i]), k = set_f32(token.key[first + i]);
      const size_t place = (first + i) * kStatePanel;
      for (size_t v = 0; v < kRowVectors; ++v) {
        const F32 d = fma(q, d_out[v], load_f32(slope + place + v * kLanes));
        store_f32(slope + place + v * kLanes, d);
        d_update[v] = fma(d, k, d_update[v]);
        rows[i] = fma(load_f32(next + place + v * kLanes), d_out[v], rows[i]);
      }
    }
    float sums[kLanes];
    store_f32(sums, sum_rows(rows));
    for (size_t i = 0; i < count; ++i) slopes.d_query[first + i] += sums[i];
  }
  F32 d_beta[kRowVectors], d_decay[kRowVectors];
  const F32 beta = set_f32(token.beta);
  for (size_t v = 0; v < kRowVectors; ++v) {
    const F32 gap = load_f32(gaps + v * kLanes);
    d_beta[v] = d_update[v] * gap;
    update[v] = beta * gap;
    slopes.d_values[v] = beta * d_update[v];
    d_seen[v] = zero_f32() - slopes.d_values[v];  // Of decay state^T key.
    d_decay[v] = zero_f32();
  }
  for (size_t first = 0; first < key_dim; first += kLanes) {
    const size_t count = key_dim - first < kLanes ? key_dim - first : kLanes;
    F32 rows[kLanes], decayed[kLanes];  // Products of a row with what its items add to each slope.
    for (size_t i = 0; i < kLanes; ++i) rows[i] = decayed[i] = zero_f32();
    for (size_t i = 0; i < count; ++i) {
      const F32 k = set_f32(token.key[first + i]);
      const F32 decay = set_f32(token.decays[kByItem ? first + i : 0]);
      const size_t place = (first + i) * kStatePanel;
      for (size_t v = 0; v < kRowVectors; ++v) {
        const F32 d = load_f32(slope + place + v * kLanes);
        const F32 s = load_f32(state + place + v * kLanes);
        rows[i] = fma(d, update[v], fma(s, decay * d_seen[v], rows[i]));
        const F32 d_decayed = fma(k, d_seen[v], d);
        F32& d_own = kByItem ? decayed[i] : d_decay[v];
        d_own = fma(s, d_decayed, d_own);
        store_f32(slope + place + v * kLanes, decay * d_decayed);
      }
    }
    float sums[kLanes];
    store_f32(sums, sum_rows(rows));
    for (size_t i = 0; i < count; ++i) slopes.d_key[first + i] += sums[i];
    if constexpr (kByItem) {
      store_f32(sums, sum_rows(decayed));
      for (size_t i = 0; i < count; ++i) slopes.d_decays[first + i] += sums[i];
    }
  }
  if constexpr (!kByItem) slopes.d_decays[0] += sum_columns(d_decay);
  slopes.d_beta = sum_columns(d_beta);
}

// Computes the gradients of one panel of a value head: all tokens forwards, keeping the state
// before each tile, then the tiles backwards.
template <bool kByItem>
inline void panel_gradients(const DeltaScanTask& task, const DeltaScanGradients& gradients,
                            size_t head, size_t panel, float* scratch) {
  const GatedDeltaShape& shape = task.shape;
  const size_t heads = shape.num_v_heads, key_dim = shape.key_dim, size = panel_floats(shape);
  const size_t k_head = head / (heads / shape.num_k_heads);
  const size_t first_column = panel * kStatePanel, left = shape.value_dim - first_column;
  const size_t columns = left < kStatePanel ? left : kStatePanel;
  const GradientTile tile = split_gradients(shape, task.num_tokens, scratch);
  const auto value_place = [&](size_t t) {
    return (t * heads + head) * shape.value_dim + first_column;
  };
  const auto find_token = [&](size_t t) {
    const size_t place = (t * shape.num_k_heads + k_head) * key_dim;
    ScanToken token;
    token.query = task.queries + place;
    token.key = task.keys + place;
    token.decays = task.decay + (t * heads + head) * shape.num_decays;
    token.beta = task.beta[t * heads + head];
    load_values(token.values, task.values + value_place(t), columns);
    return token;
  };
  const float* start = task.state + (head * num_panels_of(shape) + panel) * size;
  float* state = tile.states;
  for (size_t i = 0; i < size; ++i) state[i] = start[i], tile.slope[i] = 0.0f;
  for (size_t t = 0; t < task.num_tokens; ++t) {
    if (t % kDeltaTokens == 0) {
      float* kept = tile.starts + t / kDeltaTokens * size;
      for (size_t i = 0; i < size; ++i) kept[i] = state[i];
    }
    step_state<kByItem>(find_token(t), key_dim, state, state, tile.gaps);
  }
  for (size_t number = num_tiles_of(task.num_tokens); number-- > 0;) {
    const size_t first = number * kDeltaTokens, rest = task.num_tokens - first;
    const size_t count = rest < kDeltaTokens ? rest : kDeltaTokens;
    for (size_t i = 0; i < size; ++i) tile.states[i] = tile.starts[number * size + i];
    for (size_t t = 0; t < count; ++t)
      step_state<kByItem>(find_token(first + t), key_dim, tile.states + t * size,
                          tile.states + (t + 1) * size, tile.gaps + t * kStatePanel);
    for (size_t t = count; t-- > 0;) {
      const size_t place = (first + t) * heads + head;
      F32 d_out[kRowVectors];
      load_values(d_out, gradients.d_out + value_place(first + t), columns);
      TokenSlopes slopes;
      slopes.d_query = gradients.d_queries + place * key_dim;
      slopes.d_key = gradients.d_keys + place * key_dim;
      slopes.d_decays = gradients.d_decay + place * shape.num_decays;
      step_slope<kByItem>(find_token(first + t), key_dim, tile.states + t * size,
                          tile.states + (t + 1) * size, tile.gaps + t * kStatePanel, d_out,
                          tile.slope, slopes);
      gradients.d_beta[place] += slopes.d_beta;
      float d_values[kStatePanel];
      for (size_t v = 0; v < kRowVectors; ++v) store_f32(d_values + v * kLanes, slopes.d_values[v]);
      for (size_t i = 0; i < columns; ++i)
        gradients.d_values[value_place(first + t) + i] = d_values[i];
    }
  }
}

void scan_gradients(const DeltaScanTask& task, const DeltaScanGradients& gradients, size_t head,
                    float* scratch) {
  const size_t heads = task.shape.num_v_heads, key_dim = task.shape.key_dim;
  const size_t num_decays = task.shape.num_decays;
  for (size_t t = 0; t < task.num_tokens; ++t) {
    const size_t place = t * heads + head;
    for (size_t i = 0; i < key_dim; ++i)
      gradients.d_queries[place * key_dim + i] = gradients.d_keys[place * key_dim + i] = 0.0f;
    for (size_t i = 0; i < num_decays; ++i) gradients.d_decay[place * num_decays + i] = 0.0f;
    gradients.d_beta[place] = 0.0f;
  }
  const auto run = decays_by_item(task.shape) ? panel_gradients<true> : panel_gradients<false>;
  for (size_t panel = 0; panel < num_panels_of(task.shape); ++panel)
    run(task, gradients, head, panel, scratch);
}
