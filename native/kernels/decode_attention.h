// Attention of sequences that compute one token each, straight from the block-major KV pool.
//
// Reading blocks where they lie saves the copy that a gather makes, which is as large as all the
// keys and values of the step. One task is one (sequence, KV head): the queries that share the
// head share every load. Sums have one fixed order over 16 lanes and multiply and add are rounded
// separately, so a result is bitwise the same alone and in company, for any number of threads and
// on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kernels/isa.h"

namespace tandem {

enum class FloatType { kFloat32, kBfloat16 };

// The pool and the sequences of one step; all pointers are borrowed for the call.
struct DecodeStep {
  const void* kv = nullptr;  // [blocks, layers, 2, kv_heads, block_size, head_dim], contiguous.
  FloatType kv_type = FloatType::kFloat32;
  size_t num_layers = 0;
  size_t num_kv_heads = 0;
  size_t block_size = 0;
  size_t head_dim = 0;
  const int64_t* block_table = nullptr;  // [num_sequences, table_width]; ids were checked.
  size_t table_width = 0;
  const int64_t* context_lens = nullptr;  // Each at least 1 and within the table.
  size_t num_sequences = 0;
};

// One layer's queries and where their result goes.
struct DecodeQueries {
  const void* q = nullptr;  // [num_sequences, num_heads, head_dim], rows `q_stride` items apart.
  void* out = nullptr;      // The same shape, contiguous, same type.
  FloatType type = FloatType::kFloat32;
  size_t q_stride = 0;
  size_t num_heads = 0;
  size_t layer_idx = 0;
  float scale = 1.0f;
};

// Runs the tasks [begin, end) of num_sequences * num_kv_heads.
using DecodeAttentionKernel = void (*)(const DecodeStep&, const DecodeQueries&, size_t begin,
                                       size_t end);

// The kernel for an ISA of `available_isas()`.
DecodeAttentionKernel choose_decode_attention(Isa isa);

// Runs all tasks, on `pool` if it is given and the step is large enough to share.
Status run_decode_attention(DecodeAttentionKernel kernel, ThreadPool* pool, const DecodeStep& step,
                            const DecodeQueries& queries);

}  // namespace tandem
