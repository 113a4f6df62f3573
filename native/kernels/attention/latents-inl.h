// Multi-head latent attention's rows of queries and keys. Included by row_ops-inl.h, after
// rotate_head and scale_row.

template <class T>
inline void rotate_tail(T* out, const T* x, const T* cos, const T* sin, size_t size) {
  float values[kMaxHeadDim];
  for (size_t i = 0; i < size; ++i) values[i] = widen_one(x[i]);
  rotate_head(out, values, cos, sin, size / 2, size);
}

template <class T>
void latent_rows(const LatentsTask& task, size_t begin, size_t end) {
  const size_t width = task.rank + task.rotary_size;
  for (size_t row = begin; row < end; ++row) {
    const T* cos = static_cast<const T*>(task.cos) + row * task.angle_stride;
    const T* sin = static_cast<const T*>(task.sin) + row * task.angle_stride;
    const T* q = static_cast<const T*>(task.q) + row * task.q_stride;
    const T* kv = static_cast<const T*>(task.kv) + row * task.kv_stride;
    T* out = static_cast<T*>(task.out) + row * task.out_stride;
    const size_t plain = task.head_dim - task.rotary_size;
    for (size_t head = 0; head < task.num_heads; ++head)
      rotate_tail(out + head * width + task.rank, q + head * task.head_dim + plain, cos, sin,
                  task.rotary_size);
    T* key = out + task.num_heads * width;
    const float factor = inverse_rms(kv, task.rank, task.eps);
    scale_row(key, kv, factor, static_cast<const T*>(task.weight), 0.0f, task.rank);
    rotate_tail(key + task.rank, kv + task.rank, cos, sin, task.rotary_size);
  }
}

void latents(const LatentsTask& task, size_t begin, size_t end) {
  if (task.type == FloatType::kFloat32) return latent_rows<float>(task, begin, end);
  latent_rows<uint16_t>(task, begin, end);
}
