// Storing of a step's keys and values in their blocks, in the type of the KV pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/attention/attention.h"

namespace tandem {

// Keys and values of a step's tokens, one row of heads per token: the keys of all KV heads, then
// the values. For a pool of latents (one head, values within keys) there are only keys.
struct KvRows {
  const void* keys = nullptr;  // Of token 0; tokens `stride` items apart.
  size_t stride = 0;
  FloatType type = FloatType::kFloat32;
  size_t layer_offset = 0;  // Bytes from a block's begin to the layer's keys.
};

// Writes the rows to the slots of the step's tokens, which are the last ones of each context. kInt8
// stores codes with scale amax / 127, kFp8 (e4m3) with amax / 448; the scale is rounded to fp16
// before codes are computed from it. NaN and infinity give a NaN scale. REQUIRES: what the structs
// state.
Status store_kv(ThreadPool* pool, const AttentionStep& step, const KvRows& rows);

// Reads one layer of all blocks without computing anything, as a bound for benchmarks. `sum` only
// keeps the compiler from removing the reads.
Status read_kv(ThreadPool* pool, const KvView& kv, size_t layer_offset, uint64_t& sum);

}  // namespace tandem
