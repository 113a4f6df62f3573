// Scores of keys by an index. Included by attention-inl.h, after the products of tiles.

// Sums the products of a tile by token, over the token's heads in ascending order.
inline void sum_heads(const ScoreTask& task, const float* key_scales, size_t tile) {
  for (size_t t = 0; t < task.num_tokens; ++t) {
    const float* weights = task.weights + t * task.weight_stride;
    const float* scores = task.scratch.scores + t * task.num_heads * kTile;
    float* out = task.out + t * task.out_stride + tile;
    for (size_t i = 0; i < kTile; i += kLanes) {
      F32 sum = zero_f32();
      for (size_t head = 0; head < task.num_heads; ++head) {
        const F32 score = load_f32(scores + head * kTile + i);
        const F32 positive = score > zero_f32() ? score : zero_f32();
        sum = fma(positive, set_f32(weights[head] * task.scale), sum);
      }
      if (key_scales != nullptr) sum = sum * load_f32(key_scales + i);
      // Add a zero, which turns -0 into +0: zeros of both signs are equal and must be ordered as
      // equal.
      store_f32(out + i, sum + zero_f32());
    }
  }
}

template <class Op>
void score_rows(const ScoreTask& task) {
  const KvView& kv = *task.rows.kv;
  const size_t steps = (kv.key_dim + Op::kItems - 1) / Op::kItems;
  const bool has_scales = kv.type == KvType::kFp8 || kv.type == KvType::kInt8;
  TileRowsOf keys;
  Ahead ahead;
  if (task.key_begin < task.key_end) {
    find_ahead(task.rows, task.key_begin, task.key_end - task.key_begin, ahead);
    ahead.fetch_rest();
  }
  for (size_t tile = task.key_begin; tile < task.key_end; tile += kTile) {
    const size_t count = min_of(kTile, task.key_end - tile);
    find_rows(task.rows, tile, count, false, keys);
    const size_t after = tile + kTile;
    find_ahead(task.rows, after, after < task.key_end ? task.key_end - after : 0, ahead);
    pack_tile<Op>(kv, keys, count, false, task.scratch.keys, ahead);
    multiply<Op, true>({static_cast<const uint8_t*>(task.queries), steps * 4,
                        static_cast<const uint8_t*>(task.scratch.keys), kTile * 4, steps,
                        task.scratch.scores, kTile, nullptr, &ahead},
                       task.num_tokens * task.num_heads, kTile);
    sum_heads(task, has_scales ? keys.scales : nullptr, tile);
    ahead.fetch_rest();
  }
}

void score(const ScoreTask& task) {
  if (task.is_bf16) return score_rows<Bf16Operand>(task);
  score_rows<FloatOperand>(task);
}
