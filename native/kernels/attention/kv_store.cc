#include "kernels/attention/kv_store.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

namespace tandem {
namespace {

// Least number of items for which another thread is worth waking.
constexpr size_t kStoreChunkItems = 256 * 1024;

float widen(float x) { return x; }
float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>(
      (x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u) >> 16);
}

// Rounds a float to `mantissa_bits` of mantissa, to nearest even; its exponent was moved to the
// narrow type's before.
uint32_t round_to(float rebased, int mantissa_bits) {
  const int dropped = 23 - mantissa_bits;
  const uint32_t bits = bits_of(rebased) & 0x7fffffffu;
  return (bits + (1u << (dropped - 1)) - 1 + ((bits >> dropped) & 1u)) >> dropped;
}

// Rounds a positive float of at most 65504 to fp16. The exponent is moved by a multiplication,
// whose result is denormal if the fp16 number is: rounding drops the same bits in both.
uint16_t to_half(float x) { return static_cast<uint16_t>(round_to(x * 0x1p-112f, 10)); }
float from_half(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value * 0x1p112f;
}

constexpr uint16_t kHalfNan = 0x7e00;
constexpr float kLargestHalf = 65504.0f;

// Rounds a float to e4m3; its magnitude is at most 448, up to rounding.
uint8_t to_fp8(float x) {
  const uint32_t magnitude = std::min(round_to(x * 0x1p-120f, 3), 0x7eu);
  return static_cast<uint8_t>(magnitude | (bits_of(x) >> 24 & 0x80u));
}

template <class T>
void store_row(KvType type, const T* from, size_t size, uint8_t* to, uint8_t* scale_to) {
  if (type == KvType::kFloat32) {
    float* out = reinterpret_cast<float*>(to);
    for (size_t i = 0; i < size; ++i) out[i] = widen(from[i]);
    return;
  }
  if (type == KvType::kBfloat16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(to);
    if constexpr (sizeof(T) == 2)
      std::memcpy(out, from, size * 2);
    else
      for (size_t i = 0; i < size; ++i) out[i] = to_bf16(from[i]);
    return;
  }
  const float largest_code = type == KvType::kInt8 ? 127.0f : 448.0f;
  float amax = 0.0f;
  bool is_finite = true;
  for (size_t i = 0; i < size; ++i) {
    const float x = std::fabs(widen(from[i]));
    is_finite &= x <= 3.402823466e38f;
    amax = std::max(amax, x);
  }
  uint16_t half = kHalfNan;
  if (is_finite) half = to_half(std::min(amax / largest_code, kLargestHalf));
  std::memcpy(scale_to, &half, 2);
  const float scale = is_finite ? from_half(half) : 0.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (size_t i = 0; i < size; ++i) {
    // Limit the code: the rounded scale may be a little too small for the largest item.
    const float x = is_finite ? widen(from[i]) * inverse : 0.0f;
    const float code = std::clamp(x, -largest_code, largest_code);
    to[i] = type == KvType::kInt8
                ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyintf(code)))
                : to_fp8(code);
  }
}

template <class T>
void store_tokens(const AttentionStep& step, const KvRows& rows, size_t begin, size_t end) {
  const KvView& kv = step.kv;
  const size_t kinds = kv.value_offset == 0 ? 1 : 2;
  size_t sequence = 0;
  for (size_t token = begin; token < end; ++token) {
    while (static_cast<size_t>(step.query_start[sequence + 1]) <= token) ++sequence;
    const size_t position = static_cast<size_t>(step.context_lens[sequence] -
                                                step.query_start[sequence + 1]) + token;
    const size_t offset = position % kv.block_size;
    const size_t block_id = static_cast<size_t>(
        step.block_table[sequence * step.table_width + position / kv.block_size]);
    uint8_t* layer = const_cast<uint8_t*>(kv.base) + block_id * kv.block_bytes +
                     rows.layer_offset;
    const T* from = static_cast<const T*>(rows.keys) + token * rows.stride;
    for (size_t kind = 0; kind < kinds; ++kind) {
      const size_t size = kind == 0 ? kv.key_dim : kv.value_dim;
      for (size_t head = 0; head < kv.num_kv_heads; ++head, from += size) {
        uint8_t* to = layer + kind * kv.value_offset + head * kv.head_bytes + offset * kv.row_bytes;
        uint8_t* scale = layer + (kind == 0 ? kv.key_scale_offset : kv.value_scale_offset) +
                         (head * kv.block_size + offset) * 2;
        store_row(kv.type, from, size, to, scale);
      }
    }
  }
}

}  // namespace

Status store_kv(ThreadPool* pool, const AttentionStep& step, const KvRows& rows) {
  const KvView& kv = step.kv;
  const size_t num_tokens = static_cast<size_t>(step.query_start.back());
  const size_t row_items = (kv.key_dim + kv.value_dim) * kv.num_kv_heads;
  const size_t chunk = kStoreChunkItems / (row_items + 1) + 1;
  const auto body = [&](size_t begin, size_t end, int) {
    if (rows.type == FloatType::kFloat32)
      store_tokens<float>(step, rows, begin, end);
    else
      store_tokens<uint16_t>(step, rows, begin, end);
  };
  if (pool == nullptr || num_tokens < 2 * chunk) {
    body(0, num_tokens, 0);
    return {};
  }
  return pool->parallel_for(num_tokens, chunk, body);
}

Status read_kv(ThreadPool* pool, const KvView& kv, size_t layer_offset, uint64_t& sum) {
  std::atomic<uint64_t> total{0};
  const auto body = [&](size_t begin, size_t end, int) {
    uint64_t words[8] = {};
    for (size_t block = begin; block < end; ++block) {
      const uint8_t* p = kv.base + block * kv.block_bytes + layer_offset;
      for (size_t i = 0; i + sizeof words <= kv.layer_bytes; i += sizeof words) {
        uint64_t line[8];
        std::memcpy(line, p + i, sizeof line);
        for (size_t w = 0; w < 8; ++w) words[w] += line[w];
      }
    }
    for (const uint64_t word : words) total.fetch_add(word, std::memory_order_relaxed);
  };
  Status status;
  if (pool == nullptr)
    body(0, kv.num_blocks, 0);
  else
    status = pool->parallel_for(kv.num_blocks, 4, body);
  sum = total.load();
  return status;
}

}  // namespace tandem
