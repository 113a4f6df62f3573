// The body of the short convolution; see short_conv.h. Included inside the variant's anonymous namespace.

// Number of tokens of a tile. A block keeps the products B * x of a tile, and those that the
// sequence carries from before.
inline constexpr size_t kConvTokens = 32;

template <class T>
inline F32 round_like(F32 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  return as_f32(round_bf16(x) & static_cast<int32_t>(0xffff0000u));
}

// Loads `count` items, filled up with zeros if they are fewer than a register's.
template <class T>
inline F32 load_part(const T* x, size_t count) {
  if (count >= kLanes) return load_wide(x);
  float tail[kLanes];
  load_tail(tail, x, count, kLanes);
  return load_f32(tail);
}

template <class T>
inline void store_part(T* out, F32 x, size_t count) {
  if (count >= kLanes) return store_narrow(out, x);
  float tail[kLanes];
  store_f32(tail, x);
  for (size_t i = 0; i < count; ++i) narrow_one(out + i, tail[i]);
}

template <class T>
void run_conv_item(const ShortConvTask& task, const ShortConvItem& item) {
  const size_t width = task.conv_width, kept = width - 1, channels = task.num_channels;
  const size_t begin = static_cast<size_t>(task.query_start[item.sequence]);
  const size_t count = static_cast<size_t>(task.query_start[item.sequence + 1]) - begin;
  const size_t slot = static_cast<size_t>(task.slots[item.sequence]);
  T* carried = static_cast<T*>(task.carried) + slot * task.carried_stride + item.first;
  const T* x = static_cast<const T*>(task.x) + begin * task.x_stride + item.first;
  T* out = static_cast<T*>(task.out) + begin * task.out_stride + item.first;
  const float* weight = task.conv + item.first;
  const float* bias = task.bias == nullptr ? nullptr : task.bias + item.first;
  float products[kMaxConvWidth - 1 + kConvTokens][kConvBlock];
  for (size_t j = 0; j < kept; ++j)
    for (size_t i = 0; i < item.size; i += kLanes)
      store_f32(products[j] + i, load_part(carried + j * channels + i, item.size - i));
  for (size_t first = 0; first < count; first += kConvTokens) {
    const size_t num_tokens = count - first < kConvTokens ? count - first : kConvTokens;
    for (size_t t = 0; t < num_tokens; ++t) {
      const T* row = x + (first + t) * task.x_stride;
      for (size_t i = 0; i < item.size; i += kLanes) {
        const size_t rest = item.size - i;
        const F32 product = load_part(row + i, rest) * load_part(row + 2 * channels + i, rest);
        store_f32(products[kept + t] + i, round_like<T>(product));
      }
      for (size_t i = 0; i < item.size; i += kLanes) {
        const size_t rest = item.size - i;
        F32 sum = load_f32(products[t] + i) * load_part(weight + i, rest);
        for (size_t j = 1; j < width; ++j)
          sum = fma(load_f32(products[t + j] + i), load_part(weight + j * channels + i, rest), sum);
        if (bias != nullptr) sum = sum + load_part(bias + i, rest);
        store_part(out + (first + t) * task.out_stride + i,
                   load_part(row + channels + i, rest) * sum, rest);
      }
    }
    for (size_t j = 0; j < kept; ++j)
      __builtin_memmove(products[j], products[num_tokens + j], sizeof products[j]);
  }
  for (size_t j = 0; j < kept; ++j)
    for (size_t i = 0; i < item.size; i += kLanes)
      store_part(carried + j * channels + i, load_f32(products[j] + i), item.size - i);
}

void short_conv(const ShortConvTask& task, const ShortConvItem& item) {
  if (task.type == FloatType::kFloat32) return run_conv_item<float>(task, item);
  run_conv_item<uint16_t>(task, item);
}
