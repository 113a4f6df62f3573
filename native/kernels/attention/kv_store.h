// Putting a step's keys and values into their blocks, in the pool's type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/attention/attention.h"

namespace tandem {

// Keys and values of a step's tokens, by rows of heads: the keys of all KV heads, then the values.
// Of a latent pool (one head, values within keys) there are keys only.
struct KvRows {
  const void* keys = nullptr;  // Of token 0; tokens `stride` items apart.
  size_t stride = 0;
  FloatType type = FloatType::kFloat32;
  size_t layer_offset = 0;  // Bytes from a block's begin to the layer's keys.
};

// Writes them to the slots of the step's tokens, which are the last of each context. kInt8 gets
// codes of scale amax / 127, kFp8 (e4m3) of amax / 448, with the scale rounded to fp16 before the
// codes are; NaN and infinity give a NaN scale. REQUIRES: what the structs say.
Status store_kv(ThreadPool* pool, const AttentionStep& step, const KvRows& rows);

// Reads one layer of all blocks and does nothing with it: a ceiling for benchmarks. `sum` only
// keeps the reads.
Status read_kv(ThreadPool* pool, const KvView& kv, size_t layer_offset, uint64_t& sum);

}  // namespace tandem
